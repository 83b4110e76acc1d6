"""Where clients' jobs are taken in, asked after and handed out: the event loop's side of the scheduler."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from slipstream.common.errors import AlreadyExistsError, NotFoundError, SlipstreamError
from slipstream.scheduler.job_output import JobOutput
from slipstream.scheduler.jobs import Job
from slipstream.scheduler.request_metrics import DISCONNECTED, FAILED, REFUSED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from slipstream.common.chunk import Chunk
    from slipstream.scheduler.detokenizer import Detokenizer
    from slipstream.scheduler.job_queue import JobQueue
    from slipstream.scheduler.jobs import JobSpec, Progress
    from slipstream.scheduler.request_metrics import RequestMetrics


class FrontDesk:
    """The jobs that are alive, by their ids. Belongs to the event loop."""

    def __init__(self, queue: JobQueue, metrics: RequestMetrics) -> None:
        """`queue` is where the scheduler's loop takes its jobs from."""
        self._queue = queue
        self._metrics = metrics
        self._jobs: dict[str, Job] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run, those whose client has gone included until the loop has let go of them."""
        return len(self._jobs)

    async def wait_idle(self) -> None:
        """Returns when no job is alive."""
        await self._is_idle.wait()

    async def run(self, spec: JobSpec, detokenizer: Detokenizer) -> AsyncGenerator[Chunk, None]:
        """Runs a job and yields what comes of it; closing the generator early cancels the job.

        Raises AlreadyExistsError while a job of this name is alive, what `JobQueue.submit` raises, and the error
        that ends the job.
        """
        job = self._submit(spec)
        output = JobOutput(job, detokenizer, self._metrics)
        is_over = False
        try:
            while not is_over:
                progress = await job.take()
                is_over = progress[-1].is_last
                chunk = output.add(progress)
                if chunk is not None:
                    yield chunk
                if progress[-1].error is not None:
                    self._metrics.lost(FAILED)
                    # The same one may end other jobs, too.
                    raise progress[-1].error.with_traceback(None)
        finally:
            if not is_over:
                self._metrics.lost(DISCONNECTED)
                self._queue.cancel(job)

    def cancel(self, job_id: str) -> None:
        """Asks for the end of a job; its stream then ends with the reason "abort". Raises NotFoundError."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFoundError(f"no job {job_id!r} is waiting or running")
        self._queue.cancel(job)

    def deliver(self, deliveries: Iterable[tuple[Job, Progress]]) -> None:
        """Takes in what a step brought, for all jobs; for `call_soon_threadsafe`, once a step."""
        for job, progress in deliveries:
            job.deliver(progress)
            if progress.is_last and self._jobs.get(job.spec.job_id) is job:
                del self._jobs[job.spec.job_id]
        if not self._jobs:
            self._is_idle.set()

    def _submit(self, spec: JobSpec) -> Job:
        if spec.job_id in self._jobs:
            raise AlreadyExistsError(f"a job {spec.job_id!r} is waiting or running")
        job = Job(spec=spec)
        try:
            self._queue.submit(job)
        except SlipstreamError:
            self._metrics.lost(REFUSED)
            raise
        self._jobs[spec.job_id] = job
        self._is_idle.clear()
        return job
