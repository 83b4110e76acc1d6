"""Matrix products of many rows by tiles, with the gate or sum behind them in the same kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.services.models.kernels.launching import (
    is_hopper,
    num_multiprocessors,
    overlapping,
    wait_for_previous,
)

if TYPE_CHECKING:
    from slipstream.services.models.decoder import Linear


@triton.jit(do_not_specialize=["num_rows"])
def tiled_product_kernel(
    x: tl.tensor,  # descriptor of [num_rows, SIZE]; as of all, what a tile has outside of it is 0 and not written
    weight: tl.tensor,  # of [COLUMNS, SIZE]; [2 * COLUMNS, SIZE] if IS_GATED: gates, then what they are multiplied with
    residual: tl.tensor,  # of [num_rows, COLUMNS], read if HAS_RESIDUAL
    output: tl.tensor,  # of [num_rows, COLUMNS], written
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_DOWN: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
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
_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNED = 8
"""Numbers in 16 bytes, of which a descriptor's rows are multiples."""


def suits_tiles(x: torch.Tensor, layer: Linear, *, is_gated: bool = False) -> bool:
    """True if a product of [N, size] by tiles takes a Hopper GPU less time than cuBLAS's, or less power and no longer.

    All tiles are of one size, and the last ones run beside idle multiprocessors. Where these are many, cuBLAS has
    others. Float32 stays with cuBLAS, which is as exact as the CPU.
    """
    if not is_hopper(x.device) or x.dtype not in _DTYPES or layer.scales is not None or layer.bias is not None:
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


def gated_product(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `silu(gate) * up` of the halves of `layer(x)`: [N, size], contiguous, to [N, columns].

    Sums are float32 and rounded once, at the end. N is at least 1, rows are multiples of 16 bytes, there is no bias.
    """
    return _launch(x, layer, None)


def added_product(residual: torch.Tensor, x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `residual + layer(x)`, [N, columns], in the same way."""
    return _launch(x, layer, residual)


def _launch(x: torch.Tensor, layer: Linear, residual: torch.Tensor | None) -> torch.Tensor:
    assert layer.weight is not None, "a weight is only given up where it is packed"
    assert layer.bias is None, "the kernel adds none"
    (num_rows, size), is_gated = x.shape, residual is None
    num_columns = _num_columns(layer, is_gated=is_gated)
    block_n = _BLOCK_N_GATED if is_gated else _BLOCK_N
    output = x.new_empty(num_rows, num_columns)
    of_output = TensorDescriptor.from_tensor(output, [_BLOCK_M, block_n])
    tiled_product_kernel[(_num_tiles(num_rows, num_columns, is_gated=is_gated),)](
        TensorDescriptor.from_tensor(x, [_BLOCK_M, _BLOCK_K]),
        TensorDescriptor.from_tensor(layer.weight.data, [block_n, _BLOCK_K]),
        of_output if residual is None else TensorDescriptor.from_tensor(residual, [_BLOCK_M, block_n]),
        of_output,
        num_rows,
        SIZE=size,
        COLUMNS=num_columns,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        TILES_DOWN=_TILES_DOWN,
        IS_GATED=is_gated,
        HAS_RESIDUAL=residual is not None,
        **overlapping(x.device),
        num_warps=_NUM_WARPS,
        num_stages=_STAGES,
    )
    return output
