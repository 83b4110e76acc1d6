"""Which draft takes part in the steps: it joins beside the running steps, and leaves without a trace in any output.

A draft that comes while sequences run catches up first (`CatchUp`). Then it joins: step n-1 decodes plainly and stashes
for it; when the results of all steps before n-1 are known, a last command brings the tokens before n-1's, and step n
is drafted. A head that reads hidden states has no use for tokens: it begins with what n-1 stashes, and its attention
masks the rest.

The states of an attachment:

    offered      it waits for the loop to take it in
    catching up  it takes in the tokens of what runs, in commands of its own
    stashed      a plain step stashes for it, and it takes part from the next step on
    active       it drafts in each step
    resting      it takes part in no step, as plain ones are faster (`DraftPolicy`); it comes back by catching up
    leaving      it takes part in no further step, but steps under way refer to it; then it is let go

The fence of a draft that is lost is released until no step under way refers to it: a late producer's write may set the
word back. Those steps end with what was copied in, and the next one decodes plainly.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import DeadlineExceededError, SlipstreamError, UnavailableError
from slipstream.common.wire.step import FencePoint
from slipstream.scheduler.core.catch_up import Joining
from slipstream.scheduler.core.draft_work import NO_PART, DraftPatience, DraftWork, Part
from slipstream.scheduler.core.plan import catch_up
from slipstream.scheduler.records import LossCause

if TYPE_CHECKING:
    from slipstream.common.wire.step import FenceOps
    from slipstream.scheduler.core.batch import Batch
    from slipstream.scheduler.core.draft_policy import DraftPolicy
    from slipstream.scheduler.records import StepDraft
    from slipstream.scheduler.workers.attachment import DraftAttachment

FIRST_STEP_TIMEOUT_S = 1.0
"""The least time for the first step that a draft takes part in, as a process that has just started is slow at first;
and for a step whose stash does not come, though it may be a hostile draft that keeps it away."""
ACKNOWLEDGES_S = 1.0
"""A draft that has to acknowledge a step may take so long, beside four times what a step may wait for it."""
CATCH_UP_TIMEOUT_S = 10.0
"""The most time for a command that brings tokens while verify goes on beside it."""


class SpeculationListener(Protocol):
    """Gets the fate of each attachment, on the loop's thread; must return at once."""

    def joined(self, attachment: DraftAttachment, catch_up_s: float) -> None:
        """Called before the first step that it takes part in."""
        ...

    def left(self, attachment: DraftAttachment, cause: LossCause, reason: str) -> None:
        """Called when it takes part in no further step."""
        ...

    def let_go(self, attachment: DraftAttachment) -> None:
        """Called when no step that is under way refers to it any more."""
        ...


