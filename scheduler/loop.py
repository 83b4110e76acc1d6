"""The step loop: decide the next step, send it, take in the result of an earlier one."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.common.device.interface import ANY_TIME, Look
from slipstream.common.errors import DeadlineExceededError, SlipstreamError, UnavailableError
from slipstream.common.wire.events import Site
from slipstream.common.wire.step import DRAFT_FENCES, FenceName
from slipstream.scheduler.observer import TIDY_STEPS
from slipstream.scheduler.plan import consume, initial_state, plan_grammar, plan_step, with_draft
from slipstream.scheduler.records import DraftTraits, SentStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.wire.step import FenceOps, StepCommand
    from slipstream.scheduler.batch import Batch
    from slipstream.scheduler.constraints import Constraints
    from slipstream.scheduler.draft import Draft
    from slipstream.scheduler.link import Dispatch
    from slipstream.scheduler.observer import StepObserver
    from slipstream.scheduler.records import Step, StepResult, StepSlots
    from slipstream.scheduler.results import OutputSink, ResultReader
    from slipstream.scheduler.speculation import Speculation
    from slipstream.scheduler.waiting_queue import WaitingQueue

IDLE_S = 0.5
LIVENESS_S = 0.1
"""Between two checks of the links during a wait for a worker."""
WATCH_S = 0.02
"""The same while a draft may hold the step up."""
LEAST_HOLD_S = 0.001
"""The shortest time for which a step is held back."""
_NO_DRAFT = DraftTraits(is_present=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of one epoch."""

    epoch: int
    run_ahead: int
    """R: step n is sent once step n-R-1 is consumed."""
    ring: int
    step_timeout_s: float
    """A step that takes longer means that verify hangs."""
    lead_s: float
    """See `Pace`."""


