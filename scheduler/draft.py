"""One draft beside the steps: its life, the commands that it was sent, and the tokens that it still lacks.

`Draft.enter` changes its state, by this table. The loop's thread calls it (`Speculation`), but for the last change.

    OFFERED      attached by the session's thread; waits for the loop to take it in
    CATCHING_UP  takes in the tokens of the running sequences, in commands of its own
    STASHED      a plain step stashes for it, and it takes part from the next step on
    ACTIVE       drafts in each step
    RESTING      takes part in no step, as plain ones are faster (`DraftChoice`); it catches up to take part again
    LEAVING      takes part in no further step, but steps under way refer to it
    LEFT         no step refers to it: the loop looks at its memory no more, and the session may detach it
    DETACHED     detached on both sides, by the session's thread

A draft is lost (`is_lost`) when steps may have gone on without the tokens that they waited for, in whatever state.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.step import DRAFT_FENCES, FenceName, FencePoint, PrefillChunk, StepCommand, WaitPlace
from slipstream.scheduler.plan import catch_up

if TYPE_CHECKING:
    from slipstream.common.wire.step import FenceOps, SlotUpdate
    from slipstream.scheduler.attachment import DraftAttachment
    from slipstream.scheduler.batch import Batch
    from slipstream.scheduler.records import LossCause, Sequence

_PATIENCE, _MOST_PATIENCE, _FAR_PATIENCE = 4, 8, 256
"""Catch-up commands without progress, as new tokens arrive as fast, after which the draft joins with a larger last
command, after which verify pauses for a draft that is near, and after which a draft that is far is given up."""
_NEAR = 2
"""The most commands' tokens that a draft may lack for verify to pause for it."""


class DraftState(enum.Enum):
    """The state of a draft, see the module."""

    OFFERED = "offered"
    CATCHING_UP = "catching up"
    STASHED = "stashed"
    ACTIVE = "active"
    RESTING = "resting"
    LEAVING = "leaving"
    LEFT = "left"
    DETACHED = "detached"


_NEXT = {
    DraftState.OFFERED: {DraftState.CATCHING_UP},
    # To rest again, if another draft arrives while it catches up; at once active, if nothing decodes.
    DraftState.CATCHING_UP: {DraftState.STASHED, DraftState.ACTIVE, DraftState.RESTING, DraftState.LEAVING},
    DraftState.STASHED: {DraftState.ACTIVE, DraftState.LEAVING},
    # To catch up, if a step was stashed for another draft, which was lost then.
    DraftState.ACTIVE: {DraftState.RESTING, DraftState.CATCHING_UP, DraftState.LEAVING},
    DraftState.RESTING: {DraftState.CATCHING_UP, DraftState.LEAVING},
    DraftState.LEAVING: {DraftState.LEFT},
    DraftState.LEFT: {DraftState.DETACHED},
    DraftState.DETACHED: set[DraftState](),
}


class _Work(NamedTuple):
    """A part of a command that a draft was sent."""

    step: int
    fence: FenceName
    """The fence that it signals."""
    stash: int
    """The stash that it waits for; 0 for none."""

    @property
    def takes_tokens(self) -> bool:
        """True if it takes in tokens of prompts, or to catch up."""
        return self.fence is FenceName.DRAFT_PREFILLED

    def is_up_to(self, point: FencePoint) -> bool:
        """True if it is done once `point` is signalled: draft's stream does its parts in order."""
        return self.step < point.value or (self.step == point.value and self.fence <= point.fence)


