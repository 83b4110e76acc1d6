"""A Triton kernel for matrix products of few rows, whose time is that of reading the weight."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.waiting_kernels import wait_for_previous

LINE: tl.constexpr = tl.constexpr(64)
"""Numbers of 16 bits in a line of the cache."""


@triton.jit
def _fetch(at: tl.tensor) -> None:
    """Asks for lines of memory to come into the cache that all programs share, and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x: tl.tensor,  # [num_rows, SIZE]; rows times a norm's weight if IS_SCALED
    squares: tl.tensor,  # [PARTS, num_rows] float32: parts of the sums of the rows' squares, read if IS_SCALED
    weight: tl.tensor,  # [COLUMNS, SIZE]; [2 * COLUMNS, SIZE] if IS_GATED: gates, then what they are multiplied with
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    """BLOCK_N columns of all rows, at most BLOCK_M. Grid: (cdiv(COLUMNS, BLOCK_N),).

    x @ weight.T + bias + residual, or silu(gate) * up. A norm needs the sum over a whole row, and a program has some of
    its columns: so whoever adds to the rows leaves them times the next norm's weight and the parts of their sums, and
    the product behind it divides by the root. A weight never changes: its first tile and FETCHED of its columns are
    asked for while the kernels ahead still run, so that the memory has no pause between two products.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < num_rows
    n_mask = n < COLUMNS
    first_mask = n_mask[:, None] & (k < SIZE)[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * SIZE + k[None, :]
    x_at = x + m.to(tl.int64)[:, None] * SIZE + k[None, :]
    first = tl.load(w_at, mask=first_mask, other=0.0)
    if IS_GATED:
        first_up = tl.load(w_at + COLUMNS * SIZE, mask=first_mask, other=0.0)
    if OVERLAPS and FETCHED > 0:
        line = tl.arange(0, FETCHED // LINE) * LINE
        fetched_at = weight + tl.minimum(n, COLUMNS - 1).to(tl.int64)[:, None] * SIZE + line[None, :]
        _fetch(fetched_at)
        if IS_GATED:
            _fetch(fetched_at + COLUMNS * SIZE)
    wait_for_previous(OVERLAPS)
    if IS_SCALED:
        p = tl.arange(0, BLOCK_P)
        part_mask = (p < PARTS)[:, None] & m_mask[None, :]
        parts = tl.load(squares + p[:, None] * num_rows + m[None, :], mask=part_mask, other=0.0)
        scale = tl.rsqrt(tl.sum(parts, axis=0) / SIZE + eps)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
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
        value = tl.where(there, result.to(tl.float32), 0.0)  # what later layers add to is what is normalised
        factor = tl.load(norm_weight + n, mask=n_mask, other=0.0).to(tl.float32)
        tl.store(scaled + at, (value * factor[None, :]).to(scaled.dtype.element_ty), mask=there)
        tl.store(squares_after + tl.program_id(0) * num_rows + m, tl.sum(value * value, axis=1), mask=m_mask)
