"""Norms, the gate of the MLP, the entry of a head, and the rotation, each in one kernel.

Float32 inside, rounded once. The kernel that rotates queries and keys writes the KV cache, too.
"""

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
    deltas: tl.tensor,  # [N, NUM_DELTAS, SIZE]
    weight: tl.tensor,  # [SIZE]
    summed: tl.tensor,  # [N, SIZE], written if NUM_DELTAS: x + deltas
    normed: tl.tensor,  # [N, SIZE], written
    eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_DELTAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Norms one row. Grid: (N,)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    value = tl.load(x + row + i, mask=mask, other=0.0)
    if NUM_DELTAS > 0:
        total = tl.zeros((BLOCK,), tl.float32)
        for number in tl.static_range(NUM_DELTAS):
            delta = tl.load(deltas + row * NUM_DELTAS + number * SIZE + i, mask=mask, other=0.0)
            total += delta.to(tl.float32)
        value = value.to(tl.float32) + total
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
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
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
    vocab_size: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
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


@triton.jit(do_not_specialize=["num_tokens", "max_positions"])
def rotation_kernel(
    positions: tl.tensor,  # [num_tokens] int64
    table: tl.tensor,  # [2, HALF] float32: radians per position, then factors of cosine and sine
    rotation: tl.tensor,  # [num_tokens, 2, HALF] float32: cosines, then sines
    num_tokens: tl.tensor, max_positions: tl.tensor, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: (cdiv(num_tokens, BLOCK_T),). Positions out of range are clamped."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    position = tl.load(positions + token, mask=token < num_tokens, other=0)
    position = tl.minimum(tl.maximum(position, 0), max_positions - 1).to(tl.float32)
    frequency = tl.load(table + h, mask=h < HALF, other=0.0)
    factor = tl.load(table + HALF + h, mask=h < HALF, other=0.0)[None, :]
    angle = position[:, None] * frequency[None, :]
    at = rotation + token.to(tl.int64)[:, None] * (2 * HALF) + h[None, :]
    mask = (token < num_tokens)[:, None] & (h < HALF)[None, :]
    tl.store(at, tl.cos(angle) * factor, mask=mask)
    tl.store(at + HALF, tl.sin(angle) * factor, mask=mask)


@triton.jit
def scale_of(most: tl.tensor) -> tl.tensor:
    """The biased exponent of the scale of numbers of which `most`, float32, is the greatest: int32; see `PagedKV`."""
    exponent = ((most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(exponent, 1), 253)


@triton.jit
def power_of_two_of(exponent: tl.tensor) -> tl.tensor:
    """The power of two with a biased exponent: int32 to float32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(x: tl.tensor) -> tl.tensor:
    """Rounds float32 numbers of at most 448 to e4m3, as uint8. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # To even in the last of three bits; of subnormal numbers, by a sum whose last bit is theirs.
    of_normal = ((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (120 << 3)
    of_subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(x) < 0.015625, of_subnormal, of_normal)
    code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit(do_not_specialize=["num_pages", "table_width", "width"])
def keep_kernel(
    qkv: tl.tensor,  # [B * width, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM]; queries are rotated in place
    kv: tl.tensor,  # [num_pages * PAGE_SIZE, 2 * KV_HEADS * HEAD_DIM], written
    scales: tl.tensor,  # [num_pages * PAGE_SIZE, 2 * KV_HEADS] uint8, written if IS_FP8: see `PagedKV`
    rotation: tl.tensor,  # [B * width, 2, HEAD_DIM / 2] float32
    query_norm: tl.tensor,  # [HEAD_DIM], read if HAS_NORMS
    key_norm: tl.tensor,  # [HEAD_DIM], read if HAS_NORMS
    page_table: tl.tensor,  # [B, table_width] int64
    positions: tl.tensor,  # [B, width] int64
    is_valid: tl.tensor,  # [B, width] bool
    limits: tl.tensor,  # [B] int64
    rows: tl.tensor,  # [N] int64: the row of each token, read if IS_RAGGED
    num_pages: tl.tensor, table_width: tl.tensor, width: tl.tensor, eps: tl.tensor, PAGE_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HAS_NORMS: tl.constexpr,
    IS_RAGGED: tl.constexpr,  # [N] instead of [B, width]
    IS_FP8: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Rotates BLOCK_HEADS queries of one token, or rotates and keeps half as many keys with their values.

    Grid: (B * width, cdiv(Q_HEADS, BLOCK_HEADS) + cdiv(KV_HEADS, BLOCK_HEADS / 2)). Heads are numbered through queries,
    keys and values. A token that is not kept goes to the padding page, page 0.
    """
    index = tl.program_id(0).to(tl.int64)
    pairs: tl.constexpr = BLOCK_HEADS // 2
    i = tl.arange(0, BLOCK_HEADS)
    h = tl.arange(0, BLOCK_HALF)
    half: tl.constexpr = HEAD_DIM // 2
    first_pair = (tl.program_id(1) - tl.cdiv(Q_HEADS, BLOCK_HEADS)) * pairs
    keeps = first_pair >= 0
    if keeps:
        # Read before the wait, as positions and page tables are there before the first kernel of a forward.
        row = tl.load(rows + index) if IS_RAGGED else index // width
        capacity = (table_width * PAGE_SIZE).to(tl.int64)
        position = tl.load(positions + index)
        end = tl.minimum(tl.maximum(tl.load(limits + row), 0), capacity)
        is_kept = (tl.load(is_valid + index) != 0) & (position >= 0) & (position < end)
        place = tl.minimum(tl.maximum(position, 0), capacity - 1)
        page = tl.load(page_table + row * table_width + place // PAGE_SIZE)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        kv_row = tl.where(is_kept, page, 0) * PAGE_SIZE + place % PAGE_SIZE
        pair = first_pair + i % pairs
        head = Q_HEADS + pair + i // pairs * KV_HEADS
        is_head = pair < KV_HEADS
    else:
        kv_row = index  # of the same type: nothing is kept
        head = tl.program_id(1) * BLOCK_HEADS + i
        is_head = head < Q_HEADS
    wait_for_previous(OVERLAPS)

    is_there = is_head[:, None] & (h < half)[None, :]
    at = qkv + index * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM) + (head * HEAD_DIM)[:, None] + h[None, :]
    first = tl.load(at, mask=is_there, other=0.0)
    second = tl.load(at + half, mask=is_there, other=0.0)
    is_rotated = (head < Q_HEADS + KV_HEADS)[:, None]
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        scale = tl.where(is_rotated, tl.rsqrt(squares / HEAD_DIM + eps)[:, None], 1.0)
        is_query = (head < Q_HEADS)[:, None]
        norm_at = tl.zeros_like(head)[:, None] + h[None, :]
        for part in tl.static_range(2):
            at_half = norm_at + part * half
            of_query = tl.load(query_norm + at_half, mask=is_there & is_query, other=1.0)
            of_key = tl.load(key_norm + at_half, mask=is_there & is_rotated & (is_query == 0), other=1.0)
            weight = tl.where(is_query, of_query, of_key).to(tl.float32)
            if part == 0:
                x = x * scale * weight
            else:
                y = y * scale * weight
    cosine = tl.load(rotation + index * HEAD_DIM + h, mask=h < half, other=0.0)[None, :]
    sine = tl.load(rotation + index * HEAD_DIM + half + h, mask=h < half, other=0.0)[None, :]
    first = tl.where(is_rotated, (x * cosine - y * sine).to(first.dtype), first)
    second = tl.where(is_rotated, (y * cosine + x * sine).to(second.dtype), second)
    if keeps:
        # What is not finite is seen in the scores, so that it reaches no query that masks it: zero times NaN is NaN.
        is_finite = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
        is_infinite = tl.min(is_finite.to(tl.int32), axis=1) == 0
        is_broken = is_infinite & (i >= pairs)  # of values
        is_broken = tl.max(tl.reshape(is_broken.to(tl.int32), [2, pairs]), axis=0)[None, :]
        is_broken = tl.reshape(tl.broadcast_to(is_broken, [2, pairs]), [BLOCK_HEADS])[:, None] > 0  # of keys and values
        kept_as = tl.where(i < pairs, float("nan"), 0.0)[:, None]
        if IS_FP8:
            is_broken = is_broken | is_infinite[:, None]  # There is no infinite key.
            first_kept = tl.where(is_broken, kept_as, first.to(tl.float32))
            second_kept = tl.where(is_broken, kept_as, second.to(tl.float32))
            # Of numbers that are not finite the exponent means nothing, but that it is one.
            most = tl.max(tl.maximum(tl.abs(first_kept), tl.abs(second_kept)), axis=1)
            exponent = scale_of(most)
            inverse = power_of_two_of(254 - exponent)[:, None]
            first_kept, second_kept = to_fp8(first_kept * inverse), to_fp8(second_kept * inverse)
            tl.store(scales + kv_row * (2 * KV_HEADS) + head - Q_HEADS, exponent.to(tl.uint8), mask=is_head)
        else:
            first_kept = tl.where(is_broken, kept_as, first).to(kv.dtype.element_ty)
            second_kept = tl.where(is_broken, kept_as, second).to(kv.dtype.element_ty)
        kv_at = kv + kv_row * (2 * KV_HEADS * HEAD_DIM) + ((head - Q_HEADS) * HEAD_DIM)[:, None] + h[None, :]
        tl.store(kv_at, first_kept, mask=is_there)
        tl.store(kv_at + half, second_kept, mask=is_there)
    else:
        tl.store(at, first, mask=is_there)
        tl.store(at + half, second, mask=is_there)


_SWIGLU_COLUMNS = 1024
"""Columns of a gate that a program computes."""
_TOKENS_AT_ONCE = 4
"""Tokens of which a program computes the rotation."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm. `x`: [N, size], contiguous. Returns the same shape and dtype."""
    return _norm(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `delta` to `x`, [N, size], contiguous. Returns the sum, rounded to their dtype, and its norm.

    `delta`: the same shape, or [N, number, size], of which all are added.
    """
    return _norm(x, delta, weight, eps)


def _norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_rows, size), added = x.shape, x if delta is None else delta
    summed, normed = x if delta is None else x.new_empty(x.shape), x.new_empty(x.shape)
    if num_rows:
        assert x.is_contiguous(), "a kernel reads rows side by side"
        assert added.is_contiguous(), "a kernel reads rows side by side"
        num_deltas = 0 if delta is None else delta.numel() // x.numel()
        rms_norm_kernel[(num_rows,)](
            x, added, weight, summed, normed, eps,
            SIZE=size, NUM_DELTAS=num_deltas, **overlapping(x.device), **_whole_rows(size),
        )  # fmt: skip
    return summed, normed


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up: [N, 2 * size], contiguous, gates first, to [N, size]."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "a kernel reads rows side by side"
    output = gate_up.new_empty(num_rows, size)
    if num_rows:
        grid, options = (num_rows, -(-size // _SWIGLU_COLUMNS)), overlapping(gate_up.device)
        swiglu_kernel[grid](gate_up, output, SIZE=size, BLOCK=_SWIGLU_COLUMNS, num_warps=4, **options)
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
        pair_kernel[num_tokens, 2](
            tokens, embedding, states, embedding_norm, state_norm, both, len(embedding), eps,
            SIZE=size, **_whole_rows(size),
        )  # fmt: skip
    return both


def _whole_rows(size: int) -> dict[str, int]:
    """Returns the options of a program that takes a whole row."""
    block = max(16, power_of_two(size))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def rotation_of(positions: torch.Tensor, table: torch.Tensor, max_positions: int) -> torch.Tensor:
    """Computes cosines and sines of each token's angles: [N, 2, head_dim / 2] float32.

    `positions`: N int64 in any shape, clamped to 0 .. `max_positions` - 1. `table`: [2, head_dim / 2]
    float32, of `rotation_table`.
    """
    num_tokens, half = positions.numel(), table.shape[1]
    rotation = table.new_empty(num_tokens, 2, half)
    if num_tokens:
        rotation_kernel[(-(-num_tokens // _TOKENS_AT_ONCE),)](
            positions.contiguous(), table, rotation, num_tokens, max_positions,
            HALF=half, BLOCK_H=power_of_two(half), BLOCK_T=_TOKENS_AT_ONCE, num_warps=4, **overlapping(table.device),
        )  # fmt: skip
    return rotation
