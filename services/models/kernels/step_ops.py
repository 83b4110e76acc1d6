"""The work of a step around its forwards, each part in one launch; only shapes decide what is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from slipstream.common.wire.layout import RegionWord
from slipstream.services.models.kernels.launching import power_of_two, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.services.models.sampler import SamplingRows


# The constants of `SimulatedAcceptance`.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
ODD = tl.constexpr(0xD1342543DE82EF95 - 2**64)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)
DRAFT_TOKENS = tl.constexpr(int(RegionWord.DRAFT_TOKENS))
DRAFT_STAMPS = tl.constexpr(int(RegionWord.DRAFT_STAMPS))
SEQ_LENS = tl.constexpr(int(RegionWord.SEQ_LENS))
BONUS_TOKENS = tl.constexpr(int(RegionWord.BONUS_TOKENS))
NUM_NEW = tl.constexpr(int(RegionWord.NUM_NEW))
LAST_TOKENS = tl.constexpr(int(RegionWord.LAST_TOKENS))
HIDDEN_STATES = tl.constexpr(int(RegionWord.HIDDEN_STATES))
ROW_WIDTH = tl.constexpr(int(RegionWord.ROW_WIDTH))


@triton.jit
def stamp(stamps: tl.tensor, ring_row: tl.tensor, stride: tl.tensor, is_one: tl.tensor) -> None:
    """In the one program for which that is true, writes %globaltimer into a row of `stamps`, [ring] with a stride."""
    tl.store(stamps + tl.load(ring_row) * stride, globaltimer(), mask=is_one)


@triton.jit(do_not_specialize=["stamp_stride", "vocab_size"])
def gather_kernel(
    seq_lens: tl.tensor,  # [slots] int64
    bonus_tokens: tl.tensor,  # [slots] int64
    num_new: tl.tensor,  # [slots] int64, read if HAS_LAST
    last_tokens: tl.tensor,  # [slots, WIDTH] int64, read if HAS_LAST
    stamps: tl.tensor,  # [ring] int64, written if HAS_STAMP
    ring_row: tl.tensor,  # [1] int64
    stamp_stride: tl.tensor,
    rows: tl.tensor,  # [B] int64
    limits: tl.tensor,  # [slots] int64
    out_seq_lens: tl.tensor,  # [B] int64
    out_bonus: tl.tensor,  # [B] int64
    out_num_new: tl.tensor,  # [B] int64
    out_last: tl.tensor,  # [B, WIDTH] int64
    vocab_size: tl.tensor, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, HAS_LAST: tl.constexpr, HAS_STAMP: tl.constexpr,
) -> None:  # fmt: skip
    """Reads the stash of one slot, clamped to its range; the first program stamps. Grid: (B,).

    Of new tokens only those up to the limit count.
    """
    b = tl.program_id(0)
    if HAS_STAMP:
        stamp(stamps, ring_row, stamp_stride, b == 0)
    slot = tl.load(rows + b)
    length = tl.maximum(tl.load(seq_lens + slot), 0)
    end = tl.minimum(length, tl.load(limits + slot))
    tl.store(out_seq_lens + b, end)
    bonus = tl.load(bonus_tokens + slot)
    tl.store(out_bonus + b, tl.minimum(tl.maximum(bonus, 0), vocab_size - 1))
    if HAS_LAST:
        new = tl.load(num_new + slot) - (length - end)
        tl.store(out_num_new + b, tl.minimum(tl.maximum(new, 1), WIDTH))
        w = tl.arange(0, BLOCK_W)
        token = tl.load(last_tokens + slot * WIDTH + w, mask=w < WIDTH, other=0)
        tl.store(out_last + b * WIDTH + w, tl.minimum(tl.maximum(token, 0), vocab_size - 1), mask=w < WIDTH)


@triton.jit(
    do_not_specialize=["width"],
    # Graphs find their slots elsewhere than mixed steps, which launch it outside of graphs and for any number of rows.
    do_not_specialize_on_alignment=["rows", "thresholds", "out_seq_lens", "out_accepted"],
)
def accept_kernel(
    tokens: tl.tensor,  # [B, width] int64: the target's
    given: tl.tensor,  # [B, width] int64: the bonus token, then the draft's
    scores: tl.tensor,  # [B, width]: the logits of `tokens`
    rows: tl.tensor,  # [B] int64
    seq_lens: tl.tensor,  # [B] int64
    most: tl.tensor,  # [slots] int64: draft tokens that may be accepted
    seeds: tl.tensor,  # [slots] int64, read if IS_SIMULATED
    out_seq_lens: tl.tensor,  # [B] int64
    out_accepted: tl.tensor,  # [B] int64
    thresholds: tl.tensor,  # [K] int64, read if IS_SIMULATED
    width: tl.tensor, BLOCK_W: tl.constexpr, IS_SIMULATED: tl.constexpr,
) -> None:  # fmt: skip
    """Counts the accepted draft tokens of one slot: all before the first mismatch or score that is not finite.

    Grid: (B,).
    """
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    length = tl.load(seq_lens + b)
    w = tl.arange(0, BLOCK_W)
    is_drafted = w < width - 1
    if IS_SIMULATED:
        seed = tl.load(seeds + slot) + tl.zeros((BLOCK_W,), tl.int64)
        bits = seed * ODD + (length + 1 + w) * GOLDEN
        bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * MIX_1
        bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * MIX_2
        stands = ((bits >> 32) & 0xFFFFFFFF) < tl.load(thresholds + w, mask=is_drafted, other=0)
    else:
        target = tl.load(tokens + b * width + w, mask=is_drafted, other=0)
        draft = tl.load(given + b * width + 1 + w, mask=is_drafted, other=0)
        stands = target == draft
    score_after = tl.load(scores + b * width + 1 + w, mask=is_drafted, other=0.0)
    stands = stands & (tl.abs(score_after) < float("inf"))
    first_miss = tl.min(tl.where(stands & is_drafted, BLOCK_W, tl.minimum(w, width - 1)), axis=0)
    accepted = tl.minimum(first_miss.to(tl.int64), tl.load(most + slot))
    tl.store(out_accepted + b, accepted)
    tl.store(out_seq_lens + b, length + accepted + 1)


@triton.jit(do_not_specialize=["num_slots", "width"])
def publish_kernel(
    new_seq_lens: tl.tensor,  # [ring, slots] int64
    num_accepted: tl.tensor,  # [ring, slots] int32
    output_tokens: tl.tensor,  # [ring, slots, ROW] int64
    kept_seq_lens: tl.tensor,  # [slots] int64
    kept_bonus: tl.tensor,  # [slots] int64
    ring_row: tl.tensor,  # [1] int64
    rows: tl.tensor,  # [B] int64
    seq_lens: tl.tensor,  # [B] int64
    accepted: tl.tensor,  # [B] int64
    tokens: tl.tensor,  # [B, width] int64
    scores: tl.tensor,  # [B, width], read if HAS_SCORES
    num_slots: tl.tensor, width: tl.tensor, ROW: tl.constexpr, BLOCK_W: tl.constexpr, HAS_SCORES: tl.constexpr,
    NOT_FINITE: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Writes what the scheduler reads of one slot, and what verify's next step does. Grid: (B,)."""
    wait_for_previous(OVERLAPS)
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    length = tl.load(seq_lens + b)
    number = tl.load(accepted + b)
    place = tl.load(ring_row) * num_slots + slot
    tl.store(new_seq_lens + place, length)
    w = tl.arange(0, BLOCK_W)
    published = number
    if HAS_SCORES:
        score = tl.load(scores + b * width + w, mask=w <= number, other=0.0)
        num_sound = tl.sum((tl.abs(score) < float("inf")).to(tl.int32), axis=0)
        published = tl.where(num_sound == BLOCK_W, number, NOT_FINITE)
    tl.store(num_accepted + place, published.to(tl.int32))
    tl.store(kept_seq_lens + slot, length)
    tl.store(kept_bonus + slot, tl.load(tokens + b * width + number))
    token = tl.load(tokens + b * width + w, mask=w < width, other=0)
    tl.store(output_tokens + place * ROW + w, token, mask=w < width)


