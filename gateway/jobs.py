"""The jobs of all clients: creating, finding, following and cancelling them, and taking in their output."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.loop_turns import LoopTurns
from slipstream.gateway.config import WHOLE, Shard
from slipstream.gateway.job import Job
from slipstream.gateway.journal import JobJournal
from slipstream.gateway.keys import check_quota, current_owner
from slipstream.gateway.metrics import DEADLINE, DISCONNECTED, REFUSED
from slipstream.gateway.sample import BROKEN_OUTPUT
from slipstream.gateway.stream import JobReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from slipstream.common.wire.job import FinishReason
    from slipstream.common.wire.sequence import SequenceSpec, StepOutput
    from slipstream.gateway.job import JobStore
    from slipstream.gateway.journal_file import JournalFile
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.request import CheckedRequest
    from slipstream.gateway.sample import Sample
    from slipstream.gateway.scheduler import SchedulerLink

DEADLINE_SLACK_S = 0.05
"""A client's clock for its call started earlier than ours, by the time that the call took to arrive."""
RETURN_S = 30.0
"""Seconds after a restart in which callers of Generate may call again before their jobs are cancelled."""
RETRY_AFTER_MS = 200
logger = logging.getLogger(__name__)


class JobManager:
    """Jobs by their ids, for the owner who calls: see `current_owner`. Belongs to the event loop.

    A job's output is kept with it and every reader reads it there: the client that waits for its job takes the same
    path as a client that calls again for it. Implements the link's `Receiver`.
    """

    def __init__(
        self,
        link: SchedulerLink,
        store: JobStore,
        metrics: RequestMetrics,
        *,
        shard: Shard = WHOLE,
        stream_interval_s: Callable[[], float] = lambda: 0.0,
        journal_file: JournalFile | None = None,
        return_s: float = RETURN_S,
        key_tokens: int | None = None,
        on_writable: Callable[[bool], None] = lambda _: None,
        logs_requests: bool = False,
    ) -> None:
        """`stream_interval_s` returns the least time between two messages of a stream; `shard` numbers the jobs.

        Jobs are kept in the journal's file, if there is one. Those in it are back after `begin`; a caller may then take
        `return_s` to call again. `key_tokens`: see `check_quota`. `on_writable`: see `Journal`. `logs_requests`:
        whether each request that ends is a line of the log.
        """
        self._link = link
        self._store = store
        self._metrics = metrics
        self._stream_interval_s = stream_interval_s
        self._alive: dict[Sample, Job] = {}
        """The samples that are not over."""
        self.journal = JobJournal(
            journal_file, jobs=store.jobs, metrics=metrics, on_failure=self._fail_all, on_writable=on_writable
        )
        self._return_s = return_s
        self._level = logging.INFO if logs_requests else logging.DEBUG
        self.num_generated = 0
        """Tokens that were generated, of all jobs ever."""
        self._key_tokens = key_tokens
        self.turns = LoopTurns()
        self._is_complete = not self.journal.has_jobs
        """False while jobs of the journal are not back."""
        self._numbers = shard.numbers_after(self.journal.last_number)
        store.on_forget = lambda job: self.journal.forget(job.number)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_jobs(self) -> int:
        """Jobs that are not over."""
        return len(set(self._alive.values()))

    async def wait_idle(self) -> None:
        """Returns when no job is alive."""
        await self._is_idle.wait()

    async def begin(self, model: ServedModel) -> None:
        if self._is_complete:
            for job in tuple(self._store.jobs()):
                if job.model_identity != model.identity:
                    await job.forget_tokenizer()
            return
        restored = await self.journal.restore(model)
        for job, _ in restored:
            self._store.add(job)
            self._alive |= dict.fromkeys(job.unfinished, job)
            self._link.add(*job.unfinished)
        for job, _ in sorted(restored, key=lambda item: item[1]):
            if job.is_over:
                self._store.end(job)
        if self._alive:
            self._is_idle.clear()
        self._is_complete = True
        logger.info("%d jobs are back, %d of them go on", len(restored), self.num_jobs)
        unfinished = [job for job, _ in restored if not job.is_over]
        asyncio.get_running_loop().call_later(self._return_s, self._cancel_without_callers, unfinished)

    def find(self, job_id: str, digest: bytes) -> Job | None:
        """Finds the job that the same request made before; None if there is none.

        Raises AlreadyExistsError if another request made the job of this id, and UnavailableError until the journal's
        jobs are restored.
        """
        if not job_id:
            return None
        self._check_complete()
        job = self._store.get(current_owner(), job_id)
        if job is not None and job.request.digest != digest:
            raise AlreadyExistsError(f"there is a job {job_id!r}, and another request made it")
        return job

    def go_on(self, job: Job, model: ServedModel) -> None:
        """Has a job that its caller left, or that failed, go on from the output that it has, with the same model.

        Raises the errors of `check_quota` and `check_room`.
        """
        begins = [sample.spec for sample in job.samples if not sample.is_whole]
        others = ((sample, other) for sample, other in self._alive.items() if other is not job)
        self._check_bounds(job.owner, begins, others)
        for sample in job.samples:
            self._link.drop(sample)
            self._alive.pop(sample, None)
        # Under its old number, the journal may have output that was not taken in.
        old_number = job.number
        begun = job.go_on(next(self._numbers), model.vocabulary)
        self.journal.accept(job)
        self.journal.forget(old_number)
        self._store.add(job)
        self._begin(job, begun)

    def create(self, request: CheckedRequest, model: ServedModel, before: Job | None = None) -> Job:
        """Makes the job of a request, in place of the job `before` of the same id.

        Raises the errors of `check_quota` and `check_room`, and InvalidArgumentError for output of another server
        that goes on after a stop string.
        """
        owner = current_owner()
        self._check_bounds(owner, request.samples, self._alive.items())
        number = next(self._numbers)
        attempt = max(number, 0 if before is None else before.attempt + 1)
        job = Job(request, model, number=number, attempt=attempt, owner=owner)
        self._store.add(job)
        self.journal.accept(job)
        self._begin(job, job.unfinished)
        return job

    def _begin(self, job: Job, samples: Sequence[Sample]) -> None:
        """Submits the samples of a job that are not over; without any, the job ends now."""
        self._alive |= dict.fromkeys(samples, job)
        self._link.add(*samples)
        if samples:
            self._is_idle.clear()
        else:
            self._update([job], time.monotonic())

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused because the queue is full or closed."""
        try:
            yield
        except SlipstreamError:
            self._metrics.lost(REFUSED)
            raise

    def check_room(self, num_samples: int = 1) -> None:
        """Raises the error that `create` would raise because the queue is full or closed."""
        with self.counting_refusals():
            self._link.check_room(num_samples)

    def _check_bounds(self, owner: str, samples: Sequence[SequenceSpec], alive: Iterable[tuple[Sample, Job]]) -> None:
        """Raises the error for samples that its owner, or the queue, has no room for beside those `alive`."""
        check_quota(self._key_tokens, owner, samples, alive)
        self.check_room(len(samples))

    def get(self, job_id: str) -> Job:
        """Returns the job of this id. Raises NotFoundError, and UnavailableError until jobs are restored."""
        self._check_complete()
        job = self._store.get(current_owner(), job_id)
        if job is None:
            raise NotFoundError(f"there is no job {job_id!r}, or it ended too long ago")
        return job

    def latest(self, count: int, before: int = 0) -> list[Job]:
        """Returns the caller's latest jobs, at most `count`, with numbers below `before`, unless that is 0."""
        self._check_complete()
        return self._store.latest(current_owner(), count, before)

    def cancel(self, job_id: str) -> None:
        """Cancels a job; its streams then end with the reason "abort". No effect if it is over.

        Raises NotFoundError.
        """
        job = self.get(job_id)
        if not job.is_over and not job.is_cancelled:
            job.is_cancelled = True
            self.journal.accept(job)
            self._cancel(job)

    def detach(self, job: Job) -> None:
        """Lets a job go on without a caller. No effect if it is over."""
        if not job.is_over and not job.is_detached:
            job.is_detached = True
            self.journal.accept(job)

    def reader(
        self, job: Job, from_tokens: Sequence[int] = (), *, field: str = "from_token", attempt: int = 0
    ) -> JobReader:
        """Returns a reader of a job's output from a token of each sample on. See `JobReader`.

        Raises FailedPreconditionError if the tokens before that are of another `attempt`; 0 is any.
        """
        if attempt not in (0, job.attempt):
            message = f"attempt: got {attempt}, but job {job.job_id!r} began anew, as attempt {job.attempt}"
            raise FailedPreconditionError(message)
        return JobReader(
            job,
            from_tokens,
            self._metrics,
            self.turns,
            on_broken=partial(self._break, job),
            field=field,
            interval_s=self._stream_interval_s(),
        )

    def enter(self, job: Job) -> None:
        """Called when a Generate call begins."""
        job.num_callers += 1

    def leave(self, job: Job, time_left_s: float | None) -> None:
        """Called when a Generate call ends, `time_left_s` before its deadline. Cancels the job if no caller remains."""
        job.num_callers -= 1
        if job.is_over or job.error is not None or job.is_cancelled or job.is_detached or job.num_callers:
            return
        is_late = time_left_s is not None and time_left_s <= DEADLINE_SLACK_S
        job.left_as = DEADLINE if is_late else DISCONNECTED
        self._cancel(job)

    def deliver(self, step: StepOutput) -> None:
        self.journal.take_in(step, self._link.running, partial(self._apply, step))

    def end(self, sample: Sample, reason: FinishReason | None = None, error: SlipstreamError | None = None) -> None:
        self.journal.after(partial(self._end, sample, sample.key, reason, error))

    async def settled(self) -> None:
        with suppress(SlipstreamError):
            await self.journal.flush()

    def _end(self, sample: Sample, key: int, reason: FinishReason | None, error: SlipstreamError | None) -> None:
        if sample.key != key:
            return  # it has begun again
        self._link.release(sample)
        job = self._alive.pop(sample, None)
        if job is None:
            return
        sample.end(reason, error)
        if sample.error is not None:
            # A job fails with any of its samples.
            self._cancel(job)
        self._update([job], time.monotonic())

    def _apply(self, step: StepOutput) -> None:
        """Adds the output of a step to its jobs, and wakes their readers."""
        running, alive = self._link.running, self._alive
        tokens, num_draft_tokens, published_ns = step.tokens, step.num_draft_tokens, step.published_ns
        logprobs, is_beyond = step.logprobs, step.is_beyond_draft or [False] * len(step.sequences)
        changed: dict[Job, None] = {}
        end = 0
        for number, num_tokens, num_accepted, reason, is_beyond_draft in zip(
            step.sequences, step.num_tokens, step.num_accepted, step.finish_reasons, is_beyond, strict=True
        ):
            start, end = end, end + num_tokens
            sample = running.get(number)
            if sample is None:
                continue
            job = alive.get(sample)
            if job is not None:
                changed[job] = None
                try:
                    if sample.add(
                        tokens[start:end],
                        num_accepted,
                        logprobs.get(number, ()) if logprobs else (),
                        reason,
                        num_draft_tokens=num_draft_tokens,
                        published_ns=published_ns,
                        is_beyond_draft=is_beyond_draft,
                    ):
                        self._link.cancel(sample)
                except Exception:
                    # Output that cannot be turned into text fails its own job, no other.
                    logger.exception("the output of a step cannot be taken in", extra={"job": job.job_id})
                    sample.end(None, InternalError(BROKEN_OUTPUT))
                    self._cancel(job)
                if sample.is_over:
                    del alive[sample]
            if reason is not None:
                self._link.release(sample)
        self._update(changed, published_ns / 1e9)

    def _update(self, changed: Iterable[Job], now: float) -> None:
        """Called with jobs that got output or whose samples ended, `now` in seconds of `time.monotonic`."""
        num_tokens = 0
        for job in changed:
            num_tokens += job.update(self._metrics, now, self.turns)
            if job.is_over:
                self.journal.save(job)
                self._store.end(job)
                _log_end(job, self._level)
        self.num_generated += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)
        if not self._alive:
            self._is_idle.set()

    def _break(self, job: Job, error: Exception) -> None:
        """Fails a job whose output cannot be read."""
        if job.error is None:
            logger.error("the output cannot be read", exc_info=error, extra={"job": job.job_id})
            job.fail(InternalError(BROKEN_OUTPUT))
            self._cancel(job)

    def _check_complete(self) -> None:
        if not self._is_complete:
            message = "the jobs from before the server's start are back when the scheduler is"
            raise UnavailableError(message, retry_after_ms=RETRY_AFTER_MS)

    def _cancel_without_callers(self, jobs: Iterable[Job]) -> None:
        """Cancels the jobs for which no caller has called again."""
        for job in jobs:
            if not (job.is_over or job.is_detached or job.num_callers):
                job.left_as = DISCONNECTED
                self._cancel(job)

    def _fail_all(self, error: SlipstreamError) -> None:
        """Ends all that is alive: its last output is not in the journal."""
        # Some are of no job any more, and wait for an end that may be lost as well.
        for sample in self._link.samples:
            self._link.cancel(sample)
            self._end(sample, sample.key, None, error)

    def _cancel(self, job: Job) -> None:
        for sample in job.samples:
            self._link.cancel(sample)


def _log_end(job: Job, level: int) -> None:
    if job.error is not None:
        logger.warning("failed: %s", job.error, extra={"job": job.job_id})
    elif logger.isEnabledFor(level) and (usage := job.usage) is not None:
        how = job.left_as or job.finish_reason
        line = (
            "ended (%s): %d prompt tokens, %d cached, %d generated; %.3f s waiting, %.3f s to the first, %.3f s in all"
        )
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        times = (usage.queue_seconds, usage.time_to_first_token_seconds, usage.end_to_end_seconds)
        logger.log(level, line, how, *tokens, *times, extra={"job": job.job_id})
