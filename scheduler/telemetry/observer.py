"""Observes the steps of an epoch: for traces, metrics, the comparison of two drafts, and the policy of drafting.

The loop says that a step was sent, that its result arrived, and that nothing runs. What the workers do not wait for is
counted after the next step's commands have been sent.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.worker.step import StepKind
from slipstream.scheduler.telemetry.step_metrics import (
    DRAFT_BACKLOG,
    DRAFTED,
    DRAFTED_NONE,
    PLAIN,
    RESTING,
    RESULT,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.scheduler.core.draft_policy import DraftPolicy
    from slipstream.scheduler.core.pace import SizePace
    from slipstream.scheduler.records import PlannedStep, Step, StepOutcome, StepResult
    from slipstream.scheduler.telemetry.decode_record import DecodeRecord
    from slipstream.scheduler.telemetry.step_metrics import StepMetrics
    from slipstream.scheduler.telemetry.timings import StepRecorder, StepTimings
    from slipstream.scheduler.workers.attachment import DraftAttachment

TIDY_STEPS = 32
"""Steps that are counted together: what each touches then comes from memory once, not once a step."""


class SentStep(NamedTuple):
    """A step under way."""

    step: Step
    attachment: DraftAttachment | None
    """The draft that it refers to."""
    waits_for: int
    """The value of `draft.done` that verify waits for in it; 0 for none."""
    sent_ns: int
    is_resting: bool
    """True if a draft rested meanwhile, or came back from it."""
    size: SizePace


class StepObserver:
    """Belongs to the loop's thread; traces, metrics and swaps read what it keeps on others."""

    def __init__(
        self,
        timings: StepTimings,
        recorder: StepRecorder,
        metrics: StepMetrics,
        decodes: DecodeRecord,
        policy: DraftPolicy | None,
    ) -> None:
        """`policy`: is told how long steps take, and how many tokens they add."""
        self._timings = timings
        self._recorder = recorder
        self._metrics = metrics
        self._decodes = decodes
        self._policy = policy
        self.add = recorder.add
        """Adds an activity of the loop to the trace: its site, step, begin and end."""
        self.collect = timings.collect
        """Reads the stamps of steps up to this one that are there by now."""
        self._arrived_ns = 0
        """When the last result arrived that was counted."""
        self._uncounted: Callable[[], None] | None = None
        """Counts the last result."""
        self._num_untidied = 0

    def on_sent(self, sent: SentStep, planned: PlannedStep, decided_ns: int) -> None:
        """Called when the commands of a step that was decided on at `decided_ns` have been sent."""
        self._recorder.sent(sent.step, planned, decided_ns, sent.sent_ns)
        self._timings.sent(sent.step, None if planned.draft is None else sent.attachment)
        self._count()

    def on_result(
        self, sent: SentStep, result: StepResult, outcome: StepOutcome, *, wait_ns: int, arrived_ns: int, end_ns: int
    ) -> None:
        """Called when the loop, which had waited for the result since `wait_ns`, has applied it until `end_ns`."""
        self._count()
        self._metrics.host_stalled(RESULT, (arrived_ns - wait_ns) / 1e9)
        self._timings.came(sent.step, result.stamps_before)
        self._recorder.consumed(sent.step.number, sent.sent_ns, wait_ns, arrived_ns, end_ns)
        self._uncounted = partial(self._count_step, sent, outcome, arrived_ns)

    def on_idle(self) -> None:
        """Called when nothing runs: the time until the next step belongs to none."""
        self._count()
        self._timings.idle()
        self._decodes.idle()

    def on_backlog(self, seconds: float) -> None:
        """Called after the loop had to wait for a draft that was a whole ring of steps late."""
        self._metrics.host_stalled(DRAFT_BACKLOG, seconds)

    def close(self) -> None:
        """Counts what is left: the epoch is over."""
        self._count()

    def _count(self) -> None:
        """Counts the last result, if that was not done yet."""
        count, self._uncounted = self._uncounted, None
        if count is None:
            return
        count()
        self._num_untidied += 1
        if self._num_untidied == TIDY_STEPS:
            self._num_untidied = 0
            self._metrics.tidy()

    def _count_step(self, sent: SentStep, outcome: StepOutcome, arrived_ns: int) -> None:
        """Counts a step, and tells the policy of one that says something of drafted or of plain steps."""
        step, policy = sent.step, self._policy
        before_ns, self._arrived_ns = self._arrived_ns, arrived_ns
        self._metrics.drafted(outcome.num_accepted, outcome.is_speculating, step.num_draft_tokens)
        decoded = self._decodes.add(step, outcome, sent.attachment, arrived_ns)
        if policy is not None and step.kind is StepKind.PREFILL:
            seconds = (arrived_ns - max(sent.sent_ns, before_ns)) / 1e9
            policy.take_in_prompts(seconds, step.num_prompt_tokens, is_drafted=sent.attachment is not None)
        if decoded is None:
            return
        is_drafted, drafts_none = decoded.attachment != 0, step.drafts_none
        plain_mode = DRAFTED_NONE if drafts_none else RESTING if sent.is_resting else PLAIN
        self._metrics.decoded(DRAFTED if is_drafted else plain_mode)
        if policy is not None and (is_drafted or drafts_none or sent.attachment is None):
            policy.take_in(
                decoded.gap_ns / 1e9,
                decoded.num_sequences,
                decoded.num_tokens,
                is_drafted=is_drafted or drafts_none,
                num_prompt_tokens=step.num_prompt_tokens,
                has_guesses=not drafts_none,
            )
