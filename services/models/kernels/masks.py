"""Masks of a grammar worker on a GPU, read where it wrote them, in the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from slipstream.common.wire.layout import UNMASKED, UNMATCHED

if TYPE_CHECKING:
    from torch import Tensor

NO_MASKS = tl.constexpr(UNMASKED)
NO_MATCH = tl.constexpr(UNMATCHED)
_WORD = tl.constexpr(32)
"""Tokens of a word."""
_WORDS = 128
"""Words that a program reads: so many are under way at once that they take no longer than the bus does."""


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["rows", "constrained", "faults"])
def faults_kernel(
    stamps: tl.tensor,  # [slots] int64, in the host's memory
    constrained: tl.tensor,  # [slots] int64: 1 for those with a constraint in this step
    rows: tl.tensor,  # [B] int64
    faults: tl.tensor,  # [B] int64, written
    step: tl.tensor,
) -> None:
    """Decides whether a slot's masks are there, once: programs that looked for themselves might differ. Grid: (B,)."""
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    stamp = tl.load(stamps + slot, volatile=True)
    fault = tl.where(stamp == step, 0, tl.where(stamp == -step, NO_MATCH, NO_MASKS))
    tl.store(faults + b, tl.where(tl.load(constrained + slot) != 0, fault, 0).to(tl.int64))


@triton.jit(
    do_not_specialize=["vocab_size", "num_words", "places"],
    do_not_specialize_on_alignment=["rows", "constrained", "faults", "logits"],
)
def mask_kernel(
    masks: tl.tensor,  # [slots, places, num_words] int32, in the host's memory
    constrained: tl.tensor,  # [slots] int64
    rows: tl.tensor,  # [B] int64
    faults: tl.tensor,  # [B] int64
    logits: tl.tensor,  # [B, W, vocab_size], written
    vocab_size: tl.tensor, num_words: tl.tensor, places: tl.tensor, WORD: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Takes the tokens that a mask does not allow out of one place's logits. Grid: (B, W, blocks of words)."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1)
    slot = tl.load(rows + b)
    if (tl.load(constrained + slot) == 0) | (tl.load(faults + b) != 0):
        return
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    at = masks + (slot * places + w) * num_words + word
    bits = tl.load(at, mask=word < num_words, other=0, volatile=True)
    bit = tl.arange(0, WORD)
    is_out = ((bits[:, None] >> bit[None, :]) & 1) == 0
    token = word[:, None] * WORD + bit[None, :]
    row = logits + (b * tl.num_programs(1) + w) * vocab_size
    value = tl.full([WORDS, WORD], float("-inf"), logits.dtype.element_ty)
    tl.store(row + token, value, mask=is_out & (token < vocab_size))


def faults_of(stamps: Tensor, constrained: Tensor, rows: Tensor, step: int) -> Tensor:
    """Looks for the masks of B slots: 0 for each where they are there or none are needed, else UNMASKED or UNMATCHED.

    `stamps`, `constrained`: [slots] int64; `rows`: [B] int64. Returns [B] int64.
    """
    faults = rows.new_empty(len(rows))
    faults_kernel[(len(rows),)](stamps, constrained, rows, faults, step, num_warps=1)
    return faults


def apply_masks(masks: Tensor, constrained: Tensor, rows: Tensor, faults: Tensor, logits: Tensor) -> None:
    """Sets the logits of tokens that a slot's masks do not allow to minus infinity, but for slots with a fault.

    `masks`: [slots, places, words] int32; `logits`: [B, W, vocab_size], contiguous, W at most `places`.
    """
    assert logits.is_contiguous(), "a kernel writes rows side by side"
    (num_rows, width, vocab_size), (_, places, num_words) = logits.shape, masks.shape
    assert width <= places, "there are masks for each place"
    mask_kernel[num_rows, width, -(-num_words // _WORDS)](
        masks, constrained, rows, faults, logits, vocab_size, num_words, places,
        WORD=_WORD.value, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip
