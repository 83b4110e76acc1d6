"""The jobs of all clients: creating, finding, following and cancelling them, and taking in their output."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from slipstream.common.api.job_info import JobPage
from slipstream.common.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    SlipstreamError,
)
from slipstream.gateway.job import Job, JobReader
from slipstream.gateway.request_metrics import DEADLINE, DISCONNECTED, REFUSED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.common.api.sequence import Core, SequenceOutput, SubmittedSequence
    from slipstream.gateway.detokenizer import Detokenizer
    from slipstream.gateway.request_metrics import RequestMetrics
    from slipstream.gateway.sample import Sample
    from slipstream.gateway.validation import CheckedRequest

DEADLINE_SLACK_S = 0.05
"""A client's clock for its call started earlier than ours, by the time that the call took to arrive."""
DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

_BROKEN_OUTPUT = "the output could not be taken in; the server's log has more"

logger = logging.getLogger(__name__)


class JobManager:
    """Jobs by their ids. Belongs to the event loop.

    A job's output is kept with it and every reader reads it there: the client that waits for its job takes the same
    path as one that comes back for it.
    """

    def __init__(self, core: Core, store: JobStore, metrics: RequestMetrics) -> None:
        self._core = core
        self._store = store
        self._metrics = metrics
        self._alive: dict[SubmittedSequence, tuple[Job, Sample]] = {}
        self._numbers = itertools.count(1)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_jobs(self) -> int:
        """Jobs with a sequence in the core."""
        return len({job for job, _ in self._alive.values()})

    async def wait_idle(self) -> None:
        """Returns when no job is alive."""
        await self._is_idle.wait()

    def find(self, job_id: str, digest: bytes) -> Job | None:
        """Finds the job that the same request made before; None if there is none, or if it may run again.

        Raises AlreadyExistsError if another request made the job of this id.
        """
        job = self._store.get(job_id)
        if job is None:
            return None
        if job.digest != digest:
            raise AlreadyExistsError(f"there is a job {job_id!r}, and another request made it")
        return None if job.can_be_repeated else job

    def create(self, request: CheckedRequest, new_detokenizer: Callable[[], Detokenizer]) -> Job:
        """Makes the job of a request, unless `find` finds it. Raises the errors of `find` and of `Core.submit`."""
        found = self.find(request.job_id, request.digest)
        if found is not None:
            return found
        with self.counting_refusals():
            sequences = self._core.submit(*request.samples)
        job = Job(request, sequences, new_detokenizer, number=next(self._numbers))
        self._alive |= {sequence: (job, sample) for sequence, sample in zip(sequences, job.samples, strict=True)}
        self._store.add(job)
        self._is_idle.clear()
        return job

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused because the queue is full or closed."""
        try:
            yield
        except SlipstreamError:
            self._metrics.lost(REFUSED)
            raise

    def check_room(self) -> None:
        """Raises the error that `create` would raise because the queue is full or closed."""
        with self.counting_refusals():
            self._core.check_room()

    def get(self, job_id: str) -> Job:
        """The job of this id. Raises NotFoundError."""
        job = self._store.get(job_id)
        if job is None:
            raise NotFoundError(f"there is no job {job_id!r}, or it ended too long ago")
        return job

    def page(self, size: int, token: str) -> JobPage:
        """See `JobStore.page`."""
        return self._store.page(size, token)

    def cancel(self, job_id: str) -> None:
        """Cancels a job; its streams then end with the reason "abort". No effect if it is over.

        Raises NotFoundError.
        """
        self._cancel_sequences(self.get(job_id))

    def watch(
        self,
        job: Job,
        from_tokens: Sequence[int] = (),
        *,
        field: str = "from_token",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[OutputChunk, None]:
        """Yields a job's output from a token of each sample on, up to its end. See `JobReader`."""
        return self._read(job, JobReader(job, from_tokens, field=field).chunks(timeout_s=timeout_s))

    def enter(self, job: Job) -> None:
        """Called when a Generate call begins."""
        job.num_callers += 1

    def leave(self, job: Job, time_left_s: float | None) -> None:
        """Called when a Generate call ends, `time_left_s` before its deadline. Cancels the job if no caller remains."""
        job.num_callers -= 1
        if job.is_over or job.error is not None or job.is_detached or job.num_callers:
            return
        is_late = time_left_s is not None and time_left_s <= DEADLINE_SLACK_S
        job.left_as = DEADLINE if is_late else DISCONNECTED
        self._cancel_sequences(job)

    def cut_off(self) -> None:
        """Counts a stream that is given up because its client reads nothing."""
        self._metrics.cut_off()

    def deliver(self, bundle: Mapping[SubmittedSequence, Sequence[SequenceOutput]]) -> None:
        """Takes in the output of steps, for all jobs."""
        changed: dict[Job, None] = {}
        for sequence, outputs in bundle.items():
            if sequence in self._alive:
                job, sample = self._alive[sequence]
                changed[job] = None
                self._add(job, sample, sequence, outputs)
                if sample.usage is not None:
                    del self._alive[sequence]
        num_tokens, now = 0, time.monotonic()
        for job in changed:
            num_tokens += job.measure(self._metrics, now)
            if job.is_over:
                self._store.end(job)
                _log_end(job)
        self._metrics.generated(num_tokens)
        if not self._alive:
            self._is_idle.set()

    def _add(self, job: Job, sample: Sample, sequence: SubmittedSequence, outputs: Sequence[SequenceOutput]) -> None:
        try:
            if sample.add(outputs):
                self._core.cancel(sequence)
            elif sample.error is not None:
                # A job fails with any of its samples.
                self._cancel_sequences(job, but=sequence)
        except Exception:
            # Output that cannot be turned into text fails its own job, no other.
            logger.exception("the output of a step cannot be taken in", extra={"job": job.job_id})
            sample.fail(InternalError(_BROKEN_OUTPUT))
            self._cancel_sequences(job)

    async def _read(self, job: Job, chunks: AsyncGenerator[OutputChunk, None]) -> AsyncGenerator[OutputChunk, None]:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except SlipstreamError:
            raise
        except Exception as error:
            # Without stop strings, a text is spelled by its first reader.
            if job.error is None:
                logger.exception("the output cannot be read", extra={"job": job.job_id})
                job.fail(InternalError(_BROKEN_OUTPUT))
                self._cancel_sequences(job)
            raise InternalError(_BROKEN_OUTPUT) from error

    def _cancel_sequences(self, job: Job, but: SubmittedSequence | None = None) -> None:
        for sequence in job.sequences:
            if sequence is not but:
                self._core.cancel(sequence)


class JobStore:
    """Jobs by their ids, in memory: those that are alive, and a bounded number of those that ended not long ago."""

    def __init__(self, *, capacity: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Keeps `capacity` jobs at most after their end, each for `ttl_s` seconds of `clock`."""
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._ended: deque[tuple[float, Job]] = deque()

    def add(self, job: Job) -> None:
        """Adds a job that begins, in place of one of the same id."""
        self._jobs.pop(job.job_id, None)
        self._jobs[job.job_id] = job

    def end(self, job: Job) -> None:
        """Starts the time after which a job that is over is forgotten."""
        self._ended.append((self._clock() + self._ttl_s, job))
        self._forget()

    def get(self, job_id: str) -> Job | None:
        """The job of this id; None if there is none, or no more."""
        self._forget()
        return self._jobs.get(job_id)

    def page(self, size: int, token: str) -> JobPage:
        """The next jobs, the latest first. Raises InvalidArgumentError for an invalid size or token."""
        if not 0 <= size <= MAX_PAGE_SIZE:
            raise InvalidArgumentError("page_size", size, f"0 to {MAX_PAGE_SIZE}")
        if token and not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InvalidArgumentError("page_token", token, "next_page_token of an answer, or nothing")
        self._forget()
        size = size or DEFAULT_PAGE_SIZE
        # Numbers only grow, so jobs that come or go between two calls move no other to another page.
        before = int(token) if token else None
        found: list[Job] = []
        for job in reversed(self._jobs.values()):
            if before is not None and job.number >= before:
                continue
            if len(found) == size:
                return JobPage(jobs=tuple(job.info() for job in found), next_page_token=str(found[-1].number))
            found.append(job)
        return JobPage(jobs=tuple(job.info() for job in found))

    def __len__(self) -> int:
        self._forget()
        return len(self._jobs)

    def _forget(self) -> None:
        now = self._clock()
        while self._ended and (len(self._ended) > self._capacity or self._ended[0][0] <= now):
            _, job = self._ended.popleft()
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id]


def _log_end(job: Job) -> None:
    if job.error is not None:
        logger.warning("failed: %s", job.error, extra={"job": job.job_id})
    else:
        how = job.left_as or job.finish_reason
        logger.debug("ended with %d tokens: %s", job.num_tokens, how, extra={"job": job.job_id})