class StepLoop:
    """One epoch's loop. Belongs to one thread."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        queue: WaitingQueue,
        batch: Batch,
        speculation: Speculation,
        constraints: Constraints,
        dispatch: Dispatch,
        results: ResultReader,
        observer: StepObserver,
        sink: OutputSink,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._batch = batch
        self._speculation = speculation
        self._constraints = constraints
        self._dispatch = dispatch
        self._results = results
        self._observer = observer
        self._sink = sink
        self._plan = initial_state(_NO_DRAFT, batch.sizes.run_ahead)
        self._planned_for: Draft | None = None
        self._in_flight: deque[SentStep] = deque()
        self._arrived_ns = 0
        """When the last result arrived."""
        self._pace = Pace(results.ended_ns, settings.lead_s)
        self._num_untidied = 0
        """Steps that were consumed since the last time that all was tidied."""

    def run(self) -> None:
        """Runs until the queue is stopped. Raises UnavailableError or DeadlineExceededError when verify is lost."""
        while not self._queue.is_stopped:
            self._hold()
            if self._queue.cancelled:
                self._batch.cancel(self._queue.take_cancelled())
            self._constraints.check()
            self._batch.admit(self._queue)
            self._bound_draft(self._plan.step + 1)
            step, draft = self._speculation.next_step(self._plan.step, len(self._in_flight))
            try:
                if step is not None:
                    self._send(step, draft)
            finally:
                # After the commands, which the workers wait for.
                self._hand_out()
            if len(self._in_flight) > (0 if step is None else self._settings.run_ahead):
                self._consume()
            elif step is None:
                self._sleep()

    @property
    def last_sent(self) -> int:
        """The last step that was planned; 0 before the first."""
        return self._plan.step

    def finish(self) -> None:
        """Takes in the results of the steps that are still under way."""
        self._hand_out()
        while self._in_flight:
            self._consume()
            self._hand_out()

    def _hold(self) -> None:
        """Waits while the step under way takes much longer than sending the next: who comes meanwhile is in that one.

        Steps are sent ahead so that workers have them in time, and earlier than that is of no use. No request can be
        admitted without a free slot.
        """
        if not self._in_flight or not self._batch.slots.num_free:
            return
        sent = self._in_flight[0]
        begun_ns = time.monotonic_ns()
        hold_s = self._pace.hold_s - (begun_ns - max(sent.sent_ns, self._arrived_ns)) / 1e9
        if hold_s >= LEAST_HOLD_S:
            self._hand_out()
            # Not interrupted: a stop can wait so long, and a request that comes is in the step in any case.
            time.sleep(hold_s)
            self._observer.add(Site.HOLD, sent.step.number, begun_ns, time.monotonic_ns())

    def _hand_out(self) -> None:
        """Hands out the output of the last result, and what begins or ends otherwise, and does what can wait."""
        outgoing = self._batch.outbox.take()
        if outgoing.taken_ns:
            self._sink.put(outgoing)
        self._batch.grow_ahead()
        if self._num_untidied >= TIDY_STEPS:
            self._num_untidied = 0
            self._batch.committed.tidy()
            self._batch.accounts.lengths.tidy()

    def _send(self, step: Step, draft: Draft | None) -> None:
        decided_ns = time.monotonic_ns()
        grammar_command = self._grammar_command(step) if step.constrained else None
        grammar = 0 if grammar_command is None else grammar_command.epoch
        draft_ops, verify_ops = self._ordered(step, draft)
        if draft is not None:
            draft.sending(step.number, draft_ops)
        # The command that the other worker waits for goes first.
        if step.is_kept:
            self._send_to_draft(step, draft_ops, draft)
        self._send_to_verify(step, verify_ops, draft, grammar)
        if not step.is_kept:
            self._send_to_draft(step, draft_ops, draft)
        if grammar_command is not None:
            self._constraints.send(grammar_command)
        sent = SentStep(
            step,
            draft,
            draft_ops,
            verify_ops,
            verify_ops.last_of_draft,
            decided_ns,
            time.monotonic_ns(),
            grammar=grammar,
            is_resting=self._speculation.resting is not None,
        )
        self._in_flight.append(sent)
        self._pace.sent(step)
        self._observer.on_sent(sent)

    def _ordered(self, step: Step, draft: Draft | None) -> tuple[FenceOps | None, FenceOps]:
        if draft is not self._planned_for:
            traits = _NO_DRAFT if draft is None else draft.attachment.traits
            self._plan, self._planned_for = with_draft(self._plan, traits), draft
        draft_ops, verify_ops, self._plan = plan_step(
            self._plan,
            step.number,
            step.decoded.mask,
            step.prompts,
            step.kept,
            is_drafted=step.most_draft_tokens > 0,
            is_masked=bool(step.constrained),
            copies=step.copies_tokens,
        )
        return draft_ops, verify_ops

    def _grammar_command(self, step: Step) -> StepCommand:
        ops = plan_grammar(self._plan, step.number, copies=step.copies_tokens)
        return self._constraints.command(step, ops, self._plan.consumed)

    def _send_to_draft(self, step: Step, ops: FenceOps | None, draft: Draft | None) -> None:
        if ops is None or draft is None or draft.is_lost:
            return
        link = draft.attachment.link
        try:
            self._dispatch.send(link, step.command_to_draft(ops, draft.number), link)
        except SlipstreamError as error:
            self._check_verify()
            self._speculation.lose(draft, error)

    def _send_to_verify(self, step: Step, ops: FenceOps, draft: Draft | None, grammar: int) -> None:
        epoch, verify = self._settings.epoch, self._dispatch.verify
        if draft is None:
            self._dispatch.send(verify, step.command(ops, epoch, grammar=grammar), None)
            return
        link = draft.attachment.link
        if not draft.is_lost:
            try:
                self._dispatch.send(verify, step.command(ops, epoch, draft.number, grammar), link)
                draft.verify_waits(ops)
                return
            except SlipstreamError as error:
                # Draft did not acknowledge the steps that this one waits for: it goes on without.
                self._check_verify()
                self._speculation.lose(draft, error)
        self._dispatch.send(verify, step.command(ops.without(*DRAFT_FENCES), epoch, draft.number, grammar), link)

    def _consume(self) -> None:
        sent = self._in_flight.popleft()
        step, sent.wait_ns = sent.step, time.monotonic_ns()
        result = self._await_result(sent)
        sent.arrived_ns = time.monotonic_ns()
        self._plan = consume(self._plan, step.number)
        gap_s = self._pace.arrived(sent, self._arrived_ns)
        self._arrived_ns = sent.arrived_ns
        self._speculation.consumed(sent, gap_s)
        self._constraints.consumed(sent, result)
        sent.outcome = self._batch.apply(step, result, sent.arrived_ns)
        sent.applied_ns = time.monotonic_ns()
        self._observer.on_result(sent, result)
        self._num_untidied += 1

    def _sleep(self) -> None:
        self._observer.on_idle()
        self._check_verify()
        begun_ns = time.monotonic_ns()
        self._queue.wait_for_change(IDLE_S)
        self._observer.add(Site.IDLE, self._plan.step, begun_ns, time.monotonic_ns())

    def _await_result(self, sent: SentStep) -> StepResult:
        look = self._pace.look(sent, self._arrived_ns)
        # Looked at first, since the fence of a draft that was lost may be set back.
        self._speculation.check()
        patience_s = WATCH_S if self._speculation.has_drafts or sent.grammar else LIVENESS_S
        while (result := self._results.resolve(sent.step, patience_s, look)) is None:
            self._check_progress(sent)
            since = max(sent.sent_ns, self._arrived_ns) / 1e9
            self._speculation.watch(sent.draft, sent.awaited, since)
            self._constraints.watch(sent, since)
        return result

    def _bound_draft(self, step: int) -> None:
        """Keeps draft from falling a whole ring behind: prompts can be sent faster than it takes them in."""
        bound = step - self._settings.ring
        while (backlog := self._speculation.backlog(bound)) is not None:
            self._hand_out()
            draft, oldest = backlog
            fence, begun_ns = draft.attachment.fence(oldest.fence), time.monotonic_ns()
            while draft is self._speculation.active and not fence.wait_on_host(oldest.value, WATCH_S):
                self._check_verify()
                self._speculation.watch(draft, oldest, begun_ns / 1e9)
            self._observer.stall(Site.DRAFT_BACKLOG, step, begun_ns, time.monotonic_ns())
        self._observer.collect(bound, is_last_chance=True)

    def _check_progress(self, sent: SentStep) -> None:
        self._check_verify()
        waited = (time.monotonic_ns() - sent.wait_ns) / 1e9
        if waited > self._settings.step_timeout_s:
            fences = f"{FenceName.VERIFY_PUBLISH.name} is {self._results.published}"
            if sent.draft is not None and sent.awaited is not None:
                fence, value = sent.awaited
                fences += f", {fence.name} {sent.draft.fence(fence).poll()} of {value}"
            reason = f"step {sent.step.number} did not end within {waited:.1f} s"
            raise DeadlineExceededError(f"{reason}: the verify service hangs ({fences})")

    def _check_verify(self) -> None:
        failure = self._dispatch.verify.failure
        if failure is not None:
            # A new error: the link's own would keep this epoch's frames.
            raise UnavailableError(str(failure))


HOLD_SHARE = 0.75
"""Part of a step's time in which the next one is held back."""
GPU_LEAD_S, CPU_LEAD_S = 0.0035, 0.006
"""The least time that its commands have after that: on a CPU more, where the step has the cores that they need."""
MOST_HOLD_S = 0.04
"""The most of that time, in which the workers are not looked at: a draft that hangs is found so much later at most."""
PACE_STEPS, LAST_STEPS = 8, 5
"""Steps of a size that are looked back on, and those of them that say when the next result is expected."""
LATE_PART, EARLY_S = 0.01, 0.00006
"""The first look is this part of a step's time behind the expected end, less this time: behind it for steps that take
longer than 6 ms, which then hide that the result was seen late."""
UNSURE_PART = 0.005
"""The same where the end is only guessed from gaps: this part of the time before it, at least `EARLY_S`."""
EARLY_LOOKS, OFFSETS = 8, 32
"""One look of so many comes too early, and so sees the end in time; and steps whose distance from stamp to sight is
looked back on, of which the least is that of such a look. Without them each look would be late by the last one's delay
and its own."""


