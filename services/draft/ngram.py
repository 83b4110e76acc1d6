"""Prompt lookup: drafts what followed the last tokens of a sequence where they stood before, without a model.

They stood there in the sequence itself, or, if it is so set, in a recent output of any request (`SuffixCache`).

The tokens of all sequences, prompt and output, lie on the device in pages with the scheduler's numbers, as the keys and
values of a model would. So a sequence that begins with pages of the prefix cache has their tokens here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.draft.suffix_cache import Guesses, NewTokens, SuffixCache
from slipstream.services.models.paged_kv import PADDING_PAGE

if TYPE_CHECKING:
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import NextStepState
    from slipstream.services.worker.slots import FlatChunks, SamplingMode


class NgramDrafter:
    """Implements `Drafter` by prompt lookup (Saxena, 2023), for greedy and sampled requests alike."""

    def __init__(self, shortest: int, longest: int, device: torch.device, *, suffix_cache_tokens: int = 0) -> None:
        """`shortest`, `longest`: tokens of a match. `suffix_cache_tokens`: of recent outputs that are searched, too."""
        self._shortest = shortest
        self._longest = longest
        self._device = device
        self._suffix_cache_tokens = suffix_cache_tokens
        self._suffix_cache: SuffixCache | None = None
        self._state: EpochState | None = None
        self._pages = torch.empty(0)
        """[num_pages, page_tokens] int32 token ids."""

    def open(self, state: EpochState) -> None:
        shape = (state.attachment.num_pages, state.attachment.page_tokens)
        self._pages = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._state = state
        if self._suffix_cache_tokens:
            sizes = state.attachment.shape
            most_new = sizes.num_slots * (sizes.num_draft_tokens + 1)
            bounds = self._shortest, self._longest
            num_tokens = max(self._suffix_cache_tokens, most_new)
            self._suffix_cache = _suffix_cache(num_tokens, sizes.num_slots, bounds, self._device)

    def close(self) -> None:
        self._state = None
        self._suffix_cache = None
        self._pages = torch.empty(0)

    def prefill(self, chunks: FlatChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`. No hidden states are read."""
        if self._suffix_cache is not None:
            self._suffix_cache.interrupt(chunks.slots)
        self._record(chunks.slots.index_select(0, chunks.ragged.rows), chunks.positions, chunks.tokens)

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """See `Drafter.propose`. Nothing is sampled."""
        # The columns after the last new token record that one again.
        last = (stash.num_new - 1)[:, None]
        columns = torch.arange(stash.last_tokens.shape[1], device=self._device).minimum(last)
        positions = stash.seq_lens[:, None] - last + columns
        self._record(rows[:, None].expand_as(columns), positions, stash.last_tokens.gather(1, columns))
        history = self._histories(rows, stash.seq_lens)
        own = look_up(history, stash.seq_lens, num_tokens, shortest=self._shortest, longest=self._longest)
        if self._suffix_cache is None:
            return own.tokens
        slots = self._opened.slots
        new = NewTokens(
            rows=rows,
            ends=stash.seq_lens,
            num_new=stash.num_new,
            tokens=stash.last_tokens,
            limits=slots.limits.index_select(0, rows),
            are_shared=~slots.have_cache_salt.index_select(0, rows),
        )
        self._suffix_cache.record(new, history)
        return self._suffix_cache.improve(own, new, history)

    def _record(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes tokens into the pages of their slots. All of one shape, int64; those beyond the limit are dropped."""
        slots, page_tokens = self._opened.slots, self._pages.shape[1]
        positions = positions.clamp(min=0)
        indices = (positions // page_tokens).clamp(max=slots.page_table.shape[1] - 1)
        pages = slots.page_table[rows, indices].masked_fill(positions >= slots.limits[rows], PADDING_PAGE)
        places = pages * page_tokens + positions % page_tokens
        self._pages.view(-1).index_copy_(0, places.flatten(), tokens.flatten().to(self._pages.dtype))

    def _histories(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The tokens of B slots: [B, T] int32, of which those up to the positions `ends` ([B] int64) count."""
        page_table = self._opened.slots.page_table.index_select(0, rows)
        if self._device.type == "cpu":
            # Only where the host can read it without waiting; elsewhere the whole page list is read.
            page_table = page_table[:, : int(ends.max()) // self._pages.shape[1] + 1]
        return self._pages.index_select(0, page_table.flatten()).view(len(rows), -1)

    @property
    def _opened(self) -> EpochState:
        assert self._state is not None, "stream work belongs into an epoch"
        return self._state


def _suffix_cache(num_tokens: int, num_slots: int, bounds: tuple[int, int], device: torch.device) -> SuffixCache:
    if device.type == "cuda":
        from slipstream.services.draft.fused_suffix_cache import FusedSuffixCache

        return FusedSuffixCache(num_tokens, num_slots, bounds, device)
    return SuffixCache(num_tokens, num_slots, bounds, device)


_MOST_COLUMNS = 2**24
"""Tokens of all sequences that are looked at together: each takes 7 bytes for as long."""


def look_up(history: torch.Tensor, ends: torch.Tensor, num_tokens: int, *, shortest: int, longest: int) -> Guesses:
    """Guesses the `num_tokens` tokens after B sequences.

    `history`: [B, T] int32 tokens; `ends`: [B] int64, the position of each sequence's last token.

    Finds the longest suffix of `shortest` to `longest` tokens that stood in the sequence before, where it did last,
    and repeats what follows up to the sequence's end, again and again. Without a match it repeats the last token.
    Which kernels run depends only on shapes.
    """
    width, device = history.shape[1], history.device
    if len(history) > (most_rows := max(1, _MOST_COLUMNS // width)):
        split = zip(torch.split(history, most_rows), torch.split(ends, most_rows), strict=True)
        parts = [look_up(*part, num_tokens, shortest=shortest, longest=longest) for part in split]
        return Guesses(*(torch.cat(values) for values in zip(*parts, strict=True)))
    ends = ends.clamp(max=width - 1)[:, None]
    suffix = history.gather(1, (ends - torch.arange(longest, device=device)).clamp(min=0))
    columns = torch.arange(width, dtype=torch.int32, device=device)
    # Of each column: is it the end of a match so far, and its rank: first by the length of the match, then by place.
    is_match = columns < ends
    ranks = columns.repeat(len(history), 1)
    for back in range(min(longest, width)):
        is_match[:, back:].logical_and_(history[:, : width - back] == suffix[:, back : back + 1])
        if back >= shortest - 1:
            ranks[:, back:].add_(is_match[:, back:], alpha=width)
    best = ranks.amax(dim=1, keepdim=True)
    period = (ends - best % width).masked_fill(best < width, 1)
    places = ends + 1 - period + torch.arange(num_tokens, device=device) % period
    return Guesses(history.gather(1, places).to(torch.int64), best[:, 0] // width)
