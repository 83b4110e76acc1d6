"""Matrix products of few rows, with the norm, gate or sum around them, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from slipstream.services.models.kernels.fp8 import (
    BLOCK,
    CHUNK,
    fetch_fp8,
    fp8_layout,
    fp8_linear,
    fp8_operands,
    fp8_sums,
    gather,
    halves,
    leave,
)
from slipstream.services.models.kernels.launching import fetch, overlapping, power_of_two, wait_for_previous

if TYPE_CHECKING:
    from slipstream.services.models.decoder import Linear, RMSNorm


LINE: tl.constexpr = tl.constexpr(64)
"""Numbers of bfloat16 in a line of the cache."""


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x: tl.tensor,  # [num_rows, SIZE]; rows times a norm's weight if IS_SCALED
    squares: tl.tensor,  # [PARTS, num_rows] float32: parts of the sums of the rows' squares, read if IS_SCALED
    weight: tl.tensor,  # [COLUMNS, SIZE]; [2 * COLUMNS, SIZE] if IS_GATED: gates, then what they are multiplied with
    scales: tl.tensor,  # of an FP8 weight, see `fp8_sums`; read if K_BLOCKS
    parts: tl.tensor,  # see `leave`; written and read if SLICES > 1
    arrivals: tl.tensor,  # the same
    bias: tl.tensor,  # [COLUMNS], or twice as many if IS_GATED; read if HAS_BIAS
    residual: tl.tensor,  # [num_rows, COLUMNS], read if HAS_RESIDUAL
    norm_weight: tl.tensor,  # [COLUMNS], of the norm that comes next; read if SCALES
    output: tl.tensor,  # [num_rows, COLUMNS], written
    scaled: tl.tensor,  # [num_rows, COLUMNS], written if SCALES: output times that weight
    squares_after: tl.tensor,  # [programs, num_rows] float32, written if SCALES: sums over each program's columns
    num_rows: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FETCHED: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """BLOCK_N columns of all rows, at most BLOCK_M. Grid: (cdiv(COLUMNS, BLOCK_N), SLICES).

    x @ weight.T + bias + residual, or silu(gate) * up. A norm needs the sum over a whole row, and a program has some of
    its columns: so the kernel that adds to the rows multiplies them by the next norm's weight and writes parts of their
    sums, and the next product divides by the root. A weight never changes: its first tile and FETCHED of its columns
    are prefetched while the kernels before still run, so that memory does not idle between two products. Several SLICES
    of SIZE are for FP8 weights alone.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < num_rows
    n_mask = n < COLUMNS
    weight_rows: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    behind: tl.constexpr = COLUMNS if IS_GATED else 0
    if K_BLOCKS > 0:
        if OVERLAPS and FETCHED > 0:
            fetch_fp8(weight, tl.program_id(0) * BLOCK_N, SIZE, behind, weight_rows, SLICES, FETCHED // BLOCK)
    else:
        first_mask = n_mask[:, None] & (k < SIZE)[None, :]
        w_at = weight + n.to(tl.int64)[:, None] * SIZE + k[None, :]
        x_at = x + m.to(tl.int64)[:, None] * SIZE + k[None, :]
        first = tl.load(w_at, mask=first_mask, other=0.0)
        if IS_GATED:
            first_up = tl.load(w_at + COLUMNS * SIZE, mask=first_mask, other=0.0)
        if OVERLAPS and FETCHED > 0:
            line = tl.arange(0, FETCHED // LINE) * LINE
            fetched_at = weight + tl.minimum(n, COLUMNS - 1).to(tl.int64)[:, None] * SIZE + line[None, :]
            fetch(fetched_at)
            if IS_GATED:
                fetch(fetched_at + COLUMNS * SIZE)
    wait_for_previous(OVERLAPS)
    if IS_SCALED:
        p = tl.arange(0, BLOCK_P)
        part_mask = (p < PARTS)[:, None] & m_mask[None, :]
        square_parts = tl.load(squares + p[:, None] * num_rows + m[None, :], mask=part_mask, other=0.0)
        scale = tl.rsqrt(tl.sum(square_parts, axis=0) / SIZE + eps)[:, None]
    if K_BLOCKS > 0:
        sums = fp8_sums(
            x, weight, scales, tl.program_id(0) * BLOCK_N, num_rows,
            SIZE, behind, K_BLOCKS, GROUP, BLOCK_M, weight_rows, SLICES, STAGES,
        )  # fmt: skip
        if SLICES > 1:
            is_last = leave(sums, parts, arrivals, num_rows, BLOCK_M, weight_rows, SLICES)
            if not is_last:
                return
            sums = gather(parts, arrivals, num_rows, BLOCK_M, weight_rows, SLICES)
        if IS_GATED:
            total, total_up = halves(sums, BLOCK_M, weight_rows)
        else:
            total = tl.trans(sums)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if IS_GATED:
            total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(BLOCK_K, SIZE, BLOCK_K, num_stages=STAGES):
            k_mask = k < SIZE - start
            mask = n_mask[:, None] & k_mask[None, :]
            tile = tl.load(x_at + start, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
            total = tl.dot(tile, tl.trans(tl.load(w_at + start, mask=mask, other=0.0)), total, input_precision="ieee")
            if IS_GATED:
                up = tl.load(w_at + COLUMNS * SIZE + start, mask=mask, other=0.0)
                total_up = tl.dot(tile, tl.trans(up), total_up, input_precision="ieee")
        tile = tl.load(x_at, mask=m_mask[:, None] & (k < SIZE)[None, :], other=0.0)
        total = tl.dot(tile, tl.trans(first), total, input_precision="ieee")
        if IS_GATED:
            total_up = tl.dot(tile, tl.trans(first_up), total_up, input_precision="ieee")
    if IS_SCALED:
        total *= scale
        if IS_GATED:
            total_up *= scale
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            total_up += tl.load(bias + COLUMNS + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        decay = tl.exp(-tl.abs(total))
        total = total * (tl.where(total >= 0.0, 1.0, decay) / (1.0 + decay)) * total_up
    at = m.to(tl.int64)[:, None] * COLUMNS + n[None, :]
    there = m_mask[:, None] & n_mask[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    result = total.to(output.dtype.element_ty)
    tl.store(output + at, result, mask=there)
    if SCALES:
        value = tl.where(there, result.to(tl.float32), 0.0)  # later layers add to the rounded value
        factor = tl.load(norm_weight + n, mask=n_mask, other=0.0).to(tl.float32)
        tl.store(scaled + at, (value * factor[None, :]).to(scaled.dtype.element_ty), mask=there)
        tl.store(squares_after + tl.program_id(0) * num_rows + m, tl.sum(value * value, axis=1), mask=m_mask)


MOST_ROWS = 64
"""cuBLAS is faster for more rows."""
_DTYPES = (torch.bfloat16,)
"""Float32 stays with cuBLAS, which is as exact as the CPU; in float16 a row times a norm's weight may overflow."""
_LEAST_SHARED_MEMORY = 200 << 10
"""Bytes that a program with the largest tiles takes."""
_MULTIPROCESSORS = 132
"""Multiprocessors of the GPU on which the tiles were measured; the same tiles everywhere keep results the same."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A normed input of a product, before the division by the root of the mean square."""

    x: torch.Tensor
    """[N, size]: the rows times the norm's weight."""
    squares: torch.Tensor
    """[parts, N] float32: parts of the sums of the rows' squares."""
    eps: float


def has_few_rows(x: torch.Tensor) -> bool:
    """True if `product` is the fastest way for [N, size]."""
    return 0 < len(x) <= MOST_ROWS and x.dtype in _DTYPES and _has_room_for_tiles(x.device)


@cache
def _has_room_for_tiles(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= _LEAST_SHARED_MEMORY


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `layer(x)` of [..., size] in the fastest way."""
    rows = x.reshape(-1, x.shape[-1])
    if has_few_rows(rows):
        result = product(rows.contiguous(), layer)
    elif layer.packed_fp8 is not None:
        result = fp8_linear(rows, layer)
    else:
        result = layer(rows)
    return result.view(*x.shape[:-1], result.shape[-1])


def product(x: torch.Tensor | Scaled, layer: Linear, *, is_gated: bool = False) -> torch.Tensor:
    """Computes `layer(x)`, or `silu(gate) * up` of its halves: [N, size], contiguous, to [N, columns].

    N is 1 to `MOST_ROWS`. Sums are float32 and rounded once, at the end.
    """
    return _launch(x, layer, is_gated=is_gated)[0]


def add_product(residual: torch.Tensor, x: torch.Tensor, layer: Linear, norm: RMSNorm) -> tuple[torch.Tensor, Scaled]:
    """Computes `residual + layer(x)`, [N, columns], rounded to its dtype, and the input of the next `product`."""
    summed, scaled, squares = _launch(x, layer, residual=residual, norm=norm)
    return summed, Scaled(scaled, squares, norm.eps)


def _launch(
    x: torch.Tensor | Scaled,
    layer: Linear,
    *,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.x if isinstance(x, Scaled) else x
    num_rows, size = rows.shape
    assert 0 < num_rows <= MOST_ROWS, f"{num_rows} rows, and a program takes {MOST_ROWS}"
    assert rows.is_contiguous(), "a kernel reads rows side by side"
    assert residual is None or residual.is_contiguous(), "a kernel reads rows side by side"
    if layer.scales is None:
        assert layer.weight is not None, "a weight is only given up where it is packed"
        weight, scales, arrivals = layer.weight.data, rows, rows
        num_outputs = len(weight)
    else:
        packed, scales = fp8_operands(layer)
        weight, arrivals, num_outputs = packed.bits, packed.arrivals, packed.num_rows
    columns = num_outputs // (2 if is_gated else 1)
    tile = (_tile if layer.scales is None else _fp8_tile)(num_rows, columns, size, is_gated=is_gated)
    num_programs = -(-columns // tile.block_n)
    sums = rows
    if tile.slices > 1:
        sums = rows.new_empty(tile.slices, tile.block_m, num_outputs, dtype=torch.float32)
    output = rows.new_empty(num_rows, columns)
    scaled = torch.empty_like(output) if norm is not None else output
    squares_after = rows.new_empty(num_programs, num_rows, dtype=torch.float32) if norm is not None else output
    parts = len(x.squares) if isinstance(x, Scaled) else 1
    product_kernel[num_programs, tile.slices](
        rows,
        x.squares if isinstance(x, Scaled) else rows,
        weight,
        scales,
        sums,
        arrivals,
        layer.bias if layer.bias is not None else rows,
        residual if residual is not None else rows,
        norm.weight if norm is not None else rows,
        output,
        scaled,
        squares_after,
        num_rows,
        x.eps if isinstance(x, Scaled) else 0.0,
        SIZE=size,
        COLUMNS=columns,
        PARTS=parts,
        **fp8_layout(layer),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SLICES=tile.slices,
        BLOCK_P=power_of_two(parts),
        FETCHED=tile.fetched,
        STAGES=tile.stages,
        IS_SCALED=isinstance(x, Scaled),
        IS_GATED=is_gated,
        HAS_BIAS=layer.bias is not None,
        HAS_RESIDUAL=residual is not None,
        SCALES=norm is not None,
        **overlapping(rows.device),
        num_warps=tile.num_warps,
        maxnreg=tile.most_registers,
    )
    return output, scaled, squares_after


@dataclass(frozen=True, slots=True)
class _Tile:
    block_m: int
    block_n: int
    block_k: int
    stages: int
    fetched: int = 0
    """Columns of the weight that are prefetched; of an FP8 weight, of each slice."""
    slices: int = 1
    """Programs that share the columns of an FP8 weight."""
    num_warps: int = 4
    most_registers: int | None = None
    """Registers of a thread."""


def _tile(num_rows: int, columns: int, size: int, *, is_gated: bool) -> _Tile:
    """Tiles as measured on an H200: a program for each multiprocessor where possible, with many loads in flight."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    is_narrow = columns <= 32 * _MULTIPROCESSORS
    if is_gated:
        tile = {16: _Tile(16, 32, 128, 5, 512), 32: _Tile(32, 64, 128, 3), 64: _Tile(64, 64, 64, 4, 256)}[block_m]
    elif is_narrow:
        block_n = 32 if columns > 16 * _MULTIPROCESSORS else 16
        is_deep = block_m == 16 and size >= 8192
        tile = _Tile(block_m, block_n, 512 if is_deep else 256, 4 if is_deep or block_m == 64 else 5)
    else:
        tile = _Tile(block_m, 64, 128, 5)
    block_k = min(tile.block_k, max(16, 1 << (size - 1).bit_length()))
    return replace(tile, block_k=block_k, fetched=tile.fetched if tile.fetched <= size // 4 else 0)


def _fp8_tile(num_rows: int, columns: int, size: int, *, is_gated: bool) -> _Tile:
    """The same for FP8 weights, measured in steps of an 8B model: the narrow products fill the GPU by their slices."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    if is_gated:
        tile = {
            16: _Tile(16, 64, 128, 3, 256, slices=2),
            32: _Tile(32, 64, 128, 4, 256, num_warps=8),
            64: _Tile(64, 64, 128, 3, 256, num_warps=8, most_registers=128),
        }[block_m]
    else:
        num_programs = columns // CHUNK.value
        tile = {
            16: _Tile(16, 64, 128, 4 if size >= 8192 else 3, 256, slices=6 * _MULTIPROCESSORS // num_programs),
            32: _Tile(32, 64, 128, 4, 256, slices=3 * _MULTIPROCESSORS // num_programs),
            64: _Tile(64, 64, 128, 3, 256, slices=3 * _MULTIPROCESSORS // num_programs, most_registers=168),
        }[block_m]
        if block_m == 16:
            tile = replace(tile, slices=power_of_two(tile.slices + 1) // 2)
    blocks = size // BLOCK.value
    blocks_per_slice = -(-blocks // max(1, tile.slices))
    slices = -(-blocks // blocks_per_slice)
    blocks_of_last = blocks - (slices - 1) * blocks_per_slice
    return replace(tile, slices=slices, fetched=tile.fetched if blocks_of_last * BLOCK.value >= tile.fetched else 0)
