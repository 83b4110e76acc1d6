"""A job as the desk knows it, from its creation until it is forgotten."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from slipstream.common.job_info import JobInfo, JobState
from slipstream.scheduler.job_output import JobOutput
from slipstream.scheduler.request_metrics import FAILED

if TYPE_CHECKING:
    from slipstream.common.chunk import Usage
    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.detokenizer import Detokenizer
    from slipstream.scheduler.jobs import Job, Progress
    from slipstream.scheduler.request_metrics import RequestMetrics


class KeptJob:
    """A job, its output, and who cares for it. Belongs to the event loop."""

    def __init__(self, job: Job, detokenizer: Detokenizer, *, number: int) -> None:
        """`number` grows from job to job."""
        self.job_id = job.spec.job_id
        self.digest = job.spec.digest
        self.number = number
        self.output = JobOutput(self.job_id, detokenizer)
        self.error: SlipstreamError | None = None
        """Why the job could not go on."""
        self.num_callers = 0
        """Calls that the job ends with, unless it is detached."""
        self.is_detached = False
        """Whether the job goes on without a caller."""
        self.left_as: str | None = None
        """How its last caller went, if that ends the job: an outcome of `RequestMetrics`."""
        self._job: Job | None = job
        self._created_at = datetime.now(UTC)
        self._usage: Usage | None = None
        self._changed = asyncio.Event()
        self._num_measured = 0
        self._last_tokens_at = 0.0

    @property
    def job(self) -> Job | None:
        """The job on its way; None when it is over."""
        return self._job

    @property
    def is_over(self) -> bool:
        """Whether there will be no more tokens."""
        return self._job is None

    @property
    def can_be_repeated(self) -> bool:
        """Whether the same request again asks for another try: its caller went away, or the job failed."""
        return self.left_as is not None or self.error is not None

    async def wait_for_change(self, deadline: float | None) -> None:
        """Returns when there is more to read. Raises TimeoutError at `deadline`, in the event loop's time."""
        # Everybody who waits is woken before anybody clears: nobody waits without having read all there is.
        self._changed.clear()
        if deadline is None:
            await self._changed.wait()
        else:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()

    def add(self, progress: Progress) -> None:
        """Adds what a step brought; nothing comes after the end."""
        if self._usage is not None or self._job is None:
            return
        self.output.add(progress)
        self.error = progress.error
        if progress.is_last:
            self._usage = self._job.usage()
            self.output.finish(self._usage)

    def settle(self, metrics: RequestMetrics) -> None:
        """Measures what was added since the last time, and wakes those who wait for it."""
        assert self._job is not None, "a job that is over has been settled"
        now = time.monotonic()
        num_new = self.output.num_tokens - self._num_measured
        if num_new:
            metrics.generated(num_new)
            if self._num_measured == 0:
                self._measure_start(self._job, metrics, now)
                num_new -= 1
            if num_new:
                metrics.went_on(num_new, now - self._last_tokens_at)
            self._last_tokens_at = now
            self._num_measured = self.output.num_tokens
        if self._usage is not None:
            if self.left_as is None and self.output.finish_reason is not None:
                metrics.finished(self.output.finish_reason, now - self._job.arrived_at)
            else:
                metrics.lost(self.left_as or FAILED)
            # The prompt need not be kept.
            self._job = None
        self._changed.set()

    def info(self) -> JobInfo:
        """The job as it is now."""
        state = JobState.ENDED
        if self._job is not None:
            state = JobState.WAITING if self._job.counts.admitted_at is None else JobState.RUNNING
        return JobInfo(
            job_id=self.job_id,
            state=state,
            created_at=self._created_at,
            num_tokens=self.output.num_tokens,
            finish_reason=self.output.finish_reason,
            error="" if self.error is None else str(self.error),
            usage=self._usage,
        )

    def _measure_start(self, job: Job, metrics: RequestMetrics, now: float) -> None:
        counts, arrived_at = job.counts, job.arrived_at
        self._last_tokens_at = now if counts.first_token_at is None else counts.first_token_at
        metrics.started(
            prompt_tokens=len(job.spec.prompt),
            queue_seconds=(now if counts.admitted_at is None else counts.admitted_at) - arrived_at,
            first_token_seconds=self._last_tokens_at - arrived_at,
        )
