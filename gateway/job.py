"""A client's job as the desk knows it, from its creation until it is forgotten."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from slipstream.common.api.job_info import JobInfo, JobState
from slipstream.common.api.output_chunk import FinishReason, Usage
from slipstream.gateway.job_output import JobOutput
from slipstream.gateway.request_metrics import FAILED
from slipstream.gateway.sample import Sample
from slipstream.scheduler.core.sequence import Sequence

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from slipstream.common.errors import SlipstreamError
    from slipstream.gateway.checked_request import CheckedRequest
    from slipstream.gateway.detokenizer import Detokenizer
    from slipstream.gateway.request_metrics import RequestMetrics

_STRONGEST_FIRST = (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Job:
    """A job's samples, and who cares for them. Belongs to the event loop."""

    def __init__(self, request: CheckedRequest, new_detokenizer: Callable[[], Detokenizer], *, number: int) -> None:
        """`number` grows from job to job."""
        self.job_id = request.job_id
        self.digest = request.digest
        self.number = number
        self.samples = tuple(
            Sample(Sequence(spec), JobOutput(request, new_detokenizer(), sample_index=index))
            for index, spec in enumerate(request.samples)
        )
        self.num_callers = 0
        """Calls that the job ends with, unless it is detached."""
        self.is_detached = False
        """Whether the job goes on without a caller."""
        self.left_as: str | None = None
        """How its last caller went, if that ends the job: an outcome of `RequestMetrics`."""
        self.is_over = False
        """Whether there will be no more tokens."""
        self._created_at = datetime.now(UTC)
        self._arrived_at = time.monotonic()
        self._has_started = False
        self._failure: SlipstreamError | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def jobs(self) -> tuple[Sequence, ...]:
        """The loop's jobs that are not over."""
        return tuple(sample.job for sample in self.samples if sample.job is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all samples together."""
        return sum(sample.output.num_tokens for sample in self.samples)

    @property
    def error(self) -> SlipstreamError | None:
        """Why the job could not go on."""
        if self._failure is not None:
            return self._failure
        for sample in self.samples:
            if sample.error is not None:
                return sample.error
        return None

    @property
    def can_be_repeated(self) -> bool:
        """Whether the same request again asks for another try: its caller went away, or the job failed."""
        return self.left_as is not None or self.error is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the job ended; None while a sample goes on, and when one has failed."""
        if self.error is not None:
            return None
        reasons = {sample.output.finish_reason for sample in self.samples}
        return None if None in reasons else next(reason for reason in _STRONGEST_FIRST if reason in reasons)

    @property
    def usage(self) -> Usage | None:
        """What the job took; None while a sample goes on."""
        usages = [sample.usage for sample in self.samples if sample.usage is not None]
        return Usage.together(usages) if len(usages) == len(self.samples) else None

    def fail(self, error: SlipstreamError) -> None:
        """Says why the job cannot go on, unless it is over; the loop must be told."""
        if not self.is_over:
            self._failure = error

    async def wait_for_change(self, wake: asyncio.Future[None]) -> None:
        """Returns when there is more to read than there was at the call, or when somebody else sets `wake`."""
        self._waiting.add(wake)
        try:
            await wake
        finally:
            self._waiting.discard(wake)

    def settle(self, metrics: RequestMetrics, now: float) -> int:
        """Measures what was added since the last time, so many tokens, and wakes those who wait.

        `now` is in seconds of `time.monotonic`. Called until the job is over, and not after that.
        """
        if not self._has_started and self.num_tokens:
            self._has_started = True
            self._measure_start(metrics, now)
        num_new, is_over = 0, True
        for sample in self.samples:
            num_new += sample.settle(metrics, now)
            is_over = is_over and sample.job is None
        self.is_over = is_over
        if is_over:
            reason = self.finish_reason
            if self.left_as is None and reason is not None:
                metrics.finished(reason, now - self._arrived_at)
            else:
                metrics.lost(self.left_as or FAILED)
        for wake in self._waiting:
            if not wake.done():
                wake.set_result(None)
        return num_new

    def info(self) -> JobInfo:
        """The job as it is now."""
        state = JobState.ENDED
        if not self.is_over:
            is_waiting = all(sample.usage is None for sample in self.samples) and all(
                job.counts.admitted_at is None for job in self.jobs
            )
            state = JobState.WAITING if is_waiting else JobState.RUNNING
        return JobInfo(
            job_id=self.job_id,
            state=state,
            created_at=self._created_at,
            num_tokens=self.num_tokens,
            finish_reason=self.finish_reason,
            error="" if self.error is None else str(self.error),
            usage=self.usage,
            samples=tuple(sample.info() for sample in self.samples),
        )

    def _measure_start(self, metrics: RequestMetrics, now: float) -> None:
        jobs = self.jobs
        admitted_at = min((job.counts.admitted_at or now for job in jobs), default=now)
        first_token_at = min((job.counts.first_token_at or now for job in jobs), default=now)
        metrics.started(
            prompt_tokens=len(jobs[0].spec.prompt),
            queue_seconds=admitted_at - self._arrived_at,
            first_token_seconds=first_token_at - self._arrived_at,
        )