class Draft:
    """A draft service from its offer to its end. Belongs to the loop's thread, but for what says otherwise."""

    def __init__(self, attachment: DraftAttachment, address: str = "") -> None:
        """`attachment`: its link, and the memory between it and verify."""
        self.attachment = attachment
        self.address = address
        self.number = attachment.number
        self.num_draft_tokens = attachment.num_draft_tokens
        """K."""
        self.state = DraftState.OFFERED
        """Read by any thread."""
        self.joined_at = math.inf
        """When it took part in a step for the first time, on time.monotonic's clock; infinity before. Any thread."""
        self.cause: LossCause | None = None
        """Why it takes part in no further step; None while it may. This and `reason` belong to the session's lock."""
        self.reason = ""
        self.pending: deque[_Work] = deque()
        """Work that draft is not known to have done."""
        self.moved_at = time.monotonic()
        """When some of `pending` was last found done, or the first was sent, or the stash arrived that it waits for."""
        self.lacks_stash = False
        """True if the first of `pending` was last seen to wait for verify."""
        self.has_drafted = False
        """True once a decode part is done."""
        self.last_step = 0
        """The last step of verify that refers to it."""
        self.last_command = 0
        """Number of the last command."""
        self._awaited: dict[FenceName, int] = {}
        """The last value of each of its fences that verify was sent a wait for. They only grow."""

    def enter(self, state: DraftState) -> None:
        """Changes the state, as the table of this module says."""
        assert state in _NEXT[self.state], f"a draft that is {self.state.value} cannot be {state.value} next"
        self.state = state

    @property
    def has_joined(self) -> bool:
        """True from the first step on that it takes part in, also when it has left."""
        return self.joined_at < math.inf

    @property
    def is_staying(self) -> bool:
        """True until it is to take part in no further step."""
        return self.state not in (DraftState.LEAVING, DraftState.LEFT, DraftState.DETACHED)

    @property
    def is_lost(self) -> bool:
        """True once steps may have gone on without the tokens that they waited for."""
        return self.attachment.is_released

    @property
    def is_readable(self) -> bool:
        """False once it is lost, and once no step refers to it: its memory may be gone then."""
        return not self.is_lost and self.state not in (DraftState.LEFT, DraftState.DETACHED)

    def sending(self, step: int, ops: FenceOps | None) -> None:
        """Notes a step that is about to be sent, and that refers to it. `ops`: of its command, if it has one."""
        self.last_step = step
        if ops is not None:
            self.add(step, ops)

    def add(self, number: int, ops: FenceOps) -> None:
        """Notes a command that is sent."""
        if not self.pending:
            self.moved_at = time.monotonic()
        for fence, step in ops.signals:
            place = WaitPlace.START if fence is FenceName.DRAFT_PROPOSED else WaitPlace.PREFILL_HIDDEN
            self.pending.append(_Work(step, fence, ops.waits_for(FenceName.VERIFY_STASH, place)))
        self.last_command = number

    def verify_waits(self, ops: FenceOps) -> None:
        """Notes a command that verify was sent."""
        for fence, value, _ in ops.waits:
            if fence in DRAFT_FENCES:  # and none of a grammar worker
                self._awaited[fence] = value

    def did(self, point: FencePoint) -> None:
        """Notes that draft has signalled this point."""
        while self.pending and self.pending[0].is_up_to(point):
            self.has_drafted |= not self.pending.popleft().takes_tokens
            self.moved_at, self.lacks_stash = time.monotonic(), False

    def has_signalled(self, point: FencePoint) -> bool:
        """Asks the device. A draft may write anything there, and take it back."""
        return self.attachment.fences[point.fence].poll() >= point.value

    def look(self) -> None:
        """Asks the device for what is done of `pending`, which takes time on a GPU."""
        looked: FenceName | None = None
        while self.pending and (fence := self.pending[0].fence) is not looked:
            looked = fence
            self.did(FencePoint(fence, self.attachment.fences[fence].poll()))
        if self.pending and (stash := self.pending[0].stash):
            lacked_stash, self.lacks_stash = self.lacks_stash, self.attachment.stash.poll() < stash
            if lacked_stash and not self.lacks_stash:
                self.pending[0] = self.pending[0]._replace(stash=0)
                self.moved_at = time.monotonic()

    @property
    def has_unreleased_waits(self) -> bool:
        """True if verify waits for a signal that has not arrived, and no release can end the wait."""
        return any(
            not (fence := self.attachment.fences[name]).is_releasable and fence.poll() < value
            for name, value in self._awaited.items()
        )


