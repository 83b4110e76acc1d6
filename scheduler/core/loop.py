"""The step loop: decide the next step, send it, take in the result of an earlier one."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.common.errors import DeadlineExceededError
from slipstream.common.worker.recorder import Site
from slipstream.common.worker.step import Role, StepCommand, StepKind
from slipstream.scheduler.core.plan import DraftTraits, OrderedStep, consume, initial_state, plan_step
from slipstream.scheduler.telemetry.step_metrics import DRAFT_BACKLOG, RESULT

if TYPE_CHECKING:
    from slipstream.common.device.interface import Fence
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.step import FenceOps
    from slipstream.scheduler.core.accounts import TakenIn
    from slipstream.scheduler.core.batch import Batch
    from slipstream.scheduler.core.outbox import OutputSink
    from slipstream.scheduler.core.results import ResultReader, Step, StepResult
    from slipstream.scheduler.core.waiting_queue import WaitingQueue
    from slipstream.scheduler.telemetry.step_metrics import StepMetrics
    from slipstream.scheduler.telemetry.timings import StepRecorder, StepTimings
    from slipstream.scheduler.workers.link import Dispatch, Link

IDLE_S = 0.5
LIVENESS_S = 0.1
"""Between two checks of the links during a wait for a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of one epoch."""

    epoch: int
    run_ahead: int
    """R: step n is sent once step n-R-1 is consumed."""
    draft: DraftTraits
    ring: int
    step_timeout_s: float
    """A step that takes longer means that a worker hangs."""


class StepLoop:
    """One epoch's loop. Belongs to one thread."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        queue: WaitingQueue,
        batch: Batch,
        links: dict[Role, Link],
        dispatch: Dispatch,
        results: ResultReader,
        timings: StepTimings,
        metrics: StepMetrics,
        recorder: StepRecorder,
        draft_done: Fence,
        log: AccessLog,
        sink: OutputSink,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._batch = batch
        self._links = links
        self._dispatch = dispatch
        self._results = results
        self._timings = timings
        self._metrics = metrics
        self._recorder = recorder
        self._draft_done = draft_done
        self._log = log
        self._sink = sink
        self._plan = initial_state(settings.draft, settings.run_ahead)
        self._in_flight: deque[Step] = deque()
        self._sent_ns: deque[int] = deque()
        self._draft_steps: deque[int] = deque()
        self._taken_in: TakenIn | None = None
        """The outcome of the last result, not handed out yet."""

    def run(self) -> None:
        """Runs until the queue is stopped. Raises UnavailableError or DeadlineExceededError when a worker is lost."""
        while not self._queue.is_stopped:
            self._batch.cancel(self._queue.take_cancelled())
            self._batch.admit(self._queue)
            step = self._batch.next_step()
            try:
                if step is not None:
                    self._send(step)
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

    def _hand_out(self) -> None:
        """Hands out the output of the last result, and what begins or ends otherwise."""
        outgoing = self._batch.outbox.take()
        if outgoing:
            self._sink.put(outgoing)
        taken_in, self._taken_in = self._taken_in, None
        if taken_in is not None:
            num_accepted = taken_in.num_accepted[taken_in.is_speculating]
            self._metrics.drafted(num_accepted, self._batch.sizes.num_draft_tokens)
        self._timings.report()

    def _send(self, step: Step) -> None:
        self._bound_draft(step)
        decided_ns = time.monotonic_ns()
        ordered = OrderedStep(step.number, step.kind, step.members.mask)
        planned, self._plan = plan_step(self._plan, ordered)
        commands = [(Role.VERIFY, planned.verify)]
        if planned.draft is not None:
            # The command that the other one waits for goes first.
            commands.insert(0 if step.kind is StepKind.DECODE else 1, (Role.DRAFT, planned.draft))
            self._draft_steps.append(step.number)
        if self._log.is_enabled:
            for role, _ in commands:
                self._log.send(role, epoch=self._settings.epoch, step=step.number)
        self._dispatch.send([(self._links[role], self._command(step, ops)) for role, ops in commands])
        sent_ns = time.monotonic_ns()
        self._recorder.sent(step, planned.verify, planned.draft, decided_ns, sent_ns)
        # After the commands: in one process their enqueueing must not wait for the copy, which waits for them.
        self._results.start(step)
        self._in_flight.append(step)
        self._sent_ns.append(sent_ns)
        self._timings.sent(step)

    def _consume(self) -> None:
        step = self._in_flight.popleft()
        copy_ns, wait_ns = self._sent_ns.popleft(), time.monotonic_ns()
        result = self._await_result(step)
        landed_ns = time.monotonic_ns()
        self._recorder.add(Site.WAIT, step.number, wait_ns, landed_ns)
        self._recorder.add(Site.COPY, step.number, copy_ns, landed_ns)
        self._plan = consume(self._plan, step.number)
        if step.kind is StepKind.DECODE:
            # Verify waited for draft in this step: draft is done with all steps up to it.
            while self._draft_steps and self._draft_steps[0] <= step.number:
                self._draft_steps.popleft()
        self._timings.came(step, result.stamps_before)
        self._taken_in = self._batch.apply(step, result, landed_ns)
        self._recorder.add(Site.TAKE_IN, step.number, landed_ns, time.monotonic_ns())

    def _sleep(self) -> None:
        self._timings.idle()
        self._check_links()
        begun_ns = time.monotonic_ns()
        self._queue.wait_for_change(IDLE_S)
        self._recorder.add(Site.IDLE, self._plan.step, begun_ns, time.monotonic_ns())

    def _await_result(self, step: Step) -> StepResult:
        started = time.monotonic()
        while (result := self._results.resolve(step, LIVENESS_S)) is None:
            self._check_progress(step.number, started)
        self._metrics.host_stalled(RESULT, time.monotonic() - started)
        return result

    def _bound_draft(self, step: Step) -> None:
        """Keeps draft from falling a whole ring behind: prompts can be sent faster than it takes them in."""
        while self._draft_steps and self._draft_steps[0] <= step.number - self._settings.ring:
            self._hand_out()
            oldest = self._draft_steps.popleft()
            started = time.monotonic()
            while not self._draft_done.wait_on_host(oldest, LIVENESS_S):
                self._check_progress(oldest, started)
            self._metrics.host_stalled(DRAFT_BACKLOG, time.monotonic() - started)
        self._timings.collect(step.number - self._settings.ring)

    def _check_progress(self, step: int, started: float) -> None:
        self._check_links()
        waited = time.monotonic() - started
        if waited > self._settings.step_timeout_s:
            raise DeadlineExceededError(f"step {step} did not end within {waited:.1f} s: a worker hangs")

    def _check_links(self) -> None:
        for link in self._links.values():
            if link.failure is not None:
                raise link.failure

    def _command(self, step: Step, ops: FenceOps) -> StepCommand:
        return StepCommand(
            epoch=self._settings.epoch,
            step=step.number,
            kind=step.kind,
            slots=step.members.slots,
            ops=ops,
            chunks=step.chunks,
            updates=step.updates,
            top_logprobs=step.most_top_logprobs,
        )
