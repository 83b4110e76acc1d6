"""Triton kernels of what lies between a block's matrix products: norms and the gate of the MLP."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.waiting_kernels import wait_for_previous


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,  # [N, SIZE]
    delta: tl.tensor,  # [N, SIZE], read if HAS_DELTA
    weight: tl.tensor,  # [SIZE]
    summed: tl.tensor,  # [N, SIZE], written if HAS_DELTA: x + delta
    normed: tl.tensor,  # [N, SIZE], written
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One row. Grid: (N,)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    value = tl.load(x + row + i, mask=mask, other=0.0)
    if HAS_DELTA:
        value = value.to(tl.float32) + tl.load(delta + row + i, mask=mask, other=0.0).to(tl.float32)
        value = value.to(summed.dtype.element_ty)  # what later layers add to is what is normalised
        tl.store(summed + row + i, value, mask=mask)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    result = value * scale * tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row + i, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_kernel(
    gate_up: tl.tensor,  # [N, 2 * SIZE]: gates, then what they are multiplied with
    output: tl.tensor,  # [N, SIZE], written
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """BLOCK columns of a row. Grid: (N, cdiv(SIZE, BLOCK))."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0.0, 1.0, decay) / (1.0 + decay)
    result = gate * sigmoid * up
    tl.store(output + row * SIZE + i, result.to(output.dtype.element_ty), mask=mask)
