"""Products of experts: each row of a token by the weights of its own experts, which are read once or not at all.

Rows are sorted by expert on the device, and a program finds its expert by what it reads there: the grid depends on
shapes only, so that the host reads nothing of the choice, and a CUDA graph serves any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from slipstream.services.models.kernels.fp8 import halves
from slipstream.services.models.kernels.ints import int_sums
from slipstream.services.models.kernels.launching import overlapping, power_of_two, wait_for_previous
from slipstream.services.models.kernels.mxfp4 import mxfp4_sums
from slipstream.services.models.kernels.routing import Routed, by_expert, route

if TYPE_CHECKING:
    import torch

    from slipstream.services.models.experts import Experts


@triton.jit
def tile_of(
    ends: tl.tensor,  # [NUM_EXPERTS] int32: where the rows of each expert end
    tile: tl.tensor, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns a tile's expert, its first row, and where the expert's rows end: 0 if there are fewer tiles."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends + e, mask=e < NUM_EXPERTS, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < NUM_EXPERTS), other=0)
    tiles = (end - begin + (BLOCK_M - 1)) // BLOCK_M
    after = tl.cumsum(tiles, axis=0)
    is_own = (after - tiles <= tile) & (tile < after)
    first = tl.sum(tl.where(is_own, begin + (tile - after + tiles) * BLOCK_M, 0), axis=0)
    return tl.sum(tl.where(is_own, e, 0), axis=0), first, tl.sum(tl.where(is_own, end, 0), axis=0)


@triton.jit
def grouped_kernel(
    x: tl.tensor,  # [N, SIZE] of tokens if IS_GATED, else [N * NUM_CHOSEN, SIZE] sorted by expert
    weight: tl.tensor,  # [NUM_EXPERTS, COLUMNS, SIZE]; twice as many columns if IS_GATED: gates, then ups
    scales: tl.tensor,  # of weights that are `PackedInts`, read if GROUPS
    zeros: tl.tensor,  # the same, read if HAS_ZEROS
    bias: tl.tensor,  # [NUM_EXPERTS, COLUMNS], or twice as many; read if HAS_BIAS
    ends: tl.tensor,  # [NUM_EXPERTS] int32: where the rows of each expert end
    order: tl.tensor,  # [N * NUM_CHOSEN] int64: the choice of each sorted row, of which a token has NUM_CHOSEN
    shares: tl.tensor,  # [N * NUM_CHOSEN] float32: factor of each choice, read unless IS_GATED
    output: tl.tensor,  # [N * NUM_CHOSEN, COLUMNS], written: sorted if IS_GATED, else by choice
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    LIMIT: tl.constexpr,  # of gates and ups, or None
    STEEPNESS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, NUM_BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_MXFP4: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N columns of at most BLOCK_M rows of an expert. Grid: (cdiv(COLUMNS, BLOCK_N), tiles)."""
    wait_for_previous(OVERLAPS)
    expert, first, end = tile_of(ends, tl.program_id(1), NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if first >= end:  # In a graph there are more programs than tiles.
        return
    row = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = row < end, n < COLUMNS
    choice = tl.load(order + row, mask=is_row, other=0)
    source = choice // NUM_CHOSEN if IS_GATED else row.to(tl.int64)
    of_expert: tl.constexpr = 2 * COLUMNS if IS_GATED else COLUMNS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GROUPS > 0:
        first_column = expert * of_expert + tl.program_id(0) * BLOCK_N
        weight_rows: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
        behind: tl.constexpr = COLUMNS if IS_GATED else 0
        all_rows: tl.constexpr = NUM_EXPERTS * of_expert
        if IS_MXFP4:
            sums = mxfp4_sums(
                x, source, is_row, weight, scales, first_column, SIZE, behind, all_rows, BLOCK_M, weight_rows, STAGES
            )
        else:
            sums = int_sums(
                x, source, is_row, weight, scales, zeros, first_column, 0,
                SIZE, behind, GROUPS, all_rows, NUM_BITS, HAS_ZEROS, BLOCK_M, weight_rows, 1, STAGES,
            )  # fmt: skip
        if IS_GATED:
            total, total_up = halves(sums, BLOCK_M, weight_rows)
        else:
            total = tl.trans(sums)
    else:
        w_at = weight + (expert.to(tl.int64) * of_expert + n)[:, None] * SIZE + k[None, :]
        x_at = x + source[:, None] * SIZE + k[None, :]
        for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
            is_k = k < SIZE - start
            there = is_column[:, None] & is_k[None, :]
            rows = tl.load(x_at + start, mask=is_row[:, None] & is_k[None, :], other=0.0)
            total = tl.dot(rows, tl.trans(tl.load(w_at + start, mask=there, other=0.0)), total, input_precision="ieee")
            if IS_GATED:
                up = tl.load(w_at + COLUMNS * SIZE + start, mask=there, other=0.0)
                total_up = tl.dot(rows, tl.trans(up), total_up, input_precision="ieee")
    if HAS_BIAS:
        b_at = bias + expert * of_expert + n
        total += tl.load(b_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            total_up += tl.load(b_at + COLUMNS, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        factor = total
        if LIMIT is not None:
            total = tl.minimum(total, LIMIT)
            total_up = tl.minimum(tl.maximum(total_up, -LIMIT), LIMIT) + 1.0
            factor = total * STEEPNESS
        decay = tl.exp(-tl.abs(factor))
        total = total * (tl.where(factor >= 0.0, 1.0, decay) / (1.0 + decay)) * total_up
    else:
        total *= tl.load(shares + choice, mask=is_row, other=0.0)[:, None]
    place = row.to(tl.int64) if IS_GATED else choice
    at = output + place[:, None] * COLUMNS + n[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int = 4


def _tile(rows_per_expert: int, size: int, element_size: int) -> _Tile:
    """`rows_per_expert`: on average, of all experts."""
    block_m = min(128, max(16, power_of_two(rows_per_expert)))
    if element_size == 4:
        return _Tile(min(block_m, 32), 32, min(32, max(16, power_of_two(size))), 2)
    block_k = 128 if block_m <= 32 and size % 128 == 0 else 64
    tile = _Tile(block_m, 32 if block_m == 16 else 64, block_k, 4 if block_m <= 32 else 3, 8 if block_m == 128 else 4)
    return tile._replace(block_k=min(tile.block_k, max(16, power_of_two(size))))


def _packed_tile(rows_per_expert: int, size: int, element_size: int) -> _Tile:
    """Chooses the tile for `PackedInts`, whose chunks have 64 rows. Arguments as of `_tile`."""
    block_m = min(64 if element_size == 4 else 128, max(16, power_of_two(rows_per_expert)))
    return _Tile(block_m, 64, 64, 4 if block_m <= 32 else 3, 4 if block_m <= 32 else 8)


def run_experts(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Adds up what each row's experts make of it: [N, hidden_size] to the same."""
    return outputs_of_choices(experts, route(experts, x)).sum(dim=1)


def outputs_of_choices(experts: Experts, routed: Routed) -> torch.Tensor:
    """Computes what each row's experts make of it, times their shares: [N, num_chosen, hidden_size]."""
    x, chosen, shares, config = routed.x, routed.chosen, routed.shares.contiguous(), experts.config
    order, ends = by_expert(chosen, config.num_experts)
    gated = x.new_empty(len(order), config.width)
    made = x.new_empty(len(order), x.shape[1])
    for source, weight, ints, bias, output in (
        (x, experts.gate_up, experts.gate_up_ints, experts.gate_up_bias, gated),
        (gated, experts.down, experts.down_ints, experts.down_bias, made),
    ):
        size, columns, is_gated = source.shape[1], output.shape[1], output is gated
        tile = (_tile if ints is None else _packed_tile)(len(order) // config.num_experts, size, x.element_size())
        zeros = None if ints is None else ints.zeros
        bits, scales = (weight, x) if ints is None else (ints.bits, ints.scales)
        # Each expert with rows has one tile more than whole ones at most.
        num_tiles = min(config.num_experts, len(order)) + len(order) // tile.block_m
        grouped_kernel[-(-columns // tile.block_n), num_tiles](
            source, bits, scales, x if zeros is None else zeros, x if bias is None else bias,
            ends, order, shares, output,
            SIZE=size, COLUMNS=columns, NUM_EXPERTS=config.num_experts, NUM_CHOSEN=config.num_chosen,
            LIMIT=config.limit, STEEPNESS=experts.steepness, BLOCK_E=power_of_two(config.num_experts),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.stages,
            IS_GATED=is_gated, HAS_BIAS=bias is not None, GROUPS=0 if ints is None else len(ints.scales),
            NUM_BITS=0 if ints is None else ints.num_bits, HAS_ZEROS=zeros is not None,
            IS_MXFP4=ints is not None and ints.is_mxfp4,
            num_warps=tile.num_warps, **overlapping(x.device),
        )  # fmt: skip
    return made.view(*chosen.shape, -1)
