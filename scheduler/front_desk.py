"""Where clients' jobs are taken in, asked after and handed out: the event loop's side of the scheduler."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from slipstream.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    SlipstreamError,
)
from slipstream.scheduler.job_output import MAX_CHUNK_TOKENS
from slipstream.scheduler.jobs import Job
from slipstream.scheduler.kept_job import KeptJob
from slipstream.scheduler.request_metrics import DEADLINE, DISCONNECTED, REFUSED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from slipstream.common.chunk import Chunk
    from slipstream.common.job_info import JobPage
    from slipstream.scheduler.detokenizer import Detokenizer
    from slipstream.scheduler.job_queue import JobQueue
    from slipstream.scheduler.job_store import JobStore
    from slipstream.scheduler.jobs import JobSpec, Progress
    from slipstream.scheduler.request_metrics import RequestMetrics

DEADLINE_SLACK_S = 0.05
"""A client's clock for its call started earlier than ours, by the time that the call took to come."""


class FrontDesk:
    """The jobs, by their ids. Belongs to the event loop.

    A job's output is kept with it, and everybody who follows the job reads from there: one path for the client that
    waits for its job and for those who come back for it.
    """

    def __init__(self, queue: JobQueue, store: JobStore, metrics: RequestMetrics) -> None:
        """`queue` is where the scheduler's loop takes its jobs from."""
        self._queue = queue
        self._store = store
        self._metrics = metrics
        self._alive: dict[Job, KeptJob] = {}
        self._numbers = itertools.count(1)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run, those whose client has gone included until the loop has let go of them."""
        return len(self._alive)

    async def wait_idle(self) -> None:
        """Returns when no job is alive."""
        await self._is_idle.wait()

    def find(self, job_id: str, digest: bytes) -> KeptJob | None:
        """The job that the same request made before; None if there is none, or it deserves another try.

        Raises AlreadyExistsError when another request made a job of this name.
        """
        kept = self._store.get(job_id)
        if kept is None or kept.can_be_repeated:
            return None
        if kept.digest != digest:
            raise AlreadyExistsError(f"there is a job {job_id!r}, and another request made it")
        return kept

    def create(self, spec: JobSpec, detokenizer: Detokenizer) -> KeptJob:
        """The job of a request: a new one, unless `find` finds it. Raises what `find` and `JobQueue.submit` raise."""
        kept = self.find(spec.job_id, spec.digest)
        if kept is not None:
            return kept
        job = Job(spec=spec)
        try:
            self._queue.submit(job)
        except SlipstreamError:
            self._metrics.lost(REFUSED)
            raise
        kept = KeptJob(job, detokenizer, number=next(self._numbers))
        self._alive[job] = kept
        self._store.add(kept)
        self._is_idle.clear()
        return kept

    def get(self, job_id: str) -> KeptJob:
        """The job of this name. Raises NotFoundError."""
        kept = self._store.get(job_id)
        if kept is None:
            raise NotFoundError(f"there is no job {job_id!r}, or it ended too long ago")
        return kept

    def page(self, size: int, token: str) -> JobPage:
        """See `JobStore.page`."""
        return self._store.page(size, token)

    def cancel(self, job_id: str) -> None:
        """Asks for the end of a job; its streams then end with the reason "abort". Raises NotFoundError."""
        kept = self._store.get(job_id)
        if kept is None or kept.job is None:
            raise NotFoundError(f"no job {job_id!r} is waiting or running")
        self._queue.cancel(kept.job)

    async def watch(
        self, kept: KeptJob, from_token: int = 0, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yields a job's output from a token on, up to its end.

        Raises InvalidArgumentError for a token beyond those that there are, DeadlineExceededError when `timeout_s` is
        over, and the error that ends the job.
        """
        output, offset = kept.output, from_token
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        if offset > output.num_tokens:
            raise InvalidArgumentError("from_token", offset, f"0 to {output.num_tokens}, the tokens that there are")
        while output.num_spelled < offset:
            output.spell(min(offset, output.num_spelled + MAX_CHUNK_TOKENS))
            await asyncio.sleep(0)
        while True:
            chunk = output.read(offset)
            if chunk is not None:
                yield chunk
                if chunk.finish_reason is not None:
                    return
                offset += len(chunk.token_ids)
            elif kept.error is not None:
                # The same one may end other calls, too.
                raise kept.error.with_traceback(None)
            else:
                try:
                    await kept.wait_for_change(deadline)
                except TimeoutError:
                    message = f"job {kept.job_id!r} had {output.num_tokens} tokens at the call's deadline"
                    raise DeadlineExceededError(message) from None

    def enter(self, kept: KeptJob) -> None:
        """A call begins that the job is for: with the last of them the job ends, unless it is detached."""
        kept.num_callers += 1

    def leave(self, kept: KeptJob, time_left_s: float | None) -> None:
        """Such a call is over, so long before its deadline."""
        kept.num_callers -= 1
        if kept.job is None or kept.is_detached or kept.num_callers:
            return
        is_late = time_left_s is not None and time_left_s <= DEADLINE_SLACK_S
        kept.left_as = DEADLINE if is_late else DISCONNECTED
        self._queue.cancel(kept.job)

    def cut_off(self) -> None:
        """A stream is given up because its client reads nothing."""
        self._metrics.cut_off()

    def deliver(self, deliveries: Iterable[tuple[Job, Progress]]) -> None:
        """Takes in what steps brought, for all jobs; for `call_soon_threadsafe`, once a step or less."""
        changed: dict[Job, KeptJob] = {}
        for job, progress in deliveries:
            kept = self._alive.get(job)
            if kept is not None:
                kept.add(progress)
                changed[job] = kept
        for job, kept in changed.items():
            kept.settle(self._metrics)
            if kept.is_over:
                del self._alive[job]
                self._store.end(kept)
        if not self._alive:
            self._is_idle.set()