@triton.jit(do_not_specialize=["stamp_stride", "width"])
def propose_kernel(
    draft_tokens: tl.tensor,  # [slots, ROW] int64
    num_proposed: tl.tensor,  # [slots] int64
    stamps: tl.tensor,  # [ring] int64, written if HAS_STAMP
    ring_row: tl.tensor,  # [1] int64
    stamp_stride: tl.tensor,
    rows: tl.tensor,  # [B] int64
    tokens: tl.tensor,  # [B, width] int64
    width: tl.tensor, ROW: tl.constexpr, BLOCK_W: tl.constexpr, HAS_STAMP: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the draft's tokens of one slot and their number; the last program stamps. Grid: (B,)."""
    wait_for_previous(OVERLAPS)
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    w = tl.arange(0, BLOCK_W)
    token = tl.load(tokens + b * width + w, mask=w < width, other=0)
    tl.store(draft_tokens + slot * ROW + w, token, mask=w < width)
    tl.store(num_proposed + slot, width)
    if HAS_STAMP:
        stamp(stamps, ring_row, stamp_stride, b == tl.num_programs(0) - 1)


@triton.jit
def region_buffer(region: tl.tensor, word: tl.constexpr, element: tl.constexpr) -> tl.tensor:
    """A buffer of a region, whose address is in that word, in elements of that dtype; null if there is none."""
    return tl.load(region + word).to(tl.pointer_type(element))


@triton.jit(
    # Launched outside of graphs, too: no batch size and no draft may find a kernel that is not compiled.
    do_not_specialize=["stamp_stride", "row_stride", "token_stride", "width", "hidden_width"],
    do_not_specialize_on_alignment=["region", "stamps", "ring_row", "rows", "seq_lens", "accepted", "tokens"],
)
def stash_kernel(
    region: tl.tensor,  # [words of `RegionWord`] int64
    stamps: tl.tensor,  # [ring] int64, written if HAS_STAMP
    ring_row: tl.tensor,  # [1] int64
    stamp_stride: tl.tensor,
    rows: tl.tensor,  # [B] int64
    seq_lens: tl.tensor,  # [B] int64
    accepted: tl.tensor,  # [B] int64
    tokens: tl.tensor,  # [B, width] int64
    hidden: tl.tensor,  # [B, width, hidden_width], read if that is not 0
    row_stride: tl.tensor,  # of `hidden`
    token_stride: tl.tensor, width: tl.tensor, hidden_width: tl.tensor, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_STAMP: tl.constexpr,
) -> None:  # fmt: skip
    """Writes what the draft's next forward reads of one slot into a region, if there is one.

    The last program stamps when it has done its part; others may take a little longer.
    Grid: (B, 1 + width * blocks of a state).
    """
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + b)
    row_width = tl.load(region + ROW_WIDTH)
    if tl.program_id(1) == 0:
        if row_width != 0:
            number = tl.load(accepted + b)
            tl.store(region_buffer(region, SEQ_LENS, tl.int64) + slot, tl.load(seq_lens + b))
            tl.store(region_buffer(region, BONUS_TOKENS, tl.int64) + slot, tl.load(tokens + b * width + number))
            tl.store(region_buffer(region, NUM_NEW, tl.int64) + slot, number + 1)
            w = tl.arange(0, BLOCK_W)
            token = tl.load(tokens + b * width + w, mask=w < width, other=0)
            tl.store(region_buffer(region, LAST_TOKENS, tl.int64) + slot * row_width + w, token, mask=w < width)
    elif tl.load(region + HIDDEN_STATES) != 0:
        num_blocks = (hidden_width + BLOCK_H - 1) // BLOCK_H
        column = (tl.program_id(1) - 1) // num_blocks
        i = (tl.program_id(1) - 1) % num_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        state = tl.load(hidden + b * row_stride + column * token_stride + i, mask=i < hidden_width, other=0.0)
        stashed = tl.multiple_of(region_buffer(region, HIDDEN_STATES, hidden.dtype.element_ty), 16)
        tl.store(stashed + (slot * row_width + column) * hidden_width + i, state, mask=i < hidden_width)
    if HAS_STAMP:
        is_last = (b == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
        stamp(stamps, ring_row, stamp_stride, is_last)


@triton.jit(
    do_not_specialize=["row", "num_ring_rows", "vocab_size", "width"],  # as in `stash_kernel`
    do_not_specialize_on_alignment=["region", "rows", "copied", "ring_row"],
)
def copy_in_kernel(
    region: tl.tensor,  # [words of `RegionWord`] int64
    result_stamps: tl.tensor,  # [ring, 2, 2] int64, written
    rows: tl.tensor,  # [B] int64
    copied: tl.tensor,  # [B, width] int64, written
    ring_row: tl.tensor,  # [1] int64: the step's row, read if IS_CAPTURED
    row: tl.tensor,  # the same otherwise
    num_ring_rows: tl.tensor, vocab_size: tl.tensor, width: tl.tensor, BLOCK_W: tl.constexpr, IS_CAPTURED: tl.constexpr,
) -> None:  # fmt: skip
    """Copies one slot's draft tokens, clamped to the vocabulary, and the draft's stamps. Grid: (B,).

    The stamps are those of the step's decode part and of the prefill part before it. Without a region, tokens are 0.
    """
    b = tl.program_id(0)
    w = tl.arange(0, BLOCK_W)
    row_width = tl.load(region + ROW_WIDTH)  # K + 1
    if row_width == 0:
        tl.store(copied + b * width + w, tl.zeros((BLOCK_W,), tl.int64), mask=w < width)
    else:
        draft_tokens = region_buffer(region, DRAFT_TOKENS, tl.int64)
        token = tl.load(draft_tokens + tl.load(rows + b) * (row_width - 1) + w, mask=w < width, other=0)
        tl.store(copied + b * width + w, tl.minimum(tl.maximum(token, 0), vocab_size - 1), mask=w < width)
        if b == 0:
            own = tl.load(ring_row) if IS_CAPTURED else row
            i = tl.arange(0, 4)  # the places of a row: the decode part's two, then the prefill part's
            place = tl.where(i < 2, own, (own + num_ring_rows - 1) % num_ring_rows) * 4 + i
            tl.store(result_stamps + place, tl.load(region_buffer(region, DRAFT_STAMPS, tl.int64) + place))


@triton.jit(do_not_specialize=["width"])
def take_sampling_kernel(
    temperature: tl.tensor,  # [slots] float32
    top_k: tl.tensor,  # [slots] int64
    top_p: tl.tensor,  # [slots] float32
    min_p: tl.tensor,  # [slots] float32
    seed: tl.tensor,  # [slots] int64
    rows: tl.tensor,  # [B] int64
    out_temperature: tl.tensor,  # [B * width] float32, and so on
    out_top_k: tl.tensor, out_top_p: tl.tensor, out_min_p: tl.tensor, out_seed: tl.tensor, width: tl.tensor,
) -> None:  # fmt: skip
    """Copies one slot's sampling parameters for one token. Grid: (B * width,)."""
    n = tl.program_id(0)
    slot = tl.load(rows + n // width)
    tl.store(out_temperature + n, tl.load(temperature + slot))
    tl.store(out_top_k + n, tl.load(top_k + slot))
    tl.store(out_top_p + n, tl.load(top_p + slot))
    tl.store(out_min_p + n, tl.load(min_p + slot))
    tl.store(out_seed + n, tl.load(seed + slot))


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Columns of `SamplingRows`, as the kernel takes them."""


_LEAST_TOKENS = 16


def token_block(width: int) -> int:
    """A block for `width` tokens of a slot: the same for all usual numbers, so that a new draft finds it compiled."""
    return max(_LEAST_TOKENS, power_of_two(width))


def take_sampling(table: SamplingRows, rows: Tensor, width: int) -> SamplingRows:
    """Does `table.take(rows.repeat_interleave(width))` in one launch. `rows`: [B] int64."""
    num_tokens = len(rows) * width
    taken = table.map(lambda column: column.new_empty(num_tokens))
    take_sampling_kernel[(num_tokens,)](
        *(getattr(table, name) for name in _SAMPLING), rows, *(getattr(taken, name) for name in _SAMPLING), width,
        num_warps=1,
    )  # fmt: skip
    return taken


def accept(
    tokens: Tensor,
    given: Tensor,
    scores: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    most: Tensor,
    seeds: Tensor,
    thresholds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Counts the accepted draft tokens of B slots, as `sampler.accept` does; returns new lengths and counts.

    None is accepted from the first on that a score which is not finite follows. `tokens`: [B, W] int64, the target's;
    `given`: [B, W] int64, the bonus token and the draft's; `scores`: [B, W], of `tokens`. `rows`, `seq_lens`:
    [B] int64. `most`: [slots] int64, draft tokens that may be accepted. `seeds`: [slots] int64. `thresholds`: [K]
    int64, accepts by chance instead, see `SimulatedAcceptance`. Returns two [B] int64.
    """
    num_rows, width = tokens.shape
    new_seq_lens, accepted = torch.empty((2, num_rows), dtype=torch.int64, device=tokens.device)
    accept_kernel[(num_rows,)](
        tokens, given, scores, rows, seq_lens, most, seeds, new_seq_lens, accepted,
        rows if thresholds is None else thresholds, width,
        BLOCK_W=token_block(width), IS_SIMULATED=thresholds is not None, num_warps=1,
    )  # fmt: skip
    return new_seq_lens, accepted
