"""Matrix products of few rows with what stands around them: norms, a gate, a sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from slipstream.services.models.kernels.launching import overlapping
from slipstream.services.models.kernels.product_kernels import product_kernel

if TYPE_CHECKING:
    from slipstream.services.models.decoder import RMSNorm
    from slipstream.services.models.linear import Linear

MOST_ROWS = 64
"""With more rows cuBLAS is faster."""
_DTYPES = (torch.bfloat16,)
"""Float32 stays with cuBLAS, which is as exact as the CPU; in float16 a row times a norm's weight may overflow."""
_LEAST_SHARED_MEMORY = 200 << 10
"""Bytes of a program that the largest tiles take."""
_MULTIPROCESSORS = 132
"""Of the GPU that the tiles were measured on; the same tiles everywhere, so that results are."""
_WARPS = 4


@dataclass(frozen=True, slots=True)
class Scaled:
    """A norm's input on its way into a product: what is missing is the division by the root of the mean square."""

    x: torch.Tensor
    """[N, size]: the rows times the norm's weight."""
    squares: torch.Tensor
    """[parts, N] float32: parts of the sums of the rows' squares."""
    eps: float


def has_few_rows(x: torch.Tensor) -> bool:
    """Whether `product` is the fastest way for [N, size]."""
    return 0 < len(x) <= MOST_ROWS and x.dtype in _DTYPES and _has_room_for_tiles(x.device)


@cache
def _has_room_for_tiles(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= _LEAST_SHARED_MEMORY


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """`layer(x)` of [..., size] by whichever way is fastest."""
    rows = x.reshape(-1, x.shape[-1])
    result: torch.Tensor = product(rows.contiguous(), layer) if has_few_rows(rows) else layer(rows)
    return result.view(*x.shape[:-1], result.shape[-1])


def product(x: torch.Tensor | Scaled, layer: Linear, *, is_gated: bool = False) -> torch.Tensor:
    """`layer(x)`, or `silu(gate) * up` of its halves: [N, size], contiguous, to [N, columns].

    N is 1 to `MOST_ROWS`. Sums are float32 and rounded once, at the end.
    """
    return _launch(x, layer, is_gated=is_gated)[0]


def add_product(residual: torch.Tensor, x: torch.Tensor, layer: Linear, norm: RMSNorm) -> tuple[torch.Tensor, Scaled]:
    """`residual + layer(x)`, [N, columns], rounded to its dtype, and what `product` needs to go on from its norm."""
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
    weight = layer.weight
    num_rows, size = rows.shape
    assert 0 < num_rows <= MOST_ROWS, f"{num_rows} rows, and a program takes {MOST_ROWS}"
    assert rows.is_contiguous(), "a kernel reads rows side by side"
    assert residual is None or residual.is_contiguous(), "a kernel reads rows side by side"
    assert weight is not None, "a weight is only given up where it is packed"
    columns = len(weight) // (2 if is_gated else 1)
    tile = _tile(num_rows, columns, size, is_gated=is_gated)
    num_programs = -(-columns // tile.block_n)
    output = rows.new_empty(num_rows, columns)
    scaled = torch.empty_like(output) if norm is not None else output
    squares_after = rows.new_empty(num_programs, num_rows, dtype=torch.float32) if norm is not None else output
    parts = len(x.squares) if isinstance(x, Scaled) else 1
    product_kernel[(num_programs,)](
        rows,
        x.squares if isinstance(x, Scaled) else rows,
        weight,
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
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_P=1 << (parts - 1).bit_length(),
        FETCHED=tile.fetched,
        STAGES=tile.stages,
        IS_SCALED=isinstance(x, Scaled),
        IS_GATED=is_gated,
        HAS_BIAS=layer.bias is not None,
        HAS_RESIDUAL=residual is not None,
        SCALES=norm is not None,
        **overlapping(rows.device),
        num_warps=_WARPS,
    )
    return output, scaled, squares_after


@dataclass(frozen=True, slots=True)
class _Tile:
    block_m: int
    block_n: int
    block_k: int
    stages: int
    fetched: int = 0
    """How many columns of the weight are asked for ahead."""


def _tile(num_rows: int, columns: int, size: int, *, is_gated: bool) -> _Tile:
    """Measured on an H200: a program for each multiprocessor where that is possible, and much on its way to it."""
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
