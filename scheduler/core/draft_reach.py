"""Which running sequences the draft has room for: its context limits drafting, and no sequence.

A sequence that is to grow longer than the draft's context is drafted for while all tokens drafted for it have room
there. From then on verify accepts none for it, so that it decodes plainly, in the steps of those that are drafted for
as well as in plain ones. It does not come back, as the draft was not told of the tokens of plain steps; another draft
may have room for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.scheduler.records import NO_DRAFT, NO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from slipstream.scheduler.core.accounts import SlotAccounts
    from slipstream.scheduler.core.batch_sizes import BatchSizes
    from slipstream.scheduler.core.page_lists import PageLists
    from slipstream.scheduler.records import Bools, DraftKV, Ints, Sequence


class DraftReach:
    """Belongs to the loop's thread. Lengths are those of outputs."""

    def __init__(self, sizes: BatchSizes, accounts: SlotAccounts, page_lists: PageLists) -> None:
        self._sizes = sizes
        self._accounts = accounts
        self._page_lists = page_lists
        self._draft = NO_DRAFT
        self._room: NDArray[np.int64] = np.full(sizes.num_slots, NO_LIMIT)
        """[slots]: see `room_for`."""
        self._is_beyond = np.zeros(sizes.num_slots, np.bool_)

    def change(self, draft: DraftKV, sequences: Iterable[Sequence]) -> None:
        """Another draft takes part from the next step on, or none. `sequences`: all that have a slot."""
        self._draft = draft
        for sequence in sequences:
            self.look(sequence)

    def look(self, sequence: Sequence) -> None:
        """Decides whether a sequence that has a slot is too long for the draft now; the workers learn what changes."""
        slot = sequence.lease.slot
        if self._draft.attachment:
            self._room[slot] = room_for(sequence, self._draft, self._sizes)
            has_room = bool(self._accounts.lengths.most(slot) <= self._room[slot])
            is_beyond = not has_room and sequence.spec.max_draft_tokens != 0
            if is_beyond is not sequence.is_beyond_draft:
                sequence.is_beyond_draft = is_beyond
                self._accounts.count_drafted(sequence)
                if sequence.num_prefilled:
                    self._page_lists.resend(sequence)
        self._is_beyond[slot] = sequence.is_beyond_draft

    def is_beyond(self, rows: Ints) -> Bools | None:
        """Which of these slots are too long for the draft; None if none is, or if there is no draft."""
        is_beyond: Bools = self._is_beyond[rows]
        return is_beyond if self._draft.attachment and is_beyond.any() else None

    def ends(self, rows: Ints) -> tuple[list[int], int]:
        """Returns those of the slots drafted for that have no room now, and for how many steps the others have."""
        if not self._draft.attachment:
            return [], NO_LIMIT
        rows = rows[self._accounts.num_drafted[rows] > 0]
        left = self._room[rows] - self._accounts.lengths.most(rows)
        has_room = left >= 0
        num_steps = left[has_room] // self._sizes.most_step_tokens + 1
        return rows[~has_room].tolist(), int(num_steps.min(initial=NO_LIMIT))


def room_for(sequence: Sequence, draft: DraftKV, sizes: BatchSizes) -> int:
    """Returns how long the output may be for a step to draft for it."""
    if sequence.num_tokens_at_most <= draft.context_tokens:
        return NO_LIMIT
    return draft.context_tokens - sizes.num_draft_tokens - len(sequence.spec.prompt)
