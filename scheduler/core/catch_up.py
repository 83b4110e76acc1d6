"""How a draft that comes while sequences run gets their tokens: in commands of its own, beside the steps."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.step import PrefillChunk, StepCommand
from slipstream.scheduler.core.draft_reach import room_for
from slipstream.scheduler.core.plan import catch_up

if TYPE_CHECKING:
    from slipstream.common.wire.step import SlotUpdate
    from slipstream.scheduler.core.batch import Batch
    from slipstream.scheduler.core.draft_work import DraftWork
    from slipstream.scheduler.records import Sequence
    from slipstream.scheduler.workers.attachment import DraftAttachment

_PATIENCE, _MOST_PATIENCE, _FAR_PATIENCE = 4, 8, 256
"""Commands in which what is missing grows no less, as tokens come as fast. After the first, draft joins with a larger
last command; after the second, verify waits for a draft that is near; after the third, draft never gets near."""
_NEAR = 2
"""Verify waits for a draft that lacks so many commands' tokens at most."""


class _Given(NamedTuple):
    """The part of a sequence that draft was sent."""

    generation: int
    """The generation of its lease."""
    num_tokens: int
    num_pages: int


class CatchUp:
    """The tokens that one attachment was sent, and what is missing. Belongs to the loop's thread."""

    def __init__(self, batch: Batch, attachment: DraftAttachment) -> None:
        self.begun_at = time.monotonic()
        self.sent_at = 0.0
        """Time of the last command."""
        self.number = 0
        """Number of the last command."""
        self.is_too_slow = False
        """True once it is known that draft catches up only while verify waits."""
        self.never_gets_near = False
        """True once it is known that draft lacks too much for verify to wait."""
        self._batch = batch
        self._attachment = attachment
        self._reads_tokens = not attachment.traits.reads_hidden
        self._given: dict[int, _Given] = {}
        """By slot."""
        self._missing: deque[int] = deque(maxlen=_FAR_PATIENCE + 1)
        """Before each of the last commands."""

    @property
    def is_pending(self) -> bool:
        """True until draft has done the last command."""
        return self.number > 0 and self._attachment.prefilled.poll() < self.number

    def num_missing(self) -> int:
        """Tokens that draft lacks, and one for each sequence that it does not know at all. A head lacks none."""
        if not self._reads_tokens:
            return 0
        missing = 0
        for sequence, num_known in self._batch.begun():
            given, num_wanted = self._find(sequence), 0 if self._is_beyond(sequence, num_known) else num_known
            missing += num_wanted + 1 if given is None else max(0, num_wanted - given.num_tokens)
        return missing

    def is_close(self, missing: int, growth: int) -> bool:
        """True if draft can join now: one more command has room for all, and is short or is not to get any shorter.

        `missing`: tokens that draft lacks; `growth`: the most tokens that come until that command is sent.
        """
        if not self._reads_tokens:
            return True
        chunk_tokens = self._batch.sizes.chunk_tokens
        if missing + growth > chunk_tokens:
            return False
        return missing <= max(2 * growth, chunk_tokens // 8) or self._has_stalled(_PATIENCE)

    def take_measure(self, missing: int) -> None:
        """Notes how many tokens draft lacks before a command that is not the last, to see whether it gains."""
        self._missing.append(missing)
        is_near = missing <= _NEAR * self._batch.sizes.chunk_tokens
        self.is_too_slow |= is_near and self._has_stalled(_MOST_PATIENCE)
        self.never_gets_near = not is_near and self._has_stalled(_FAR_PATIENCE)

    def _has_stalled(self, num_commands: int) -> bool:
        """True if draft lacks no less than so many commands ago."""
        return len(self._missing) > num_commands and self._missing[-1] >= self._missing[-1 - num_commands]

    def bring(self, number: int, *, held_back: int = 0) -> bool:
        """Sends draft what it lacks, as far as a command may have it. Returns False if there was nothing to send.

        `held_back`: tokens at the end of each decoding sequence that come with a stash. Raises the link's failure.
        """
        if self.is_too_slow:
            # Verify's steps are empty then, and bring no pages: the newest tokens would have to wait for theirs.
            self._batch.is_decoding()
        chunks: list[PrefillChunk] = []
        updates: list[SlotUpdate] = []
        room = self._batch.sizes.chunk_tokens
        for sequence, num_known in self._batch.begun():
            slot = sequence.lease.slot
            end = num_known if sequence.is_prefilling else num_known - held_back
            given, num_given = self._find(sequence), 0
            if given is not None:
                num_given = given.num_tokens
                if given.num_pages < len(sequence.pages):
                    updates.append(sequence.page_update(given.num_pages))
            elif room == 0:
                continue
            else:
                # A head's first entry pairs the state before the bonus token with it; of a prompt, what comes next.
                first = end if sequence.is_prefilling else max(0, end - 1)
                updates.append(sequence.update_of_running(history_from=0 if self._reads_tokens else first))
            num_new = 0
            if self._reads_tokens and not self._is_beyond(sequence, num_known):
                num_new = min(self._num_placed(sequence, end) - num_given, room)
            if num_new > 0:
                tokens = self._batch.committed.read(slot, num_given, num_given + num_new)
                chunks.append(PrefillChunk(slot=slot, start=num_given, tokens=tokens, is_last=False))
                room -= num_new
                num_given += num_new
            self._given[slot] = _Given(sequence.lease.generation, num_given, len(sequence.pages))
        if not chunks and not updates:
            return False
        self.number, self.sent_at = number, time.monotonic()
        self._attachment.send(
            StepCommand(
                epoch=self._attachment.number,
                step=number,
                ops=catch_up(number),
                chunks=tuple(chunks),
                updates=tuple(updates),
                catches_up=True,
            )
        )
        return True

    def _is_beyond(self, sequence: Sequence, num_known: int) -> bool:
        """True for a sequence that is too long for the draft: it will not draft for it."""
        num_tokens = max(num_known, len(sequence.tokens))
        room = room_for(sequence, self._attachment.kv, self._batch.sizes)
        return num_tokens - len(sequence.spec.prompt) > room

    def _num_placed(self, sequence: Sequence, num_tokens: int) -> int:
        """Counts a sequence's first `num_tokens` that have a page: the newest may get one with the next step."""
        return min(num_tokens, len(sequence.pages) * self._batch.sizes.page_tokens)

    def _find(self, sequence: Sequence) -> _Given | None:
        """Finds the part of a running sequence that draft was sent; None if it does not know the sequence."""
        given = self._given.get(sequence.lease.slot)
        return given if given is not None and given.generation == sequence.lease.generation else None


class Joining:
    """An attachment on its way into the steps."""

    __slots__ = ("catch_up", "drafting", "is_back", "is_stashed", "num_empty")

    def __init__(self, batch: Batch, drafting: DraftWork, *, is_back: bool = False) -> None:
        """`is_back`: it comes back from a rest."""
        self.is_back = is_back
        self.drafting = drafting
        self.catch_up = CatchUp(batch, drafting.attachment)
        self.num_empty = 0
        """Empty steps in a row: verify waits for a draft that does not catch up otherwise."""
        self.is_stashed = False
        """True once the step was decided on that stashes for it."""
