"""A `SuffixCache` on a GPU: two launches to take in a step's tokens, two to guess, which depend only on shapes.

An entry's place is its number modulo the size. `before` and `next_places` have one place more, which does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from slipstream.services.draft.suffix_cache import NO_TOKEN, NOTHING_TO_FIND, SuffixCache
from slipstream.services.models.kernels.launching import power_of_two

if TYPE_CHECKING:
    from slipstream.services.draft.suffix_cache import Guesses, NewTokens


@triton.jit(do_not_specialize=["num_rows", "size"])
def plan_kernel(
    rows: tl.tensor,  # [B] int64
    ends: tl.tensor,  # [B] int64
    num_new: tl.tensor,  # [B] int64
    limits: tl.tensor,  # [B] int64
    are_shared: tl.tensor,  # [B] bool
    count: tl.tensor,  # [1] int64, changed
    last: tl.tensor,  # [slots] int64, changed
    expected: tl.tensor,  # [slots] int64, changed
    numbers: tl.tensor,  # [B] int64, written: of the first entry of each row
    taken: tl.tensor,  # [B] int64, written: how many it gets
    linked: tl.tensor,  # [B] int64, written: the place that they go on from
    num_rows: tl.tensor, size: tl.tensor, BLOCK_B: tl.constexpr,
) -> None:  # fmt: skip
    """Gives the tokens of a step their numbers, in the order of rows. Grid: (1,)."""
    b = tl.arange(0, BLOCK_B)
    is_row = b < num_rows
    slot = tl.load(rows + b, mask=is_row, other=0)
    new = tl.load(num_new + b, mask=is_row, other=0)
    first = tl.load(ends + b, mask=is_row, other=0) + 1 - new
    most = tl.minimum(new, tl.load(limits + b, mask=is_row, other=0) - first)
    is_shared = tl.load(are_shared + b, mask=is_row, other=0) != 0
    number_taken = tl.where(is_shared & is_row, tl.maximum(most, 0), 0)
    is_any = number_taken > 0
    start = tl.load(count)
    number = start + tl.cumsum(number_taken, axis=0) - number_taken
    total = start + tl.sum(number_taken, axis=0)
    last_number = tl.load(last + slot, mask=is_row, other=0)
    goes_on = is_any & (tl.load(expected + slot, mask=is_row, other=-1) == first) & (last_number >= total - size)
    tl.store(numbers + b, number, mask=is_row)
    tl.store(taken + b, number_taken, mask=is_row)
    tl.store(linked + b, tl.where(goes_on, last_number % size, size), mask=is_row)
    tl.debug_barrier()  # all threads have read what changes now
    tl.store(last + slot, number + number_taken - 1, mask=is_any)
    tl.store(expected + slot, first + number_taken, mask=is_any)
    tl.store(count, total)


@triton.jit(do_not_specialize=["size", "history_width"])
def record_kernel(
    new_tokens: tl.tensor,  # [B, WIDTH] int64
    ends: tl.tensor,  # [B] int64
    num_new: tl.tensor,  # [B] int64
    numbers: tl.tensor,  # [B] int64, as `plan_kernel` wrote them, and so on
    taken: tl.tensor, linked: tl.tensor,
    history: tl.tensor,  # [B, history_width] int32
    tokens: tl.tensor,  # [size + 1] int32, written
    before: tl.tensor,  # [LONGEST, size + 1] int32, written
    next_places: tl.tensor,  # [size + 1] int64, written
    size: tl.tensor, history_width: tl.tensor, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, LONGEST: tl.constexpr,
    NO_TOKEN: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the entries of one row. Grid: (B,)."""
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(taken + b)
    number = tl.load(numbers + b)
    first = tl.load(ends + b) + 1 - tl.load(num_new + b)
    w = tl.arange(0, BLOCK_W)
    is_taken = w < count
    place = (number + w) % size
    token = tl.load(new_tokens + b * WIDTH + w, mask=is_taken, other=0)
    tl.store(tokens + place, token.to(tl.int32), mask=is_taken)
    tl.store(next_places + place, tl.where(w + 1 < count, (place + 1) % size, -1), mask=is_taken)
    tl.store(next_places + tl.load(linked + b), number % size)
    for back in range(LONGEST):
        position = first + w - 1 - back
        source = history + b * history_width + tl.minimum(position, history_width - 1)
        token_before = tl.load(source, mask=is_taken & (position >= 0), other=NO_TOKEN)
        tl.store(before + back * (size + 1).to(tl.int64) + place, token_before, mask=is_taken)


