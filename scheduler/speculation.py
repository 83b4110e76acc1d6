"""Which draft takes part in the steps: it joins beside the running steps, and leaves without a trace in any output.

A draft that arrives while sequences run catches up first (`CatchUp`). Then it joins: step n-1 decodes plainly and
stashes for it; when the results of all steps before n-1 are known, a last command has the tokens before n-1's, and step
n is drafted. A head that reads hidden states has no use for tokens: it begins with what n-1 stashes, and its attention
masks the rest. The states on the way are those of `Draft`.

The fence of a draft that is lost is released until no step under way refers to it: a late producer's write may set the
word back. Those steps end with what was copied in, and the next one decodes plainly.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import DeadlineExceededError, SlipstreamError, UnavailableError
from slipstream.common.wire.step import FencePoint
from slipstream.scheduler.draft import CatchUp, DraftState
from slipstream.scheduler.records import NO_DRAFT, LossCause, most_tokens

if TYPE_CHECKING:
    from slipstream.scheduler.batch import Batch
    from slipstream.scheduler.draft import Draft
    from slipstream.scheduler.draft_choice import DraftChoice
    from slipstream.scheduler.observer import SentStep
    from slipstream.scheduler.records import Step

FIRST_STEP_TIMEOUT_S = 1.0
"""The least time for the first step that a draft takes part in, as a process that has just started is slow at first;
and for a step whose stash does not arrive, though it may be a hostile draft that keeps it away."""
ACKNOWLEDGES_S = 1.0
"""Acknowledgement timeout, added to four times the draft timeout."""
CATCH_UP_TIMEOUT_S = 10.0
"""The most time for a command that brings tokens while verify goes on beside it."""
LEAST_TIMEOUT_CPU_S, LEAST_TIMEOUT_GPU_S = 0.25, 0.05
"""Of the watchdog where it is not set: a CPU's threads are not always scheduled sooner."""
MOST_TOKENS_TIMEOUT_S = 2.0
"""The most that the watchdog adds for a command that brings tokens."""
_SMOOTHING = 0.1
_MOST_GROWTH = 4.0
"""Outlier clamp, as a multiple of the mean: a host pause must not count as step time."""


class SpeculationListener(Protocol):
    """Gets the fate of each draft, on the loop's thread; must return at once."""

    def joined(self, draft: Draft, catch_up_s: float) -> None:
        """Called before the first step that it takes part in."""
        ...

    def left(self, draft: Draft, cause: LossCause, reason: str) -> None:
        """Called when it is to take part in no further step."""
        ...

    def gone(self, draft: Draft) -> None:
        """Called when no step that is under way refers to it any more."""
        ...


class Patience:
    """Times of the steps, and the watchdog's limits that follow from them. Belongs to the loop's thread."""

    def __init__(self, timeout_s: float | None, *, is_on_gpu: bool) -> None:
        """`timeout_s`: see `Speculation`."""
        self._timeout_s = timeout_s
        self._least_timeout_s = LEAST_TIMEOUT_GPU_S if is_on_gpu else LEAST_TIMEOUT_CPU_S
        self._step_s = {False: 0.0, True: 0.0}
        """Time of a plain and of a drafted step that decodes, smoothed, with the chunks of prompts that it takes in.
        While a draft rests, steps say nothing of it."""
        self._tokens_s = 0.0
        """Time of a command that brings tokens: of prompts, or to catch up; the longest of late."""

    @property
    def timeout_s(self) -> float:
        """The time that a step may wait for its draft now."""
        if self._timeout_s is not None:
            return self._timeout_s
        return max(2 * max(self._step_s.values()), self._least_timeout_s)

    @property
    def tokens_timeout_s(self) -> float:
        """The time that draft may take beyond that while it takes in tokens."""
        return min(2 * self._tokens_s, MOST_TOKENS_TIMEOUT_S)

    def took(self, seconds: float, *, decodes: bool, takes_prompts: bool, is_drafted: bool) -> None:
        """Takes in the time of a step, which may be mixed. `is_drafted`: verify waited for a draft in it."""
        if takes_prompts:
            self._tokens_s = max(seconds, self._tokens_s * (1 - _SMOOTHING))
        if decodes:
            seconds = min(seconds, max(self._least_timeout_s, _MOST_GROWTH * max(self._step_s.values())))
            known = self._step_s[is_drafted]
            self._step_s[is_drafted] += (seconds - known) * (_SMOOTHING if known else 1.0)

    def caught_up(self, seconds: float) -> None:
        """Takes in the time of a command to catch up."""
        self._tokens_s = max(self._tokens_s, seconds)


