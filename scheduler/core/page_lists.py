"""The pages of the running sequences: each holds those that it uses, and gets more before a step may write to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from slipstream.common.wire.step import SlotUpdate
    from slipstream.scheduler.core.batch_sizes import BatchSizes
    from slipstream.scheduler.core.prefix_cache import PrefixCache
    from slipstream.scheduler.records import Counts, Ints, Sequence

_KEPT_SHARE = 32
"""The watermark: one page in so many is kept for the sequences that run."""
STEPS_AHEAD = 32
"""Steps that a sequence gets pages for at a time, while more than the kept ones are free."""
_LOW_STEPS = 16
"""When one sequence needs pages, those that have pages for fewer steps than this get some, too: not every step then has
updates."""
_WHOLE = 1 << 62


class PageLists:
    """Belongs to the loop's thread. Lengths are those of outputs."""

    def __init__(self, sizes: BatchSizes, pages: PrefixCache) -> None:
        self._sizes = sizes
        self._pages = pages
        self._num_kept = -(-pages.num_pages // _KEPT_SHARE)
        self._room: NDArray[np.int64] = np.full(sizes.num_slots, _WHOLE)
        """[slots]: output tokens that a slot's pages have room for; _WHOLE if they are all that it can need."""
        self._most: NDArray[np.int64] = np.zeros(sizes.num_slots, np.int64)
        """[slots]: output tokens at most."""
        self._unsent: dict[Sequence, int] = {}
        """Sequences that the workers are to be told of with the next step, and the index of the first new page."""

    def fits(self, sequence: Sequence, *, is_alone: bool) -> bool:
        """True if the pages to prefill a sequence are free, beside the kept ones unless it runs alone."""
        num_kept = 0 if is_alone else self._num_kept
        return self._pages.num_free - self._num_to_prefill(sequence) >= num_kept

    def begin(self, sequence: Sequence) -> None:
        """Gives a sequence that has got a slot the pages to prefill it. They must be free."""
        self._most[sequence.lease.slot] = sequence.spec.max_new_tokens
        self._extend(sequence, self._num_to_prefill(sequence))

    def end(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence back."""
        self._unsent.pop(sequence, None)
        self._pages.release(sequence.pages)
        sequence.pages = []

    def num_steps(self, rows: Ints, lengths: Counts) -> Ints:
        """How many more steps the pages of some slots last. `lengths`: the most after all steps under way."""
        # A step writes from the place of the last token on: as many as it brings, of which the last one is not written.
        num_steps: Ints = (self._room[rows] - lengths + 1) // self._sizes.most_step_tokens
        return num_steps

    def short(self, rows: Ints, lengths: Counts) -> tuple[Ints, Counts]:
        """The slots that are to get pages now, and their lengths."""
        is_short = self.num_steps(rows, lengths) < (_LOW_STEPS if self._pages.num_free > self._num_kept else 1)
        return rows[is_short], lengths[is_short]

    def grow_together(self, rows: Ints, lengths: Counts, sequences: Mapping[int, Sequence]) -> bool:
        """Gives short slots pages for STEPS_AHEAD steps; returns False, and gives none, if too few are free.

        `sequences`: by slot.
        """
        room, most, page_tokens = self._room[rows], self._most[rows], self._sizes.page_tokens
        ahead = np.minimum(lengths + (STEPS_AHEAD * self._sizes.most_step_tokens - 1), most)
        num_more = -((room - ahead) // page_tokens)
        total = int(num_more.sum())
        if self._pages.num_free - total < self._num_kept:
            return False
        room += num_more * page_tokens
        room[room >= most] = _WHOLE
        self._room[rows] = room
        pages, end = self._pages.allocate(total), 0
        for slot, count in zip(rows.tolist(), num_more.tolist(), strict=True):
            sequence, begin, end = sequences[slot], end, end + count
            self._unsent.setdefault(sequence, len(sequence.pages))
            sequence.pages += pages[begin:end]
        return True

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Gives a sequence pages for its next steps. Returns False if too few are free for the first of them."""
        num_pages, num_free = len(sequence.pages), self._pages.num_free
        num_more = self._num_for(sequence, length, STEPS_AHEAD) - num_pages
        if num_free - num_more < self._num_kept:
            num_more = max(0, self._num_for(sequence, length, 1) - num_pages)
        if num_more > num_free:
            return False
        if num_more:
            self._unsent.setdefault(sequence, num_pages)
            self._extend(sequence, num_more)
        return True

    def resend(self, sequence: Sequence) -> None:
        """Has the workers told anew what `Sequence.page_update` says, whether or not it has got pages."""
        self._unsent.setdefault(sequence, len(sequence.pages))

    def take_updates(self) -> tuple[SlotUpdate, ...]:
        """Returns the new pages since the last call, for the workers."""
        if not self._unsent:
            return ()
        unsent, self._unsent = self._unsent, {}
        return tuple(sequence.page_update(first) for sequence, first in unsent.items())

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        sequence.pages.extend(self._pages.allocate(num_pages))
        room = len(sequence.pages) * self._sizes.page_tokens
        is_whole = room >= sequence.num_tokens_at_most
        self._room[sequence.lease.slot] = _WHOLE if is_whole else room - len(sequence.spec.prompt)

    def _num_to_prefill(self, sequence: Sequence) -> int:
        most = self._sizes.pages_of(sequence.num_tokens_at_most)
        return min(self._sizes.pages_for(len(sequence.tokens)), most)

    def _num_for(self, sequence: Sequence, length: int, num_steps: int) -> int:
        # Positions at the limit and behind it have no pages.
        most = length + num_steps * self._sizes.most_step_tokens - 1
        return self._sizes.pages_of(len(sequence.spec.prompt) + min(most, sequence.spec.max_new_tokens))
