"""Matrix products in one kernel with the norm, gate or sum around them: of few rows, and of many by tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
from slipstream.services.models.kernels.ints import fetch_ints, int_linear, int_sums
from slipstream.services.models.kernels.launching import (
    fetch,
    is_hopper,
    num_multiprocessors,
    overlapping,
    power_of_two,
    wait_for_previous,
)

if TYPE_CHECKING:
    from slipstream.services.models.decoder import RMSNorm
    from slipstream.services.models.linear import Linear


LINE: tl.constexpr = tl.constexpr(64)
"""Numbers of bfloat16 in a line of the cache."""


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x: tl.tensor,  # [num_rows, SIZE]; rows times a norm's weight if IS_SCALED
    squares: tl.tensor,  # [PARTS, num_rows] float32: parts of the sums of the rows' squares, read if IS_SCALED
    weight: tl.tensor,  # [COLUMNS, SIZE]; [2 * COLUMNS, SIZE] if IS_GATED: gates, then what they are multiplied with
    scales: tl.tensor,  # of an FP8 weight, see `fp8_sums`, or of a `PackedInts`; read if K_BLOCKS
    zeros: tl.tensor,  # of a `PackedInts`, read if HAS_ZEROS
    parts: tl.tensor,  # see `leave`; written and read if SLICES > 1
    arrivals: tl.tensor,  # the same
    bias: tl.tensor,  # [COLUMNS], or twice as many if IS_GATED; read if HAS_BIAS
    residual: tl.tensor,  # [num_rows, COLUMNS], read if HAS_RESIDUAL
    norm_weight: tl.tensor,  # [COLUMNS], of the next norm; read if SCALES
    output: tl.tensor,  # [num_rows, COLUMNS], written
    scaled: tl.tensor,  # [num_rows, COLUMNS], written if SCALES: output times that weight
    squares_after: tl.tensor,  # [programs, num_rows] float32, written if SCALES: sums over each program's columns
    num_rows: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    K_BLOCKS: tl.constexpr, GROUP: tl.constexpr, NUM_BITS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_P: tl.constexpr, FETCHED: tl.constexpr, STAGES: tl.constexpr, IS_SCALED: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SCALES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N columns of all rows, at most BLOCK_M. Grid: (cdiv(COLUMNS, BLOCK_N), SLICES).

    x @ weight.T + bias + residual, or silu(gate) * up. A norm needs the sum over a whole row, and a program has some of
    its columns: so the kernel that adds to the rows multiplies them by the next norm's weight and writes parts of their
    sums, and the next product divides by the root. A weight never changes: its first tile and FETCHED of its columns
    are prefetched while the kernels before still run, so that memory does not idle between two products. Several SLICES
    of SIZE are only for FP8 weights and `PackedInts`, which have K_BLOCKS; only the latter have NUM_BITS.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < num_rows
    n_mask = n < COLUMNS
    weight_rows: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    behind: tl.constexpr = COLUMNS if IS_GATED else 0
    row = tl.program_id(0) * BLOCK_N
    if K_BLOCKS > 0:
        if OVERLAPS and FETCHED > 0:
            if NUM_BITS > 0:
                fetch_ints(weight, row, SIZE, behind, weight_rows, SLICES, FETCHED // BLOCK, NUM_BITS)
            else:
                fetch_fp8(weight, row, SIZE, behind, weight_rows, SLICES, FETCHED // BLOCK)
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
        if NUM_BITS > 0:
            sums = int_sums(
                x, m.to(tl.int64), m_mask, weight, scales, zeros, row, tl.program_id(1),
                SIZE, behind, K_BLOCKS, behind + COLUMNS, NUM_BITS, HAS_ZEROS, BLOCK_M, weight_rows, SLICES, STAGES,
            )  # fmt: skip
        else:
            sums = fp8_sums(
                x, weight, scales, row, num_rows,
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
MOST_QUANTISED_ROWS = 128
"""Most rows for which `product` is the fastest with a quantised weight, which cuBLAS needs in the rows' dtype."""
_DTYPES = (torch.bfloat16,)
"""Float32 stays with cuBLAS, which is as exact as the CPU; in float16 a row times a norm's weight may overflow."""
_LEAST_SHARED_MEMORY = 200 << 10
"""Bytes that a program with the largest tiles takes."""
_LONG_ROW = 8192
"""Columns from which on a program has more to do, or more programs share a row."""
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


