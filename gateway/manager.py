"""Where clients' jobs are taken in, asked after and handed out: the event loop's side of the scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from slipstream.common.errors import AlreadyExistsError, InternalError, NotFoundError, SlipstreamError
from slipstream.gateway.job import Job
from slipstream.gateway.job_reader import JobReader
from slipstream.gateway.request_metrics import DEADLINE, DISCONNECTED, REFUSED

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

    from slipstream.common.api.job_info import JobPage
    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.gateway.checked_request import CheckedRequest
    from slipstream.gateway.detokenizer import Detokenizer
    from slipstream.gateway.job_store import JobStore
    from slipstream.gateway.request_metrics import RequestMetrics
    from slipstream.gateway.sample import Sample
    from slipstream.scheduler.core.sequence import Sequence, SequenceOutput
    from slipstream.scheduler.core.waiting_queue import WaitingQueue

DEADLINE_SLACK_S = 0.05
"""A client's clock for its call started earlier than ours, by the time that the call took to come."""

_BROKEN_OUTPUT = "the output could not be taken in; the server's log has more"

logger = logging.getLogger(__name__)


class JobManager:
    """The jobs, by their ids. Belongs to the event loop.

    A job's output is kept with it, and everybody who follows the job reads from there: one path for the client that
    waits for its job and for those who come back for it.
    """

    def __init__(self, queue: WaitingQueue, store: JobStore, metrics: RequestMetrics) -> None:
        """`queue` is where the scheduler's loop takes its jobs from."""
        self._queue = queue
        self._store = store
        self._metrics = metrics
        self._alive: dict[Sequence, tuple[Job, Sample]] = {}
        self._numbers = itertools.count(1)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run, those whose client has gone included until the loop has let go of them."""
        return len({kept for kept, _ in self._alive.values()})

    async def wait_idle(self) -> None:
        """Returns when no job is alive."""
        await self._is_idle.wait()

    def find(self, job_id: str, digest: bytes) -> Job | None:
        """The job that the same request made before; None if there is none, or it deserves another try.

        Raises AlreadyExistsError when another request made a job of this name.
        """
        kept = self._store.get(job_id)
        if kept is None:
            return None
        if kept.digest != digest:
            raise AlreadyExistsError(f"there is a job {job_id!r}, and another request made it")
        return None if kept.can_be_repeated else kept

    def create(self, request: CheckedRequest, new_detokenizer: Callable[[], Detokenizer]) -> Job:
        """The job of a request: a new one, unless `find` finds it. Raises what `find` and `submit` raise."""
        kept = self.find(request.job_id, request.digest)
        if kept is not None:
            return kept
        kept = Job(request, new_detokenizer, number=next(self._numbers))
        with self.counting_refusals():
            self._queue.submit(*kept.jobs)
        self._alive |= {sample.job: (kept, sample) for sample in kept.samples if sample.job is not None}
        self._store.add(kept)
        self._is_idle.clear()
        return kept

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is let in no further for want of room, or of somebody to serve it."""
        try:
            yield
        except SlipstreamError:
            self._metrics.lost(REFUSED)
            raise

    def check_room(self) -> None:
        """Raises what `create` would because the queue is full or closed, before anything is made of a request."""
        with self.counting_refusals():
            self._queue.check_room()

    def get(self, job_id: str) -> Job:
        """The job of this name. Raises NotFoundError."""
        kept = self._store.get(job_id)
        if kept is None:
            raise NotFoundError(f"there is no job {job_id!r}, or it ended too long ago")
        return kept

    def page(self, size: int, token: str) -> JobPage:
        """See `JobStore.page`."""
        return self._store.page(size, token)

    def cancel(self, job_id: str) -> None:
        """Asks for the end of a job; its streams then end with the reason "abort". No effect on one that is over.

        Raises NotFoundError.
        """
        self._end(self.get(job_id))

    def watch(
        self,
        kept: Job,
        from_tokens: abc.Sequence[int] = (),
        *,
        field: str = "from_token",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[OutputChunk, None]:
        """Yields a job's output from a token of each sample on, up to its end. See `JobReader`."""
        return self._read(kept, JobReader(kept, from_tokens, field=field).chunks(timeout_s=timeout_s))

    def enter(self, kept: Job) -> None:
        """A call begins that the job is for: with the last of them the job ends, unless it is detached."""
        kept.num_callers += 1

    def leave(self, kept: Job, time_left_s: float | None) -> None:
        """Such a call is over, so long before its deadline. A job that failed ends without."""
        kept.num_callers -= 1
        if kept.is_over or kept.error is not None or kept.is_detached or kept.num_callers:
            return
        is_late = time_left_s is not None and time_left_s <= DEADLINE_SLACK_S
        kept.left_as = DEADLINE if is_late else DISCONNECTED
        self._end(kept)

    def cut_off(self) -> None:
        """A stream is given up because its client reads nothing."""
        self._metrics.cut_off()

    def deliver(self, bundle: Mapping[Sequence, abc.Sequence[SequenceOutput]]) -> None:
        """Takes in what steps brought, for all jobs."""
        changed: dict[Job, None] = {}
        for job, steps in bundle.items():
            if job in self._alive:
                kept, sample = self._alive[job]
                changed[kept] = None
                self._add(kept, sample, job, steps)
                if sample.usage is not None:
                    del self._alive[job]
        num_tokens, now = 0, time.monotonic()
        for kept in changed:
            num_tokens += kept.settle(self._metrics, now)
            if kept.is_over:
                self._store.end(kept)
                _log_end(kept)
        self._metrics.generated(num_tokens)
        if not self._alive:
            self._is_idle.set()

    def _add(self, kept: Job, sample: Sample, job: Sequence, steps: abc.Sequence[SequenceOutput]) -> None:
        try:
            if sample.add(steps):
                self._queue.cancel(job)
            elif sample.error is not None:
                # A job fails with any of its samples.
                self._end(kept, but=job)
        except Exception:
            # A text that cannot be spelled costs its own job the rest, and no other.
            logger.exception("what a step brought cannot be taken in", extra={"job": kept.job_id})
            sample.fail(InternalError(_BROKEN_OUTPUT))
            self._end(kept)

    async def _read(self, kept: Job, chunks: AsyncGenerator[OutputChunk, None]) -> AsyncGenerator[OutputChunk, None]:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except SlipstreamError:
            raise
        except Exception as error:
            # Without stop strings, a text is spelled by the first who reads it.
            if kept.error is None:
                logger.exception("the output cannot be read", extra={"job": kept.job_id})
                kept.fail(InternalError(_BROKEN_OUTPUT))
                self._end(kept)
            raise InternalError(_BROKEN_OUTPUT) from error

    def _end(self, kept: Job, but: Sequence | None = None) -> None:
        for job in kept.jobs:
            if job is not but:
                self._queue.cancel(job)


def _log_end(kept: Job) -> None:
    if kept.error is not None:
        logger.warning("failed: %s", kept.error, extra={"job": kept.job_id})
    else:
        how = kept.left_as or kept.finish_reason
        logger.debug("ended with %d tokens: %s", kept.num_tokens, how, extra={"job": kept.job_id})