class SizePace:
    """The last steps of a size."""

    __slots__ = ("_lead_s", "_num_looks", "gaps_s", "seconds", "varies")

    def __init__(self, lead_s: float, *, varies: bool) -> None:
        """`varies`: True for steps that take in prompts, whose times differ more within a size."""
        self.gaps_s: deque[float] = deque(maxlen=PACE_STEPS)
        """From one result to the next, as they were seen."""
        self.seconds: deque[float] = deque(maxlen=LAST_STEPS)
        """From one end to the next, by verify's stamps."""
        self.varies = varies
        self._lead_s = lead_s
        self._num_looks = 0

    @property
    def hold_s(self) -> float:
        """For how long from the beginning of a step the next may be held back; by the shortest."""
        if len(self.gaps_s) < PACE_STEPS:
            return 0.0
        least = min(self.gaps_s)
        return min(HOLD_SHARE * least, least - self._lead_s, MOST_HOLD_S)

    def look(self, since_s: float) -> Look:
        """When to look if the step before was seen, or this one sent, at `since_s`."""
        if not self.gaps_s:
            return ANY_TIME
        usual_s = min(list(self.gaps_s)[-LAST_STEPS:])
        return Look(since_s + usual_s - max(UNSURE_PART * usual_s, EARLY_S), usual_s)

    def exact_look(self, since_s: float) -> Look | None:
        """When to look if the step before ended at `since_s`. None if that says no more than `look`."""
        if self.varies or not self.seconds:
            return None
        # One step that took long says nothing of the next; one that took less may be the first of many.
        usual_s = min(sorted(self.seconds)[len(self.seconds) // 2], self.seconds[-1])
        self._num_looks += 1
        part = -UNSURE_PART if self._num_looks % EARLY_LOOKS == 0 else LATE_PART
        return Look(since_s + (1 + part) * usual_s - EARLY_S, usual_s)


class Pace:
    """How long steps take by their size: when to look for the result of one, and how long to hold the next one back.

    Each sleep of the loop's thread costs CPU time, most of all on a virtual machine. So it wakes once a step, just
    after the result, if it can say when that is. Gaps between results as the loop sees them do not tell: each late look
    makes one longer. Verify's stamps do, since the results are in memory of the host: the end of the last step is there
    by the time that the loop waits for the next. Belongs to the loop's thread.
    """

    def __init__(self, ended_ns: Callable[[int], int], lead_s: float) -> None:
        """`ended_ns`: returns verify's stamp at the end of a step whose result was seen; 0 if it is not there yet.

        `lead_s`: a step is held back until so long before it is needed at most.
        """
        self._ended_ns = ended_ns
        self._lead_s = lead_s
        self._sizes: dict[tuple[int, ...], SizePace] = {}
        self._last_found: tuple[StepSlots, tuple[int, ...], SizePace] | None = None
        """Slots, draft tokens and size of the last step without prompts: as a rule the next one's, too."""
        self._under_way: deque[SizePace] = deque()
        """Sizes of the steps that were sent, oldest first."""
        self._last: tuple[SentStep, SizePace, bool] | None = None
        """The last one whose result was seen, and whether it was under way when the one before was; until its stamp is
        taken in."""
        self._last_stamp_ns = 0
        self._end_ns = 0
        """The stamp of the last step; 0 if it was not there."""
        self._offsets_ns: deque[int] = deque(maxlen=OFFSETS)
        """From the stamp to the sight of it."""

    def sent(self, step: Step) -> None:
        """Notes a step that was sent."""
        self._under_way.append(self._of(step))

    @property
    def hold_s(self) -> float:
        """See `SizePace.hold_s`; of the oldest step under way."""
        return self._under_way[0].hold_s

    def _of(self, step: Step) -> SizePace:
        """The steps that do about as much as this one."""
        decoded, num_draft_tokens, last = step.decoded, step.num_draft_tokens, self._last_found
        if last is not None and last[0] is decoded and last[1] == num_draft_tokens and not step.chunks:
            return last[2]
        num_tokens = step.num_decoded_tokens or len(step.chunks)
        key = (step.most_draft_tokens, _about(num_tokens), _about(step.num_prompt_tokens))
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = SizePace(self._lead_s, varies=bool(step.chunks))
        if not step.chunks:
            self._last_found = decoded, num_draft_tokens, found
        return found

    def arrived(self, sent: SentStep, before_ns: int) -> float:
        """Notes the result of the oldest step under way. `before_ns`: when that of the one before arrived.

        Returns the time since then, or since the step was sent, in seconds.
        """
        if self._last is not None:
            self._settle(*self._last)
        size, gap_s = self._under_way.popleft(), (sent.arrived_ns - max(sent.sent_ns, before_ns)) / 1e9
        size.gaps_s.append(gap_s)
        self._last = sent, size, sent.sent_ns < before_ns
        return gap_s

    def look(self, sent: SentStep, before_ns: int) -> Look:
        """When to look for the result of the oldest step under way. `before_ns`: when the one before that arrived."""
        if self._last is not None:
            self._settle(*self._last)
        if self._end_ns and sent.sent_ns < before_ns:
            exact = self._under_way[0].exact_look((self._end_ns + min(self._offsets_ns)) / 1e9)
            if exact is not None:
                return exact
        return self._under_way[0].look(max(sent.sent_ns, before_ns) / 1e9)

    def _settle(self, sent: SentStep, size: SizePace, was_under_way: bool) -> None:
        """Takes in the stamp of the last step."""
        self._last, before_ns = None, self._end_ns
        end_ns = self._ended_ns(sent.step.number)
        if end_ns <= self._last_stamp_ns:
            self._end_ns = 0
            return
        self._last_stamp_ns = self._end_ns = end_ns
        self._offsets_ns.append(sent.arrived_ns - end_ns)
        if before_ns and was_under_way:
            size.seconds.append((end_ns - before_ns) / 1e9)


def _about(number: int) -> int:
    """The number without all but its first three bits."""
    places = max(0, number.bit_length() - 3)
    return number >> places << places
