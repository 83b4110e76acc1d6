"""Norms, the gate of the MLP and the entry of a head, each in one kernel: float32 inside, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from slipstream.services.models.kernels.launching import overlapping, power_of_two, wait_for_previous

if TYPE_CHECKING:
    import torch


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
    """Norms one row. Grid: (N,)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    value = tl.load(x + row + i, mask=mask, other=0.0)
    if HAS_DELTA:
        value = value.to(tl.float32) + tl.load(delta + row + i, mask=mask, other=0.0).to(tl.float32)
        value = value.to(summed.dtype.element_ty)  # later layers add to the rounded value, so that is normalised
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
    """Computes BLOCK columns of a row. Grid: (N, cdiv(SIZE, BLOCK))."""
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


@triton.jit(do_not_specialize=["vocab_size"])
def pair_kernel(
    tokens: tl.tensor,  # [N] int64
    embedding: tl.tensor,  # [vocab_size, SIZE]
    states: tl.tensor,  # [N, SIZE]
    embedding_norm: tl.tensor,  # [SIZE]
    state_norm: tl.tensor,  # [SIZE]
    both: tl.tensor,  # [N, 2 * SIZE], written
    vocab_size: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Makes an entry of an EAGLE-3 head: a token's embedding and a state, each normed. Grid: (N, 2)."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        token = tl.minimum(tl.maximum(tl.load(tokens + n), 0), vocab_size - 1)
        x = tl.load(embedding + token * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        weight = tl.load(embedding_norm + i, mask=i < SIZE, other=0.0).to(tl.float32)
    else:
        x = tl.load(states + n * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        weight = tl.load(state_norm + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    place = both + (2 * n + tl.program_id(1)) * SIZE
    tl.store(place + i, (x * scale * weight).to(both.dtype.element_ty), mask=i < SIZE)


_SWIGLU_COLUMNS = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm. `x`: [N, size], contiguous. Returns the same shape and dtype."""
    return _norm(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `delta` to `x`, both [N, size], contiguous. Returns the sum, rounded to their dtype, and its norm."""
    return _norm(x, delta, weight, eps)


def _norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = x.shape
    summed, normed = x if delta is None else x.new_empty(x.shape), x.new_empty(x.shape)
    if not num_rows:
        return summed, normed
    assert x.is_contiguous(), "a kernel reads rows side by side"
    assert delta is None or delta.is_contiguous(), "a kernel reads rows side by side"
    block = max(16, 1 << (size - 1).bit_length())
    rms_norm_kernel[(num_rows,)](
        x,
        delta if delta is not None else x,
        weight,
        summed,
        normed,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        **overlapping(x.device),
        num_warps=min(16, max(1, block // 512)),
    )
    return summed, normed


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up: [N, 2 * size], contiguous, gates first, to [N, size]."""
    num_rows, twice = gate_up.shape
    assert gate_up.is_contiguous(), "a kernel reads rows side by side"
    output = gate_up.new_empty(num_rows, twice // 2)
    if num_rows:
        grid = (num_rows, -(-twice // 2 // _SWIGLU_COLUMNS))
        swiglu_kernel[grid](
            gate_up, output, SIZE=twice // 2, BLOCK=_SWIGLU_COLUMNS, num_warps=4, **overlapping(gate_up.device)
        )
    return output


def embed_and_norm(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    states: torch.Tensor,
    embedding_norm: torch.Tensor,
    state_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Norms the embeddings of N tokens and N states, side by side: [N, 2 * size]. `states`: [N, size], contiguous."""
    num_tokens, size = states.shape
    both = states.new_empty(num_tokens, 2 * size)
    if num_tokens:
        block = power_of_two(size)
        pair_kernel[num_tokens, 2](
            tokens,
            embedding,
            states,
            embedding_norm,
            state_norm,
            both,
            len(embedding),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return both