class Speculation:
    """Belongs to the loop's thread, but for `offer` and `withdraw`."""

    def __init__(
        self,
        batch: Batch,
        listener: SpeculationListener,
        *,
        timeout_s: float | None = None,
        is_on_gpu: bool = False,
        policy: DraftPolicy | None = None,
    ) -> None:
        """`timeout_s`: the time that a step may wait for its draft; None is two steps, and at least LEAST_TIMEOUT_….

        `policy`: decides when a draft rests; None has it draft always. The listener tells it of one that joins.
        """
        self._batch = batch
        self._listener = listener
        self._patience = DraftPatience(timeout_s, is_on_gpu=is_on_gpu)
        self._policy = policy
        self._active: DraftWork | None = None
        self._resting: DraftWork | None = None
        self._joining: Joining | None = None
        self._leaving: list[DraftWork] = []
        self._known: tuple[DraftWork, ...] = ()
        """The active, resting, joining and leaving ones, until they are let go."""
        self._consumed = 0
        self._messages: deque[tuple[DraftAttachment, LossCause | None]] = deque()

    @property
    def active(self) -> DraftAttachment | None:
        """The attachment that drafts."""
        return None if self._active is None else self._active.attachment

    @property
    def resting(self) -> DraftAttachment | None:
        """The attachment that rests, or comes back from its rest. Any thread."""
        resting, joining = self._resting, self._joining
        if resting is None and joining is not None and joining.is_back:
            resting = joining.drafting
        return None if resting is None else resting.attachment

    @property
    def has_attachment(self) -> bool:
        """True if a step under way may refer to one."""
        return bool(self._known)

    @property
    def timeout_s(self) -> float:
        """The time that a step may wait for its draft now."""
        return self._patience.timeout_s

    @property
    def acknowledge_timeout_s(self) -> float:
        """The time that the draft may take to acknowledge a step now."""
        is_first = self._active is None or not self._active.has_drafted
        return ACKNOWLEDGES_S + 4 * self.timeout_s + FIRST_STEP_TIMEOUT_S * is_first

    def offer(self, attachment: DraftAttachment) -> None:
        """Has an attachment join in place of the one that drafts. Any thread; wake the loop behind it."""
        self._messages.append((attachment, None))

    def withdraw(self, attachment: DraftAttachment, cause: LossCause) -> None:
        """Has an attachment leave. Any thread; wake the loop behind it."""
        self._messages.append((attachment, cause))

    def settle(self) -> None:
        """Has a draft that came before the first step take part in it."""
        self.next_part(0, 0)

    def next_part(self, last_step: int, num_in_flight: int) -> Part | None:
        """Decides before the step behind `last_step`; None if a step that is under way is to be consumed first.

        Raises UnavailableError if verify waits for a draft that is lost and cannot be released.
        """
        self.check()
        if self._policy is not None and self._joining is None:
            self._follow(self._policy, last_step)
        if self._joining is not None:
            if self._joining.is_stashed and num_in_flight > 1:
                return None
            if (part := self._advance(self._joining, last_step, num_in_flight)) is not None:
                return part
        return NO_PART if self._active is None else self._active.part

    def sending(self, step: int, attachment: DraftAttachment, ops: FenceOps | None) -> DraftWork:
        """Notes a step that is about to be sent. `ops`: of draft's command, if it has one.

        Returns the draft's work, to be told what verify is sent a wait for.
        """
        drafting = self._find(attachment)
        assert drafting is not None, "the attachment was there when the step was decided"
        drafting.last_step = step
        if ops is not None:
            drafting.add(step, ops)
        return drafting

    def consumed(
        self,
        step: int,
        seconds: float,
        *,
        decodes: bool,
        takes_prompts: bool,
        is_clean: bool = True,
        draft: StepDraft | None = None,
        awaited: FencePoint | None = None,
    ) -> None:
        """Notes that a step was consumed, `seconds` after the one before or after it was sent.

        `is_clean`: False for a step of no sequence, or whose draft was lost; its time says nothing of others.
        `awaited`: the last point of `draft` that verify has waited for in it.
        """
        self._consumed = step
        if awaited is not None and self._active is not None and self._active.attachment is draft:
            self._active.did(awaited)
        if is_clean:
            self._patience.took(seconds, decodes=decodes, takes_prompts=takes_prompts, is_drafted=awaited is not None)
        if self._leaving:
            gone = [drafting for drafting in self._leaving if drafting.last_step <= step]
            self._leaving = [drafting for drafting in self._leaving if drafting.last_step > step]
            for drafting in gone:
                self._let_go(drafting)

    def check(self) -> None:
        """Takes in messages of other threads, and looks at the links. Raises UnavailableError, see `next_part`."""
        # A draft that is stashed for joins first: else the one that drafts would be left out for nothing.
        while self._messages and (self._joining is None or not self._joining.is_stashed):
            self._take(*self._messages.popleft())
        for drafting in self._known:
            failure = drafting.attachment.link.failure
            if failure is not None and not drafting.is_lost:
                self.lose(drafting.attachment, failure)

    def watch(self, draft: StepDraft | None, awaited: FencePoint | None, since: float) -> None:
        """Looks at the drafts while the loop waits for a step, which waits for `draft` to signal `awaited`.

        `since`: when the step began to wait for nothing else. Raises UnavailableError, see `next_part`.
        """
        self.check()
        drafting = None if draft is None else self._find(draft)
        if drafting is not None and not drafting.is_lost:
            drafting.look()
            if awaited is not None and not drafting.has_signalled(awaited):
                brings_tokens = bool(drafting.pending) and drafting.pending[0].takes_tokens
                waited_s = time.monotonic() - max(since, drafting.moved_at)
                limit_s = self.timeout_s
                if drafting.lacks_stash or not drafting.has_drafted:
                    limit_s = max(limit_s, FIRST_STEP_TIMEOUT_S)
                if waited_s > limit_s + self._patience.tokens_timeout_s * brings_tokens:
                    reason = f"the draft service did not come to an end of its work within {waited_s:.3f} s"
                    self._lose(drafting, LossCause.TIMEOUT, reason)
        for lost in self._leaving:
            if lost.is_lost:
                lost.attachment.release(lost.last_step)

    def end(self, release_up_to: int | None) -> None:
        """Forgets all drafts, as the epoch is over; ends what verify waits for up to a step, if one is given."""
        for drafting in self._known:
            if release_up_to is not None:
                drafting.attachment.release(release_up_to)
        self._active = self._resting = self._joining = None
        self._leaving.clear()
        self._known = ()
        self._messages.clear()

    def backlog(self, up_to: int) -> tuple[DraftAttachment, FencePoint] | None:
        """The active draft, and what it signals after the oldest work that it has not done, if of a step up to this."""
        active = self._active
        if active is None or not active.pending or active.pending[0].step > up_to:
            return None
        active.look()
        if not active.pending or active.pending[0].step > up_to:
            return None
        return active.attachment, FencePoint(active.pending[0].fence, active.pending[0].step)

    def lose(self, attachment: DraftAttachment, error: SlipstreamError) -> None:
        """Its link has failed. Raises UnavailableError, see `next_part`."""
        drafting = self._find(attachment)
        if drafting is not None and not drafting.is_lost:
            cause = LossCause.REFUSED if attachment.link.has_refused else LossCause.DIED
            if isinstance(error, DeadlineExceededError):
                cause = LossCause.TIMEOUT
            self._lose(drafting, cause, str(error))

    def _follow(self, policy: DraftPolicy, last_step: int) -> None:
        """Puts the active draft to rest, or has one that rests begin to come back."""
        resting = self._resting
        if self._active is not None and not (policy.drafts or policy.is_held):
            self._resting, self._active = self._active, None
        elif resting is not None and policy.drafts:
            resting.look()
            is_behind = last_step > max(resting.last_step, resting.last_command)  # for its commands' numbers
            if resting.pending and time.monotonic() - resting.moved_at > CATCH_UP_TIMEOUT_S:
                self._lose(resting, LossCause.TIMEOUT, "the draft service did not come to an end of its work")
            elif not resting.pending and (is_behind or not self._batch.num_running):
                self._joining, self._resting = Joining(self._batch, resting, is_back=True), None

    def _advance(self, joining: Joining, last_step: int, num_in_flight: int) -> Part | None:
        """One turn on a draft's way into the steps; None if they go on as without it."""
        attachment, catch_up = joining.drafting.attachment, joining.catch_up
        if joining.is_stashed:
            return self._join(joining, last_step, held_back=1 - num_in_flight)
        if catch_up.is_pending:
            waited_s = time.monotonic() - catch_up.sent_at
            limit_s = self.timeout_s + self._patience.tokens_timeout_s
            if not catch_up.is_too_slow:
                limit_s = max(CATCH_UP_TIMEOUT_S, limit_s)
            if waited_s > limit_s:
                reason = f"the draft service did not take in tokens within {waited_s:.1f} s"
                self._lose(joining.drafting, LossCause.TIMEOUT, reason)
                return None
            return self._meanwhile(joining)
        if catch_up.number and joining.drafting.pending:
            joining.drafting.look()
            self._patience.brought(time.monotonic() - catch_up.sent_at)
        missing = catch_up.num_missing()
        if missing and last_step == catch_up.number:
            return self._meanwhile(joining)  # a command needs a number of its own
        if catch_up.is_close(missing, self._growth(joining)):
            if not self._batch.is_decoding():
                # What was sent of prompts is known.
                return self._join(joining, last_step)
            joining.is_stashed = True
            return Part(attachment, decodes_first=True)
        catch_up.take_measure(missing)
        if catch_up.never_gets_near:
            reason = f"the draft service takes in tokens no faster than they come: it lacks {missing}"
            self._lose(joining.drafting, LossCause.TIMEOUT, reason)
            return None
        self._bring(joining, last_step)
        return self._meanwhile(joining)

    def _meanwhile(self, joining: Joining) -> Part | None:
        if not joining.catch_up.is_too_slow or joining is not self._joining:
            return None
        joining.num_empty += 1
        return Part(self.active, is_empty=True)

    def _growth(self, joining: Joining) -> int:
        """The most tokens that come until the last command."""
        num_steps = self._batch.sizes.run_ahead + 1
        if joining.num_empty > num_steps:
            return 0
        # Steps of a draft that has left may be under way.
        drafts = [drafting for drafting in self._known if drafting is not joining.drafting]
        most = max((drafting.attachment.num_draft_tokens for drafting in drafts), default=0)
        return self._batch.num_running * num_steps * (most + 1)

    def _join(self, joining: Joining, last_step: int, *, held_back: int = 0) -> Part | None:
        if not self._bring(joining, last_step, held_back=held_back):
            return None
        before, self._active, self._joining = self._active or self._resting, joining.drafting, None
        if before is not None:
            self._leave(before, LossCause.SWAPPED, "another draft has taken over")
        attachment = joining.drafting.attachment
        if not joining.is_back:
            self._listener.joined(attachment, time.monotonic() - joining.catch_up.begun_at)
        return Part(attachment, attachment.num_draft_tokens, decodes_first=True)

    def _bring(self, joining: Joining, number: int, *, held_back: int = 0) -> bool:
        """Sends the next tokens; False if the draft is lost."""
        try:
            if joining.catch_up.bring(number, held_back=held_back):
                joining.drafting.add(number, catch_up(number))
        except SlipstreamError as error:
            self.lose(joining.drafting.attachment, error)
            return False
        return True

    def _take(self, attachment: DraftAttachment, cause: LossCause | None) -> None:
        if cause is not None:
            drafting = self._find(attachment)
            if drafting is not None and drafting not in self._leaving:
                self._leave(drafting, cause, "it was taken away")
            return
        while self._joining is not None:
            if self._joining.is_back:
                self._resting, self._joining = self._joining.drafting, None
            else:
                self._leave(self._joining.drafting, LossCause.SWAPPED, "another draft has come")
        drafting = DraftWork(attachment)
        self._known = (*self._known, drafting)
        self._joining = Joining(self._batch, drafting)

    def _lose(self, drafting: DraftWork, cause: LossCause, reason: str) -> None:
        """Ends the waits for a draft. `watch` does it again until the steps that wait are consumed."""
        drafting.is_lost = True
        if drafting.has_unreleased_waits:
            raise UnavailableError(f"{reason}; verify waits for it and cannot be released")
        drafting.attachment.release(drafting.last_step)
        drafting.pending.clear()
        if drafting not in self._leaving:
            self._leave(drafting, cause, reason)

    def _leave(self, drafting: DraftWork, cause: LossCause, reason: str) -> None:
        joining = self._joining
        if drafting is self._active:
            self._active = None
        elif drafting is self._resting:
            self._resting = None
        elif joining is not None and drafting is joining.drafting:
            self._joining = None
            if joining.is_stashed and self._active is not None:
                # The one that drafts was left out of a step: it has to catch up, too.
                self._joining, self._active = Joining(self._batch, self._active), None
        self._listener.left(drafting.attachment, cause, reason)
        if drafting.last_step > self._consumed:
            self._leaving.append(drafting)
        else:
            self._let_go(drafting)

    def _let_go(self, drafting: DraftWork) -> None:
        self._known = tuple(one for one in self._known if one is not drafting)
        drafting.attachment.is_let_go = True
        self._listener.let_go(drafting.attachment)

    def _find(self, attachment: StepDraft) -> DraftWork | None:
        if self._active is not None and self._active.attachment is attachment:
            return self._active
        return next((drafting for drafting in self._known if drafting.attachment is attachment), None)