class Speculation:
    """Belongs to the loop's thread, but for `offer` and `withdraw`."""

    def __init__(
        self,
        batch: Batch,
        listener: SpeculationListener,
        *,
        timeout_s: float | None = None,
        is_on_gpu: bool = False,
        mixes_heads: bool = True,
        choice: DraftChoice | None = None,
    ) -> None:
        """`timeout_s`: the time that a step may wait for its draft; None: two steps, and at least LEAST_TIMEOUT_….

        `mixes_heads`: False if no step with a head may decode and take in prompts, as waits are enqueued after their
        signals: the head's command is sent before verify's, which waits for its tokens, and would wait for the states
        that verify leaves in the same step. `choice`: chooses the draft tokens of each step, and when
        a draft rests; None has it draft all that it may.
        """
        self.patience = Patience(timeout_s, is_on_gpu=is_on_gpu)
        self.active: Draft | None = None
        """The draft that drafts. This and `resting` are read by any thread."""
        self._batch = batch
        self._listener = listener
        self._mixes_heads = mixes_heads
        self._choice = choice
        self._drafts: tuple[Draft, ...] = ()
        """Those that the loop has taken in and that a step may refer to, or will."""
        self._resting: Draft | None = None
        self._joining: Draft | None = None
        """The draft that catches up, or that a step is stashed for."""
        self._catch_up: CatchUp | None = None
        """That of `_joining`."""
        self._leaving: tuple[Draft, ...] = ()
        self._consumed = 0
        self._messages: deque[tuple[Draft, LossCause | None]] = deque()

    @property
    def resting(self) -> Draft | None:
        """The draft that rests, or catches up to take part again."""
        resting, joining = self._resting, self._joining
        return joining if resting is None and joining is not None and joining.has_joined else resting

    @property
    def has_drafts(self) -> bool:
        """True if a step under way may refer to a draft."""
        return bool(self._drafts)

    @property
    def acknowledge_timeout_s(self) -> float:
        """The time that the draft may take to acknowledge a step now."""
        is_first = self.active is None or not self.active.has_drafted
        return ACKNOWLEDGES_S + 4 * self.patience.timeout_s + FIRST_STEP_TIMEOUT_S * is_first

    def offer(self, draft: Draft) -> None:
        """Has a draft join in place of the one that drafts. Any thread; wake the loop after it."""
        self._messages.append((draft, None))

    def withdraw(self, draft: Draft, cause: LossCause) -> None:
        """Has a draft leave. Any thread; wake the loop after it."""
        self._messages.append((draft, cause))

    def settle(self) -> None:
        """Has a draft that was offered before the first step take part in it."""
        self._prepare(0)
        self._advance(0, 0)

    def next_step(self, last_step: int, num_in_flight: int) -> tuple[Step | None, Draft | None]:
        """Makes the step after `last_step`; returns it with the draft that it refers to.

        There is no step if there is nothing to do, or if a step under way is to be consumed first.
        Raises UnavailableError if verify waits for a draft that is lost and cannot be released.
        """
        self._prepare(last_step)
        joining, catch_up = self._joining, self._catch_up
        if joining is None or catch_up is None:
            return self._made(self.active, decodes_first=False)
        if joining.state is DraftState.STASHED and num_in_flight > 1:
            return None, None
        self._advance(last_step, num_in_flight)
        if joining.state is DraftState.CATCHING_UP and catch_up.pauses_verify:
            catch_up.num_empty += 1
            return self._batch.empty_step(), self.active
        draft = joining if joining.state is DraftState.STASHED else self.active
        return self._made(draft, decodes_first=draft is joining)

    def consumed(self, sent: SentStep, seconds: float) -> None:
        """Notes that a step was consumed, `seconds` after the one before or after it was sent."""
        step, active, awaited = sent.step, self.active, sent.awaited
        self._consumed = step.number
        if awaited is not None and active is not None and active is sent.draft:
            active.did(awaited)
        # The time of a step of no sequence, or whose draft was lost, says nothing of other steps.
        if (step.decoded.slots or step.chunks) and (sent.draft is None or not sent.draft.is_lost):
            is_drafted = awaited is not None
            decodes, takes_prompts = not step.is_prefill, bool(step.chunks)
            self.patience.took(seconds, decodes=decodes, takes_prompts=takes_prompts, is_drafted=is_drafted)
        for draft in self._leaving:
            if draft.last_step <= step.number:
                self._forget(draft)

    def check(self) -> None:
        """Takes in messages of other threads, and looks at the links. Raises UnavailableError, see `next_step`."""
        # A draft that is stashed for joins first: else the one that drafts would be left out for nothing.
        while self._messages and (self._joining is None or self._joining.state is DraftState.CATCHING_UP):
            self._take(*self._messages.popleft())
        for draft in self._drafts:
            failure = draft.attachment.link.failure
            if failure is not None:
                self.lose(draft, failure)

    def watch(self, awaiting: Draft | None, awaited: FencePoint | None, since: float) -> None:
        """Looks at the drafts while the loop waits for a step, which waits for `awaiting` to signal `awaited`.

        `since`: when the step began to wait for nothing else. Raises UnavailableError, see `next_step`.
        """
        self.check()
        for draft in self._drafts:
            if draft is awaiting and not draft.is_lost:
                draft.look()
                if awaited is not None and not draft.has_signalled(awaited):
                    self._check_patience(draft, since)
        for draft in self._leaving:
            if draft.is_lost:
                draft.attachment.release(draft.last_step)

    def backlog(self, up_to: int) -> tuple[Draft, FencePoint] | None:
        """The active draft, and what it signals after the oldest work that it has not done, if of a step up to this."""
        active = self.active
        if active is None or not active.pending or active.pending[0].step > up_to:
            return None
        active.look()
        if not active.pending or active.pending[0].step > up_to:
            return None
        return active, FencePoint(active.pending[0].fence, active.pending[0].step)

    def lose(self, draft: Draft, error: SlipstreamError) -> None:
        """Has a draft leave whose link has failed. Raises UnavailableError, see `next_step`."""
        cause = LossCause.REFUSED if draft.attachment.link.has_refused else LossCause.DIED
        self._lose(draft, LossCause.TIMEOUT if isinstance(error, DeadlineExceededError) else cause, str(error))

    def end(self, release_up_to: int | None) -> None:
        """Forgets all drafts, as the epoch is over; ends what verify waits for up to a step, if one is given."""
        for draft in self._drafts:
            if release_up_to is not None:
                draft.attachment.release(release_up_to)
        self._messages.clear()
        self._keep()

    def _prepare(self, last_step: int) -> None:
        """Takes in what became of drafts, and what is chosen: has a draft rest, or begin to catch up."""
        self.check()
        choice, active, resting = self._choice, self.active, self._resting
        if self._joining is not None:
            return
        if active is not None and choice is not None and choice.rests:
            self._move(active, DraftState.RESTING)
        elif resting is not None and (choice is None or choice.drafts):
            resting.look()
            is_late = last_step > max(resting.last_step, resting.last_command)  # for its commands' numbers
            if resting.pending and time.monotonic() - resting.moved_at > CATCH_UP_TIMEOUT_S:
                self._lose(resting, LossCause.TIMEOUT, "the draft service did not finish its work")
            elif not resting.pending and (is_late or not self._batch.num_running):
                self._move(resting, DraftState.CATCHING_UP)

    def _made(self, draft: Draft | None, *, decodes_first: bool) -> tuple[Step | None, Draft | None]:
        """Makes a step that this draft takes part in: drafted if the draft is active, else plain and stashed for it."""
        num_draft_tokens, kv, mixes, choice = 0, NO_DRAFT, True, self._choice
        evens: tuple[int, ...] = ()
        if draft is not None:
            traits = draft.attachment.traits
            mixes = self._mixes_heads or not traits.reads_hidden
            evens = min(self._batch.sizes.row_tokens, traits.row_tokens).evens(draft.num_draft_tokens)
            if choice is None:  # workers have graphs for the numbers below K only where these are chosen
                evens = evens[-1:]
            if draft is self.active:
                num_draft_tokens, kv = draft.num_draft_tokens, draft.attachment.kv
        if choice is not None and (draft is not None or self.resting is not None):
            decodes_first |= choice.decodes_alone()
        step = self._batch.next_step(
            num_draft_tokens,
            decodes_first=decodes_first,
            mixes=mixes,
            evens=evens,
            draft=kv,
            choose=most_tokens if choice is None else choice.choose,
        )
        if choice is not None and step is not None:
            choice.sending(decodes=not step.is_prefill, takes_prompts=bool(step.chunks))
        return step, draft

    def _advance(self, last_step: int, num_in_flight: int) -> None:
        """Takes one turn on a draft's way into the steps."""
        joining, catch_up = self._joining, self._catch_up
        if joining is None or catch_up is None:
            return
        if joining.state is DraftState.STASHED:
            self._join(joining, catch_up, last_step, held_back=1 - num_in_flight)
            return
        if catch_up.is_pending:
            self._check_catch_up(joining, catch_up)
            return
        if catch_up.number and joining.pending:
            joining.look()
            self.patience.caught_up(time.monotonic() - catch_up.sent_at)
        missing = catch_up.num_missing()
        if missing and last_step == catch_up.number:
            return  # a command needs a number of its own
        if catch_up.is_close(missing, self._growth(joining, catch_up)):
            if self._batch.is_decoding():
                self._move(joining, DraftState.STASHED)
            else:  # what was sent of prompts is known
                self._join(joining, catch_up, last_step)
        elif catch_up.gets_near(missing):
            self._bring(joining, catch_up, last_step)
        else:
            reason = f"the draft service takes in tokens no faster than they are made: it lacks {missing}"
            self._lose(joining, LossCause.TIMEOUT, reason)

    def _check_catch_up(self, joining: Draft, catch_up: CatchUp) -> None:
        waited_s = time.monotonic() - catch_up.sent_at
        limit_s = self.patience.timeout_s + self.patience.tokens_timeout_s
        if waited_s > (limit_s if catch_up.pauses_verify else max(CATCH_UP_TIMEOUT_S, limit_s)):
            reason = f"the draft service did not take in tokens within {waited_s:.1f} s"
            self._lose(joining, LossCause.TIMEOUT, reason)

    def _check_patience(self, draft: Draft, since: float) -> None:
        """Loses a draft that a step has waited for too long."""
        waited_s = time.monotonic() - max(since, draft.moved_at)
        limit_s = self.patience.timeout_s
        if draft.lacks_stash or not draft.has_drafted:
            limit_s = max(limit_s, FIRST_STEP_TIMEOUT_S)
        if draft.pending and draft.pending[0].takes_tokens:
            limit_s += self.patience.tokens_timeout_s
        if waited_s > limit_s:
            reason = f"the draft service did not finish its work within {waited_s:.3f} s"
            self._lose(draft, LossCause.TIMEOUT, reason)

    def _growth(self, joining: Draft, catch_up: CatchUp) -> int:
        """The most tokens that arrive until the last command."""
        num_steps = self._batch.sizes.run_ahead + 1
        if catch_up.num_empty > num_steps:
            return 0
        # Steps of a draft that has left may be under way.
        most = max((draft.num_draft_tokens for draft in self._drafts if draft is not joining), default=0)
        return self._batch.num_running * num_steps * (most + 1)

    def _join(self, joining: Draft, catch_up: CatchUp, last_step: int, *, held_back: int = 0) -> None:
        if not self._bring(joining, catch_up, last_step, held_back=held_back):
            return
        before = self.active or self._resting
        if before is not None:
            self._leave(before, LossCause.SWAPPED, "another draft has taken over")
        self._move(joining, DraftState.ACTIVE)
        if not joining.has_joined:
            joining.joined_at = time.monotonic()
            if self._choice is not None:
                self._choice.joined(joining.attachment.costs)
            self._listener.joined(joining, joining.joined_at - catch_up.begun_at)

    def _bring(self, joining: Draft, catch_up: CatchUp, number: int, *, held_back: int = 0) -> bool:
        """Sends the next tokens; False if the draft is lost."""
        try:
            catch_up.bring(number, held_back=held_back)
        except SlipstreamError as error:
            self.lose(joining, error)
            return False
        return True

    def _take(self, draft: Draft, cause: LossCause | None) -> None:
        """Takes in an offer, or a withdrawal for a cause. No step is stashed for a draft."""
        joining = self._joining
        if cause is not None:
            if draft.is_staying:
                self._leave(draft, cause, "it was taken away")
            return
        if joining is not None and joining.has_joined:
            self._move(joining, DraftState.RESTING)
        elif joining is not None:
            self._leave(joining, LossCause.SWAPPED, "another draft has arrived")
        self._drafts = (*self._drafts, draft)
        self._move(draft, DraftState.CATCHING_UP)

    def _lose(self, draft: Draft, cause: LossCause, reason: str) -> None:
        """Ends the waits for a draft, once. `watch` does it again until the steps that wait are consumed."""
        if draft.is_lost:
            return
        if draft.has_unreleased_waits:
            raise UnavailableError(f"{reason}; verify waits for it and cannot be released")
        draft.attachment.release(draft.last_step)
        draft.pending.clear()
        if draft.is_staying:
            self._leave(draft, cause, reason)

    def _leave(self, draft: Draft, cause: LossCause, reason: str) -> None:
        was_stashed = draft.state is DraftState.STASHED
        self._move(draft, DraftState.LEAVING)
        if was_stashed and self.active is not None:
            # It was left out of the step that was stashed for the other draft: it has to catch up, too.
            self._move(self.active, DraftState.CATCHING_UP)
        self._listener.left(draft, cause, reason)
        if draft.last_step <= self._consumed:
            self._forget(draft)

    def _forget(self, draft: Draft) -> None:
        self._keep(*[one for one in self._drafts if one is not draft])
        draft.enter(DraftState.LEFT)
        self._listener.gone(draft)

    def _move(self, draft: Draft, state: DraftState) -> None:
        draft.enter(state)
        if state is DraftState.CATCHING_UP:
            self._catch_up = CatchUp(self._batch, draft)
        self._keep(*self._drafts)

    def _keep(self, *drafts: Draft) -> None:
        """Sorts the drafts that are left by their states."""
        self._drafts = drafts
        by_state = {draft.state: draft for draft in drafts}
        self.active, self._resting = by_state.get(DraftState.ACTIVE), by_state.get(DraftState.RESTING)
        self._joining = by_state.get(DraftState.STASHED) or by_state.get(DraftState.CATCHING_UP)
        self._leaving = tuple(draft for draft in drafts if draft.state is DraftState.LEAVING)
