"""The step loop: decide the next step, send it, take in the result of an earlier one."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.common.errors import DeadlineExceededError, SlipstreamError, UnavailableError
from slipstream.common.worker.recorder import Site
from slipstream.common.worker.step import FenceName, StepCommand, StepKind
from slipstream.scheduler.core.pace import Pace
from slipstream.scheduler.core.plan import consume, initial_state, plan_step, with_draft
from slipstream.scheduler.records import NO_DRAFT, DraftTraits
from slipstream.scheduler.telemetry.observer import TIDY_STEPS, SentStep

if TYPE_CHECKING:
    from slipstream.common.worker.step import FenceOps
    from slipstream.scheduler.core.batch import Batch
    from slipstream.scheduler.core.draft_policy import DraftPolicy
    from slipstream.scheduler.core.draft_work import DraftWork
    from slipstream.scheduler.core.outbox import OutputSink
    from slipstream.scheduler.core.results import ResultReader
    from slipstream.scheduler.core.speculation import Speculation
    from slipstream.scheduler.core.waiting_queue import WaitingQueue
    from slipstream.scheduler.records import PlannedStep, Step, StepResult
    from slipstream.scheduler.telemetry.observer import StepObserver
    from slipstream.scheduler.workers.attachment import DraftAttachment
    from slipstream.scheduler.workers.link import Dispatch

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
        dispatch: Dispatch,
        results: ResultReader,
        observer: StepObserver,
        sink: OutputSink,
        policy: DraftPolicy | None = None,
    ) -> None:
        """`policy`: says when steps decode before they take in prompts; `speculation` follows it, too."""
        self._settings = settings
        self._queue = queue
        self._batch = batch
        self._speculation = speculation
        self._dispatch = dispatch
        self._results = results
        self._observer = observer
        self._policy = policy
        self._sink = sink
        self._plan = initial_state(_NO_DRAFT, batch.sizes.numbers_ahead)
        self._planned_for: DraftAttachment | None = None
        self._in_flight: deque[SentStep] = deque()
        self._landed_ns = 0
        """When the last result came."""
        self._pace = Pace(results.ended_ns, settings.lead_s)
        self._num_untidied = 0
        """Steps that were consumed since the last time that all was tidied."""

    def run(self) -> None:
        """Runs until the queue is stopped. Raises UnavailableError or DeadlineExceededError when verify is lost."""
        while not self._queue.is_stopped:
            self._hold()
            if self._queue.cancelled:
                self._batch.cancel(self._queue.take_cancelled())
            self._batch.admit(self._queue)
            step, attachment = self._next_step()
            try:
                if step is not None:
                    self._send(step, attachment)
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
        hold_s = sent.size.hold_s - (begun_ns - max(sent.sent_ns, self._landed_ns)) / 1e9
        if hold_s >= LEAST_HOLD_S:
            self._hand_out()
            # Not interrupted: a stop can wait so long, and a request that comes is in the step in any case.
            time.sleep(hold_s)
            self._observer.add(Site.HOLD, sent.step.number, begun_ns, time.monotonic_ns())

    def _next_step(self) -> tuple[Step | None, DraftAttachment | None]:
        """The next step and the draft that it refers to; no step if there is nothing to do, or to be done first."""
        self._bound_draft(self._plan.step + (2 if self._batch.sizes.mixes else 1))
        part = self._speculation.next_part(self._plan.step, len(self._in_flight))
        if part is None:
            return None, None
        if part.is_empty:
            return self._batch.empty_step(), part.attachment
        draft = part.attachment.kv if part.attachment is not None and part.num_draft_tokens else NO_DRAFT
        decodes_first, policy = part.decodes_first, self._policy
        if policy is not None and (part.attachment is not None or self._speculation.resting is not None):
            decodes_first |= policy.decodes_alone()
        step = self._batch.next_step(part.num_draft_tokens, decodes_first=decodes_first, draft=draft)
        if policy is not None and step is not None:
            policy.sending(decodes=step.kind is not StepKind.PREFILL, takes_prompts=bool(step.chunks))
        return step, part.attachment

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

    def _send(self, step: Step, attachment: DraftAttachment | None) -> None:
        decided_ns = time.monotonic_ns()
        planned = self._ordered(step, attachment)
        drafting: DraftWork | None = None
        if attachment is not None:
            brings_tokens = step.kind is not StepKind.DECODE
            drafting = self._speculation.sending(step.number, attachment, planned, brings_tokens=brings_tokens)
        waits_for = planned.verify.waits_for(FenceName.DRAFT_DONE)
        # The command that the other one waits for goes first.
        to_draft = [] if attachment is None else step.commands_to_draft(planned, attachment.number)
        if step.kind is StepKind.DECODE:
            self._send_to_draft(to_draft.pop(0), attachment)
        self._send_to_verify(step, planned.verify, drafting, waits_for)
        for command in to_draft:
            self._send_to_draft(command, attachment)
        sent_ns = time.monotonic_ns()
        is_resting = self._speculation.resting is not None
        sent = SentStep(step, attachment, waits_for, sent_ns, is_resting, self._pace.of(step))
        self._in_flight.append(sent)
        self._observer.on_sent(sent, planned, decided_ns)

    def _ordered(self, step: Step, attachment: DraftAttachment | None) -> PlannedStep:
        if attachment is not self._planned_for:
            traits = _NO_DRAFT if attachment is None else attachment.traits
            self._plan, self._planned_for = with_draft(self._plan, traits), attachment
        planned, self._plan = plan_step(self._plan, step.ordered)
        return planned

    def _send_to_draft(self, command: StepCommand, attachment: DraftAttachment | None) -> None:
        if attachment is None or attachment.is_released:
            return
        try:
            self._dispatch.send(attachment.link, command, attachment.link)
        except SlipstreamError as error:
            self._check_verify()
            self._speculation.lose(attachment, error)

    def _send_to_verify(self, step: Step, ops: FenceOps, drafting: DraftWork | None, waits_for: int) -> None:
        """`waits_for`: see `SentStep`."""
        attachment, number, draft = None, 0, None
        if drafting is not None:
            attachment = drafting.attachment
            number, draft = attachment.number, attachment.link
            if attachment.is_released:
                ops, waits_for = ops.without(FenceName.DRAFT_DONE), 0
        command = step.command(ops, self._settings.epoch, number)
        try:
            self._dispatch.send(self._dispatch.verify, command, draft)
            if drafting is not None and waits_for:
                drafting.awaited = waits_for
        except SlipstreamError as error:
            self._check_verify()
            if attachment is None:
                raise
            # Draft did not acknowledge the steps that this one waits for: it goes on without.
            self._speculation.lose(attachment, error)
            command = replace(command, ops=ops.without(FenceName.DRAFT_DONE))
            self._dispatch.send(self._dispatch.verify, command, draft)

    def _consume(self) -> None:
        sent = self._in_flight.popleft()
        step, wait_ns = sent.step, time.monotonic_ns()
        result = self._await_result(sent, wait_ns)
        landed_ns = time.monotonic_ns()
        self._plan = consume(self._plan, step.number)
        gap_s = self._pace.landed(step.number, sent.size, sent.sent_ns, self._landed_ns, landed_ns)
        self._landed_ns = landed_ns
        is_clean = bool(step.members.slots) and (sent.attachment is None or not sent.attachment.is_released)
        self._speculation.consumed(
            step.number,
            gap_s,
            decodes=step.kind is not StepKind.PREFILL,
            takes_prompts=bool(step.chunks),
            is_clean=is_clean,
            attachment=sent.attachment,
            waited_for=sent.waits_for,
        )
        outcome = self._batch.apply(step, result, landed_ns)
        end_ns = time.monotonic_ns()
        self._observer.on_result(sent, result, outcome, wait_ns=wait_ns, arrived_ns=landed_ns, end_ns=end_ns)
        self._num_untidied += 1

    def _sleep(self) -> None:
        self._observer.on_idle()
        self._check_verify()
        begun_ns = time.monotonic_ns()
        self._queue.wait_for_change(IDLE_S)
        self._observer.add(Site.IDLE, self._plan.step, begun_ns, time.monotonic_ns())

    def _await_result(self, sent: SentStep, wait_ns: int) -> StepResult:
        look = self._pace.look(sent.size, sent.sent_ns, self._landed_ns)
        # Looked at first, since the fence of a draft that was lost may be set back.
        self._speculation.check()
        patience_s = WATCH_S if self._speculation.has_attachment else LIVENESS_S
        while (result := self._results.resolve(sent.step, patience_s, look)) is None:
            self._check_progress(sent, wait_ns)
            self._speculation.watch(sent.attachment, sent.waits_for, max(sent.sent_ns, self._landed_ns) / 1e9)
        return result

    def _bound_draft(self, step: int) -> None:
        """Keeps draft from falling a whole ring behind: prompts can be sent faster than it takes them in."""
        bound = step - self._settings.ring
        while (backlog := self._speculation.backlog(bound)) is not None:
            self._hand_out()
            attachment, oldest = backlog
            started = time.monotonic()
            while attachment is self._speculation.active and not attachment.done.wait_on_host(oldest, WATCH_S):
                self._check_verify()
                self._speculation.watch(attachment, oldest, started)
            self._observer.on_backlog(time.monotonic() - started)
        self._observer.collect(bound, is_last_chance=True)

    def _check_progress(self, sent: SentStep, wait_ns: int) -> None:
        self._check_verify()
        waited = (time.monotonic_ns() - wait_ns) / 1e9
        if waited > self._settings.step_timeout_s:
            fences = f"{FenceName.VERIFY_PUBLISH.name} is {self._results.published}"
            if sent.attachment is not None and sent.waits_for:
                fences += f", {FenceName.DRAFT_DONE.name} {sent.attachment.done.poll()} of {sent.waits_for}"
            reason = f"step {sent.step.number} did not end within {waited:.1f} s"
            raise DeadlineExceededError(f"{reason}: the verify service hangs ({fences})")

    def _check_verify(self) -> None:
        failure = self._dispatch.verify.failure
        if failure is not None:
            # A new error: the link's own would keep this epoch's frames.
            raise UnavailableError(str(failure))