def has_few_rows(x: torch.Tensor, most_rows: int | None = None) -> bool:
    """True if `product` is the fastest way for [N, size]. `most_rows`: of the layers, see `most_rows_of`."""
    most = MOST_ROWS if most_rows is None else most_rows
    return 0 < len(x) <= most and x.dtype in _DTYPES and _has_room_for_tiles(x.device)


def most_rows_of(*layers: Linear) -> int:
    """Rows that `product` takes of all these layers."""
    return MOST_QUANTISED_ROWS if all(map(_is_quantised, layers)) else MOST_ROWS


def _is_quantised(layer: Linear) -> bool:
    return layer.packed_fp8 is not None or layer.ints is not None


@cache
def _has_room_for_tiles(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= _LEAST_SHARED_MEMORY


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `layer(x)` of [..., size] in the fastest way."""
    rows, most = x.reshape(-1, x.shape[-1]), most_rows_of(layer)
    if has_few_rows(rows, most):
        result = product(rows.contiguous(), layer)
    elif layer.ints is not None:
        result = int_linear(rows, layer.ints, layer.bias)
    elif layer.packed_fp8 is not None:
        result = fp8_linear(rows, layer)
    else:
        result = layer(rows)
    return result.view(*x.shape[:-1], result.shape[-1])


def product(x: torch.Tensor | Scaled, layer: Linear, *, is_gated: bool = False) -> torch.Tensor:
    """Computes `layer(x)`, or `silu(gate) * up` of its halves: [N, size], contiguous, to [N, columns].

    N is 1 to `most_rows_of` the layer. Sums are float32 and rounded once, at the end.
    """
    return _launch(x, layer, is_gated=is_gated)[0]


def sum_product(residual: torch.Tensor, x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `residual + layer(x)`, [N, columns], rounded to its dtype."""
    return _launch(x, layer, residual=residual)[0]


def add_product(residual: torch.Tensor, x: torch.Tensor, layer: Linear, norm: RMSNorm) -> tuple[torch.Tensor, Scaled]:
    """Does what `sum_product` does, and returns the input of the next `product` as well."""
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
    rows, squares, eps = (x.x, x.squares, x.eps) if isinstance(x, Scaled) else (x, x, 0.0)
    (num_rows, size), parts = rows.shape, len(squares) if isinstance(x, Scaled) else 1
    assert 0 < num_rows <= most_rows_of(layer), f"{num_rows} rows, and a program takes {most_rows_of(layer)}"
    assert rows.is_contiguous(), "a kernel reads rows side by side"
    assert residual is None or residual.is_contiguous(), "a kernel reads rows side by side"
    weight, scales, zeros, arrivals = rows, rows, rows, rows
    if layer.ints is not None:
        ints, rows = layer.ints, layer.ints.ordered(rows)
        weight, scales, arrivals, num_outputs = ints.bits, ints.scales, ints.arrivals, ints.num_rows
        zeros = rows if ints.zeros is None else ints.zeros
    elif layer.scales is None:
        assert layer.weight is not None, "a weight is only given up where it is packed"
        weight, num_outputs = layer.weight.data, len(layer.weight)
    else:
        packed, scales = fp8_operands(layer)
        weight, arrivals, num_outputs = packed.bits, packed.arrivals, packed.num_rows
    columns = num_outputs // (2 if is_gated else 1)
    tile_of = _int_tile if layer.ints is not None else _tile if layer.scales is None else _fp8_tile
    tile = tile_of(num_rows, columns, size, is_gated=is_gated)
    num_programs, sums = -(-columns // tile.block_n), rows
    if tile.slices > 1:
        sums = rows.new_empty(tile.slices, tile.block_m, num_outputs, dtype=torch.float32)
    output = rows.new_empty(num_rows, columns)
    scaled = torch.empty_like(output) if norm is not None else output
    squares_after = rows.new_empty(num_programs, num_rows, dtype=torch.float32) if norm is not None else output
    bias, has_bias = (rows, False) if layer.bias is None else (layer.bias, True)
    added, has_residual = (rows, False) if residual is None else (residual, True)
    norm_weight, scales_output = (rows, False) if norm is None else (norm.weight, True)
    product_kernel[num_programs, tile.slices](
        rows, squares, weight, scales, zeros, sums, arrivals, bias, added, norm_weight,
        output, scaled, squares_after, num_rows, eps,
        SIZE=size, COLUMNS=columns, PARTS=parts, BLOCK_P=power_of_two(parts), **_layout(layer),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SLICES=tile.slices, FETCHED=tile.fetched, STAGES=tile.stages,
        IS_SCALED=isinstance(x, Scaled), IS_GATED=is_gated,
        HAS_BIAS=has_bias, HAS_RESIDUAL=has_residual, SCALES=scales_output,
        num_warps=tile.num_warps, maxnreg=tile.most_registers, **overlapping(rows.device),
    )  # fmt: skip
    return output, scaled, squares_after


def _layout(layer: Linear) -> dict[str, int]:
    """Returns how a quantised weight and its scales lie, as the kernel is told."""
    ints = layer.ints
    if ints is None:
        return {**fp8_layout(layer), "NUM_BITS": 0, "HAS_ZEROS": False}
    return {"K_BLOCKS": len(ints.scales), "GROUP": 1, "NUM_BITS": ints.num_bits, "HAS_ZEROS": ints.zeros is not None}


@dataclass(frozen=True, slots=True)
class _Tile:
    block_m: int
    block_n: int
    block_k: int
    stages: int
    fetched: int = 0
    """Columns of the weight that are prefetched; of a quantised weight, of each slice."""
    slices: int = 1
    """Programs that share the columns of a quantised weight."""
    num_warps: int = 4
    most_registers: int | None = None
    """Registers of a thread."""


def _tile(num_rows: int, columns: int, size: int, *, is_gated: bool) -> _Tile:
    """Tiles as measured on an H200: a program for each multiprocessor where possible, with many loads in flight."""
    block_m = max(16, power_of_two(num_rows))
    is_narrow = columns <= 32 * _MULTIPROCESSORS
    if is_gated:
        tile = {16: _Tile(16, 32, 128, 5, 512), 32: _Tile(32, 64, 128, 3), 64: _Tile(64, 64, 64, 4, 256)}[block_m]
    elif is_narrow:
        block_n = 32 if columns > 16 * _MULTIPROCESSORS else 16
        is_deep = block_m == 16 and size >= 8192
        tile = _Tile(block_m, block_n, 512 if is_deep else 256, 4 if is_deep or block_m == 64 else 5)
    else:
        tile = _Tile(block_m, 64, 128, 5)
    block_k = min(tile.block_k, max(16, power_of_two(size)))
    return replace(tile, block_k=block_k, fetched=tile.fetched if tile.fetched <= size // 4 else 0)


def _fp8_tile(num_rows: int, columns: int, size: int, *, is_gated: bool) -> _Tile:
    """The same for FP8 weights, measured in steps of an 8B model: the narrow products fill the GPU by their slices."""
    block_m = max(16, power_of_two(num_rows))
    if is_gated:
        tile = {
            16: _Tile(16, 64, 128, 3, 256, slices=2),
            32: _Tile(32, 64, 128, 4, 256, num_warps=8),
            64: _Tile(64, 64, 128, 3, 256, num_warps=8, most_registers=128),
            128: _Tile(128, 64, 128, 3, 256, num_warps=8),
        }[block_m]
    else:
        num_programs = columns // CHUNK.value
        tile = {
            16: _Tile(16, 64, 128, 4 if size >= _LONG_ROW else 3, 256, slices=6 * _MULTIPROCESSORS // num_programs),
            32: _Tile(32, 64, 128, 4, 256, slices=3 * _MULTIPROCESSORS // num_programs),
            64: _Tile(64, 64, 128, 3, 256, slices=3 * _MULTIPROCESSORS // num_programs, most_registers=168),
            128: _Tile(128, 64, 128, 2, 256, slices=2 * _MULTIPROCESSORS // num_programs),
        }[block_m]
        if block_m == 16:
            tile = replace(tile, slices=power_of_two(tile.slices + 1) // 2)
    return _with_whole_slices(tile, size)


def _int_tile(num_rows: int, columns: int, size: int, *, is_gated: bool) -> _Tile:
    """The tile for `PackedInts`, measured product by product: few stages, and slices are powers of two."""
    tile = _fp8_tile(num_rows, columns, size, is_gated=is_gated)
    tile = replace(tile, stages=tile.stages + 1 if tile.block_m > MOST_ROWS else 3)
    if not is_gated and tile.block_m <= MOST_ROWS:
        per_multiprocessor = 6 if tile.block_m == 16 else 3
        slices = power_of_two(per_multiprocessor * _MULTIPROCESSORS * CHUNK.value // columns + 1) // 2
        tile = replace(tile, slices=2 * slices if size >= _LONG_ROW else slices)
    return _with_whole_slices(tile, size)


def _with_whole_slices(tile: _Tile, size: int) -> _Tile:
    blocks = size // BLOCK.value
    blocks_per_slice = -(-blocks // max(1, tile.slices))
    slices = -(-blocks // blocks_per_slice)
    blocks_of_last = blocks - (slices - 1) * blocks_per_slice
    return replace(tile, slices=slices, fetched=tile.fetched if blocks_of_last * BLOCK.value >= tile.fetched else 0)


@triton.jit(do_not_specialize=["num_rows"])
def tiled_product_kernel(
    x: tl.tensor,  # descriptor of [num_rows, SIZE]; as of all, what a tile has outside of it is 0 and not written
    weight: tl.tensor,  # of [COLUMNS, SIZE]; [2 * COLUMNS, SIZE] if IS_GATED: gates, then what they are multiplied with
    residual: tl.tensor,  # of [num_rows, COLUMNS], read if HAS_RESIDUAL
    output: tl.tensor,  # of [num_rows, COLUMNS], written
    num_rows: tl.tensor, SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TILES_DOWN: tl.constexpr, IS_GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Computes one tile. Grid: (tiles,). So many tiles that read the same part of the weight run side by side."""
    wait_for_previous(OVERLAPS)
    tiles_down, tiles_across = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(COLUMNS, BLOCK_N)
    band, within = tl.program_id(0) // (TILES_DOWN * tiles_across), tl.program_id(0) % (TILES_DOWN * tiles_across)
    height = min(tiles_down - band * TILES_DOWN, TILES_DOWN)
    m = (band * TILES_DOWN + within % height) * BLOCK_M
    n = within // height * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        rows = x.load([m, k])
        total = tl.dot(rows, weight.load([n, k]).T, total)
        if IS_GATED:
            total_up = tl.dot(rows, weight.load([COLUMNS + n, k]).T, total_up)
    if IS_GATED:
        decay = tl.exp(-tl.abs(total))
        total = total * (tl.where(total >= 0.0, 1.0, decay) / (1.0 + decay)) * total_up
    if HAS_RESIDUAL:
        total += residual.load([m, n]).to(tl.float32)
    output.store([m, n], total.to(output.dtype))


_BLOCK_M, _BLOCK_K = 128, 64
_BLOCK_N, _BLOCK_N_GATED = 256, 128
"""Columns of a tile; a gated one has as many again of what gates are multiplied with."""
_TILES_DOWN, _STAGES, _NUM_WARPS = 16, 4, 8
"""As measured on an H200: the most that fits, and the fewest bytes from memory."""
_LEAST_FILLED = 0.95
_LEAST_FILLED_OF_MEMORY, _LEAST_ROWS = 0.8, 80
"""The same where one row of tiles reads a weight, and from how many rows on it does so faster than cuBLAS."""
_TILED_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNED = 8
"""Numbers in 16 bytes, of which a descriptor's rows are multiples."""


def suits_tiles(x: torch.Tensor, layer: Linear, *, is_gated: bool = False) -> bool:
    """True if a product of [N, size] by tiles takes a Hopper GPU less time than cuBLAS's, or less power and no longer.

    All tiles are of one size, and the last ones run beside idle multiprocessors. Where these are many, cuBLAS has
    others. Float32 stays with cuBLAS, which is as exact as the CPU.
    """
    if not is_hopper(x.device) or x.dtype not in _TILED_DTYPES or layer.bias is not None:
        return False
    if layer.scales is not None or layer.ints is not None:
        return False
    num_columns, num_at_once = _num_columns(layer, is_gated=is_gated), num_multiprocessors(x.device)
    num_tiles = _num_tiles(len(x), num_columns, is_gated=is_gated)
    is_aligned = x.shape[1] % _ALIGNED == num_columns % _ALIGNED == 0
    waits_for_memory = is_gated and _LEAST_ROWS <= len(x) <= _BLOCK_M
    least_filled = _LEAST_FILLED_OF_MEMORY if waits_for_memory else _LEAST_FILLED
    return is_aligned and num_tiles > 0 and num_tiles >= least_filled * num_at_once * -(-num_tiles // num_at_once)


def _num_columns(layer: Linear, *, is_gated: bool) -> int:
    assert layer.weight is not None, "a weight is only given up where it is packed"
    return len(layer.weight) // 2 if is_gated else len(layer.weight)


def _num_tiles(num_rows: int, num_columns: int, *, is_gated: bool) -> int:
    return -(-num_rows // _BLOCK_M) * -(-num_columns // (_BLOCK_N_GATED if is_gated else _BLOCK_N))


def tiled_product(x: torch.Tensor, layer: Linear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `residual + layer(x)`, or without a residual `silu(gate) * up` of the halves of `layer(x)`.

    `x`: [N, size], contiguous, N at least 1. Returns [N, columns]. Sums are float32 and rounded once, at the end. Rows
    are multiples of 16 bytes, there is no bias.
    """
    assert layer.bias is None, "the kernel adds none"
    assert layer.weight is not None, "a weight is only given up where it is packed"
    (num_rows, size), is_gated = x.shape, residual is None
    num_columns = _num_columns(layer, is_gated=is_gated)
    block_n = _BLOCK_N_GATED if is_gated else _BLOCK_N
    output = x.new_empty(num_rows, num_columns)
    of_output = TensorDescriptor.from_tensor(output, [_BLOCK_M, block_n])
    tiled_product_kernel[(_num_tiles(num_rows, num_columns, is_gated=is_gated),)](
        TensorDescriptor.from_tensor(x, [_BLOCK_M, _BLOCK_K]),
        TensorDescriptor.from_tensor(layer.weight.data, [block_n, _BLOCK_K]),
        of_output if residual is None else TensorDescriptor.from_tensor(residual, [_BLOCK_M, block_n]),
        of_output, num_rows,
        SIZE=size, COLUMNS=num_columns, BLOCK_M=_BLOCK_M, BLOCK_N=block_n, BLOCK_K=_BLOCK_K, TILES_DOWN=_TILES_DOWN,
        IS_GATED=is_gated, HAS_RESIDUAL=residual is not None,
        num_warps=_NUM_WARPS, num_stages=_STAGES, **overlapping(x.device),
    )  # fmt: skip
    return output