class _Given(NamedTuple):
    """The part of a sequence that draft was sent."""

    generation: int
    """The generation of its lease."""
    num_tokens: int
    num_pages: int


class CatchUp:
    """The tokens that a draft was sent while it catches up, and those that it lacks. Belongs to the loop's thread."""

    def __init__(self, batch: Batch, draft: Draft) -> None:
        self.begun_at = time.monotonic()
        self.sent_at = 0.0
        """Time of the last command."""
        self.number = 0
        """Number of the last command."""
        self.pauses_verify = False
        """True once it is known that draft catches up only while verify's steps are empty."""
        self.num_empty = 0
        """Empty steps in a row."""
        self._batch = batch
        self._draft = draft
        self._reads_tokens = not draft.attachment.traits.reads_hidden
        self._given: dict[int, _Given] = {}
        """By slot."""
        self._missing: deque[int] = deque(maxlen=_FAR_PATIENCE + 1)
        """Before each of the last commands."""

    @property
    def is_pending(self) -> bool:
        """True until draft has done the last command."""
        last = FencePoint(FenceName.DRAFT_PREFILLED, self.number)
        return self.number > 0 and not self._draft.has_signalled(last)

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

        `missing`: tokens that draft lacks; `growth`: the most tokens that arrive until that command is sent.
        """
        if not self._reads_tokens:
            return True
        chunk_tokens = self._batch.sizes.chunk_tokens
        if missing + growth > chunk_tokens:
            return False
        return missing <= max(2 * growth, chunk_tokens // 8) or self._has_stalled(_PATIENCE)

    def gets_near(self, missing: int) -> bool:
        """Notes how many tokens draft lacks before a command that is not the last. False if it never gets near."""
        self._missing.append(missing)
        is_near = missing <= _NEAR * self._batch.sizes.chunk_tokens
        self.pauses_verify |= is_near and self._has_stalled(_MOST_PATIENCE)
        return is_near or not self._has_stalled(_FAR_PATIENCE)

    def _has_stalled(self, num_commands: int) -> bool:
        """True if draft lacks no less than so many commands ago."""
        return len(self._missing) > num_commands and self._missing[-1] >= self._missing[-1 - num_commands]

    def bring(self, number: int, *, held_back: int = 0) -> bool:
        """Sends draft what it lacks, as far as a command may have it. Returns False if there was nothing to send.

        `held_back`: tokens at the end of each decoding sequence that arrive with a stash. Raises the link's failure.
        """
        if self.pauses_verify:
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
                # A head's first entry pairs the state before the bonus token with it; of a prompt, the token after it.
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
        self._send(number, tuple(chunks), tuple(updates))
        return True

    def _send(self, number: int, chunks: tuple[PrefillChunk, ...], updates: tuple[SlotUpdate, ...]) -> None:
        self.number, self.sent_at = number, time.monotonic()
        ops, epoch = catch_up(number), self._draft.number
        command = StepCommand(epoch=epoch, step=number, ops=ops, chunks=chunks, updates=updates, catches_up=True)
        self._draft.attachment.send(command)
        self._draft.add(number, ops)

    def _is_beyond(self, sequence: Sequence, num_known: int) -> bool:
        """True for a sequence that is too long for the draft: it will not draft for it."""
        num_tokens = max(num_known, len(sequence.tokens))
        room = self._draft.attachment.kv.room_for(sequence, self._batch.sizes.num_draft_tokens)
        return num_tokens - len(sequence.spec.prompt) > room

    def _num_placed(self, sequence: Sequence, num_tokens: int) -> int:
        """Counts a sequence's first `num_tokens` that have a page: the newest may get one with the next step."""
        return min(num_tokens, len(sequence.pages) * self._batch.sizes.page_tokens)

    def _find(self, sequence: Sequence) -> _Given | None:
        """Finds the part of a running sequence that draft was sent; None if it does not know the sequence."""
        given = self._given.get(sequence.lease.slot)
        return given if given is not None and given.generation == sequence.lease.generation else None
