"""The step loop: decide the next step, send it, take in the result of an earlier one."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from slipstream.common.errors import DeadlineExceededError, SlipstreamError, UnavailableError
from slipstream.common.wire.events import Site
from slipstream.common.wire.layout import ring_rows
from slipstream.common.wire.step import DRAFT_FENCES, FenceName
from slipstream.scheduler.observer import TIDY_STEPS, SentStep
from slipstream.scheduler.plan import consume, initial_state, plan_grammar, plan_step, with_draft
from slipstream.scheduler.records import DraftTraits

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.wire.step import FenceOps, StepCommand
    from slipstream.scheduler.batch import Batch
    from slipstream.scheduler.constraints import Constraints
    from slipstream.scheduler.draft import Draft
    from slipstream.scheduler.link import Dispatch
    from slipstream.scheduler.observer import StepObserver
    from slipstream.scheduler.records import Step, StepResult
    from slipstream.scheduler.result_poller import ResultPoller
    from slipstream.scheduler.results import Outgoing, ResultReader
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


class StepLoop:
    """One epoch's loop. Belongs to one thread."""

    def __init__(
        self,
        epoch: int,
        *,
        step_timeout_s: float,
        queue: WaitingQueue,
        batch: Batch,
        speculation: Speculation,
        constraints: Constraints | None,
        dispatch: Dispatch,
        results: ResultReader,
        poller: ResultPoller,
        observer: StepObserver,
        sink: Callable[[Outgoing], None],
    ) -> None:
        """`step_timeout_s`: a step that takes longer means that verify hangs.

        `constraints`: None where no sequence has one. `sink`: takes the output after each step, in order; it must
        return at once.
        """
        self._epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._run_ahead = batch.sizes.run_ahead
        """R: step n is sent once step n-R-1 is consumed."""
        self._queue = queue
        self._batch = batch
        self._speculation = speculation
        self._constraints = constraints
        self._dispatch = dispatch
        self._results = results
        self._poller = poller
        self._observer = observer
        self._sink = sink
        self._plan = initial_state(_NO_DRAFT, self._run_ahead)
        self._planned_for: Draft | None = None
        self._in_flight: deque[SentStep] = deque()
        self._arrived_ns = 0
        """When the last result arrived."""
        self._num_untidied = 0
        """Steps that were consumed since the last time that all was tidied."""

    def run(self) -> None:
        """Runs until the queue is stopped. Raises UnavailableError or DeadlineExceededError when verify is lost."""
        while not self._queue.is_stopped:
            self._hold()
            if self._queue.cancelled:
                self._batch.cancel(self._queue.take_cancelled())
            if self._constraints is not None:
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
            if len(self._in_flight) > (0 if step is None else self._run_ahead):
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
        """Waits while the step under way takes much longer than sending the next: who arrives meanwhile is in that one.

        Steps are sent ahead so that workers have them in time, and earlier than that is of no use. No request can be
        admitted without a free slot.
        """
        if not self._in_flight or not self._batch.slots.num_free:
            return
        sent = self._in_flight[0]
        begun_ns = time.monotonic_ns()
        hold_s = self._poller.hold_s - (begun_ns - max(sent.sent_ns, self._arrived_ns)) / 1e9
        if hold_s >= LEAST_HOLD_S:
            self._hand_out()
            # Not interrupted: a stop can wait so long, and a request that arrives is in the step in any case.
            time.sleep(hold_s)
            self._observer.add(Site.HOLD, sent.step.number, begun_ns, time.monotonic_ns())

    def _hand_out(self) -> None:
        """Hands out the output of the last result, and what begins or ends otherwise, and does what can wait."""
        outgoing = self._batch.take_output()
        if outgoing.taken_ns:
            self._sink(outgoing)
        self._batch.grow_ahead()
        if self._num_untidied >= TIDY_STEPS:
            self._num_untidied = 0
            self._batch.committed.tidy()
            self._batch.accounts.lengths.tidy()
            self._observer.tidy()

    def _send(self, step: Step, draft: Draft | None) -> None:
        decided_ns = time.monotonic_ns()
        constraints = self._constraints if step.constrained else None
        grammar_command = None if constraints is None else self._grammar_command(constraints, step)
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
        if constraints is not None and grammar_command is not None:
            constraints.send(grammar_command)
        sent = SentStep(
            step,
            draft,
            draft_ops,
            verify_ops,
            verify_ops.last_of_draft,
            decided_ns,
            time.monotonic_ns(),
            grammar=grammar,
            num_brought=0 if grammar_command is None else grammar_command.num_grammar_tokens,
            is_resting=self._speculation.resting is not None,
        )
        self._in_flight.append(sent)
        self._poller.sent(step)
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

    def _grammar_command(self, constraints: Constraints, step: Step) -> StepCommand:
        ops = plan_grammar(self._plan, step.number, copies=step.copies_tokens)
        return constraints.command(step, ops, self._plan.consumed)

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
        epoch, verify = self._epoch, self._dispatch.verify
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
        gap_s = self._poller.arrived(sent, self._arrived_ns)
        self._arrived_ns = sent.arrived_ns
        self._speculation.consumed(sent, gap_s)
        if self._constraints is not None:
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
        poll_time = self._poller.poll_time(sent, self._arrived_ns)
        # Looked at first, since the fence of a draft that was lost may be set back.
        self._speculation.check()
        patience_s = WATCH_S if self._speculation.has_drafts or sent.grammar else LIVENESS_S
        while (result := self._results.resolve(sent.step, patience_s, poll_time)) is None:
            self._check_progress(sent)
            since = max(sent.sent_ns, self._arrived_ns) / 1e9
            self._speculation.watch(sent.draft, sent.awaited, since)
            if self._constraints is not None:
                self._constraints.watch(sent, since)
        return result

    def _bound_draft(self, step: int) -> None:
        """Keeps draft less than a ring of steps late: prompts can be sent faster than it takes them in."""
        bound = step - ring_rows(self._run_ahead)
        while (backlog := self._speculation.backlog(bound)) is not None:
            self._hand_out()
            draft, oldest = backlog
            fence, begun_ns = draft.attachment.fences[oldest.fence], time.monotonic_ns()
            while draft is self._speculation.active and not fence.wait_on_host(oldest.value, WATCH_S):
                self._check_verify()
                self._speculation.watch(draft, oldest, begun_ns / 1e9)
            self._observer.stall(Site.DRAFT_BACKLOG, step, begun_ns, time.monotonic_ns())
        self._observer.collect(bound, is_last_chance=True)

    def _check_progress(self, sent: SentStep) -> None:
        self._check_verify()
        waited = (time.monotonic_ns() - sent.wait_ns) / 1e9
        if waited > self._step_timeout_s:
            fences = f"{FenceName.VERIFY_PUBLISH.name} is {self._results.published}"
            if sent.draft is not None and sent.awaited is not None:
                fence, value = sent.awaited
                fences += f", {fence.name} {sent.draft.attachment.fences[fence].poll()} of {value}"
            reason = f"step {sent.step.number} did not end within {waited:.1f} s"
            raise DeadlineExceededError(f"{reason}: the verify service hangs ({fences})")

    def _check_verify(self) -> None:
        failure = self._dispatch.verify.failure
        if failure is not None:
            # A new error: the link's own would keep this epoch's frames.
            raise UnavailableError(str(failure))
