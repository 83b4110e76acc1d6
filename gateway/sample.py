"""One of a client's job's samples as the desk knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.api.job_info import SampleInfo

if TYPE_CHECKING:
    from collections import abc

    from slipstream.common.api.output_chunk import Usage
    from slipstream.common.errors import SlipstreamError
    from slipstream.gateway.job_output import JobOutput
    from slipstream.gateway.request_metrics import RequestMetrics
    from slipstream.scheduler.core.sequence import Sequence, SequenceOutput


class Sample:
    """A job of the loop, and what came of it. Belongs to the event loop."""

    def __init__(self, job: Sequence, output: JobOutput) -> None:
        self.output = output
        self.error: SlipstreamError | None = None
        """Why the sample could not go on."""
        self._job: Sequence | None = job
        self._usage: Usage | None = None
        self._last_token_at: float | None = None
        self._num_measured = 0
        self._measured_at = 0.0

    @property
    def job(self) -> Sequence | None:
        """The loop's job; None when it is over."""
        return self._job

    @property
    def usage(self) -> Usage | None:
        """What the sample took; None while it goes on."""
        return self._usage

    def add(self, steps: abc.Sequence[SequenceOutput]) -> bool:
        """Adds what steps brought; nothing comes after the end. Returns whether the loop must be told of the end."""
        if self._usage is not None or self._job is None:
            return False
        was_cut = self.output.is_cut
        end = self.output.add(*steps)
        if not was_cut:
            self._last_token_at = self._job.counts.last_token_at
        if end is None:
            return self.output.is_cut and not was_cut
        if not self.output.is_cut:
            self.error = end.error
        self._usage = self._job.usage(self.output.num_tokens, self._last_token_at)
        self.output.finish(self._usage)
        return False

    def fail(self, error: SlipstreamError) -> None:
        """Ends the sample where it is, whatever the loop still brings."""
        assert self._job is not None, "a sample that is over has not failed"
        self.error = error
        self._usage = self._job.usage(self.output.num_tokens, self._last_token_at)
        self.output.finish(self._usage)

    def settle(self, metrics: RequestMetrics, now: float) -> int:
        """Measures what was added since the last time: so many tokens. Lets go of the loop's job if it is over."""
        job, num_tokens = self._job, self.output.num_tokens
        if job is None:
            return 0
        num_new = num_tokens - self._num_measured
        if num_new:
            if self._num_measured == 0:
                first_token_at = job.counts.first_token_at
                self._measured_at = now if first_token_at is None else first_token_at
            metrics.went_on(num_new - (self._num_measured == 0), now - self._measured_at)
            self._measured_at = now
            self._num_measured = num_tokens
        if self._usage is not None:
            # The prompt need not be kept.
            self._job = None
        return num_new

    def info(self) -> SampleInfo:
        """The sample as it is now."""
        return SampleInfo(
            num_tokens=self.output.num_tokens,
            finish_reason=self.output.finish_reason,
            matched_stop=self.output.matched_stop,
            usage=self._usage,
        )