@triton.jit(do_not_specialize=["size", "history_width"])
def search_kernel(
    before: tl.tensor,  # [LONGEST, size + 1] int32
    history: tl.tensor,  # [B, history_width] int32
    ends: tl.tensor,  # [B] int64
    count: tl.tensor,  # [1] int64
    best: tl.tensor,  # [B] int32, 0 at first: as `search` of `suffix_cache.py` returns it
    size: tl.tensor, history_width: tl.tensor, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, NOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compares BLOCK entries with the end of one row. Grid: (cdiv(size, BLOCK), B).

    Only of entries that match so far is the next token read.
    """
    b = tl.program_id(1).to(tl.int64)
    end = tl.load(ends + b)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_match = place < size
    score = tl.zeros((BLOCK,), tl.int32)
    for back in range(LONGEST):
        source = history + b * history_width + tl.minimum(end - back, history_width - 1)
        wanted = tl.load(source, mask=end >= back, other=NOTHING)
        token = tl.load(before + back * (size + 1).to(tl.int64) + place, mask=is_match, other=NOTHING)
        is_match = is_match & (token == wanted)
        score += (is_match & (back >= SHORTEST - 1)).to(tl.int32)
    oldest = (tl.load(count) % size).to(tl.int32)
    age = tl.where(place < oldest, place - oldest + size, place - oldest)
    found = tl.max(tl.where(score > 0, score * size + age, 0), axis=0)
    if found > 0:
        tl.atomic_max(best + b, found, sem="relaxed")


@triton.jit(do_not_specialize=["size"])
def follow_kernel(
    best: tl.tensor,  # [B] int32
    scores: tl.tensor,  # [B]: of the guesses of the rows' own texts
    own_tokens: tl.tensor,  # [B, NUM_TOKENS] int64: these guesses
    are_shared: tl.tensor,  # [B] bool
    tokens: tl.tensor,  # [size + 1] int32
    next_places: tl.tensor,  # [size + 1] int64
    count: tl.tensor,  # [1] int64
    guesses: tl.tensor,  # [B, NUM_TOKENS] int64, written
    size: tl.tensor, NUM_TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Takes what follows a longer match, or the own guesses, for one row. Grid: (B,)."""
    b = tl.program_id(0).to(tl.int64)
    found = tl.load(best + b)
    is_longer = (found // size > tl.load(scores + b)) & (tl.load(are_shared + b) != 0)
    first = (found % size + tl.load(count)) % size
    place = first
    for k in range(NUM_TOKENS):
        token = tl.load(tokens + place).to(tl.int64)
        own = tl.load(own_tokens + b * NUM_TOKENS + k)
        tl.store(guesses + b * NUM_TOKENS + k, tl.where(is_longer, token, own))
        following = tl.load(next_places + place)
        place = tl.where(following < 0, first, following)


_SEARCH_BLOCK = 1024
"""Entries that a program compares: of 65,536 each sequence has 64 programs."""


class FusedSuffixCache(SuffixCache):
    """Compares each sequence with all entries, also with those that are empty."""

    def record(self, new: NewTokens, history: torch.Tensor) -> None:
        num_rows, width = new.tokens.shape
        numbers, taken, linked = torch.empty((3, num_rows), dtype=torch.int64, device=self._device)
        plan_kernel[(1,)](
            new.rows, new.ends, new.num_new, new.limits, new.are_shared, self._count, self._last, self._expected,
            numbers, taken, linked, num_rows, self._size,
            BLOCK_B=power_of_two(num_rows), num_warps=4,
        )  # fmt: skip
        record_kernel[(num_rows,)](
            new.tokens.contiguous(), new.ends, new.num_new, numbers, taken, linked, history, self._tokens, self._before,
            self._next, self._size, history.shape[1],
            WIDTH=width, BLOCK_W=power_of_two(width), LONGEST=self._longest, NO_TOKEN=NO_TOKEN, num_warps=1,
        )  # fmt: skip

    def improve(self, own: Guesses, new: NewTokens, history: torch.Tensor) -> torch.Tensor:
        num_rows, num_tokens = own.tokens.shape
        best = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        search_kernel[triton.cdiv(self._size, _SEARCH_BLOCK), num_rows](
            self._before, history, new.ends, self._count, best, self._size, history.shape[1],
            SHORTEST=self._shortest, LONGEST=self._longest, NOTHING=NOTHING_TO_FIND, BLOCK=_SEARCH_BLOCK, num_warps=4,
        )  # fmt: skip
        guesses = torch.empty_like(own.tokens)
        follow_kernel[(num_rows,)](
            best, own.scores, own.tokens.contiguous(), new.are_shared, self._tokens, self._next, self._count, guesses,
            self._size,
            NUM_TOKENS=num_tokens, num_warps=1,
        )  # fmt: skip
        return guesses
