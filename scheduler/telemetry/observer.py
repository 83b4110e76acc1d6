"""Observes the steps of an epoch: for traces, metrics, the comparison of two drafts, and the policy of drafting.

The loop says that a step was sent, that its result arrived, and that nothing runs. What the workers do not wait for is
counted after the next step's commands have been sent.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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
    from slipstream.scheduler.records import SentStep, StepResult
    from slipstream.scheduler.telemetry.decode_record import DecodeRecord
    from slipstream.scheduler.telemetry.step_metrics import StepMetrics
    from slipstream.scheduler.telemetry.timings import StepRecorder, StepTimings

TIDY_STEPS = 32
"""Steps that are counted together: what each touches then comes from memory once, not once a step."""


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

    def on_sent(self, sent: SentStep) -> None:
        """Called when the commands of a step have been sent."""
        self._recorder.sent(sent)
        self._timings.sent(sent)
        self._count()

    def on_result(self, sent: SentStep, result: StepResult) -> None:
        """Called when the loop has applied the result of a step."""
        self._count()
        self._metrics.host_stalled(RESULT, (sent.arrived_ns - sent.wait_ns) / 1e9)
        self._timings.came(sent, result.stamps_before)
        self._recorder.consumed(sent)
        self._uncounted = partial(self._count_step, sent)

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

    def _count_step(self, sent: SentStep) -> None:
        """Counts a step, and tells the policy of one that says something of drafted or of plain steps."""
        step, outcome, policy = sent.step, sent.outcome, self._policy
        before_ns, self._arrived_ns = self._arrived_ns, sent.arrived_ns
        self._metrics.drafted(outcome.num_accepted, outcome.is_speculating, step.most_draft_tokens)
        decoded = self._decodes.add(sent)
        if policy is not None and step.is_prefill:
            seconds = (sent.arrived_ns - max(sent.sent_ns, before_ns)) / 1e9
            policy.take_in_prompts(seconds, step.num_prompt_tokens, is_drafted=sent.draft is not None)
        if decoded is None:
            return
        is_drafted, skips_drafting = decoded.attachment != 0, step.is_kept and not step.most_draft_tokens
        plain_mode = DRAFTED_NONE if skips_drafting else RESTING if sent.is_resting else PLAIN
        self._metrics.decoded(DRAFTED if is_drafted else plain_mode)
        if policy is not None and (is_drafted or skips_drafting or sent.draft is None):
            policy.take_in(
                decoded.gap_ns / 1e9,
                decoded.num_sequences,
                decoded.num_tokens,
                is_drafted=is_drafted or skips_drafting,
                num_prompt_tokens=step.num_prompt_tokens,
                has_guesses=not skips_drafting,
            )
