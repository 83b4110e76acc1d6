"""A client's job with its samples, and the jobs that a gateway keeps."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from slipstream.common.wire.job import AbortCause, FinishReason, JobInfo, JobState, Usage
from slipstream.gateway.metrics import FAILED, RequestTimes
from slipstream.gateway.sample import Sample

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from slipstream.common.errors import SlipstreamError
    from slipstream.common.rpc.loop_turns import LoopTurns
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.request import CheckedRequest
    from slipstream.gateway.text import Vocabulary


_JOB_BYTES = 4096
_STRONGEST_FIRST = (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Job:
    """A client's request, from its creation until it is forgotten. Belongs to the event loop."""

    def __init__(
        self,
        request: CheckedRequest,
        model: ServedModel,
        *,
        number: int,
        attempt: int,
        created_at: datetime | None = None,
        arrived_at: float | None = None,
        owner: str = "",
    ) -> None:
        """`number` grows from job to job, `attempt` with each job of the same name.

        `created_at`, and `arrived_at` by `time.monotonic`, are now if they are not given. `owner` is the API key that
        it was made with.
        """
        self.request = request
        self.job_id = request.job_id
        self.owner = owner
        self.number = number
        self.num_prompt_tokens = len(request.samples[0].prompt)
        self.attempt = attempt
        self.model_identity = model.identity
        self.times = RequestTimes()
        self.created_at = created_at or datetime.now(UTC)
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        new_sample = partial(Sample, request, number=number, attempt=attempt, arrived_at=arrived_at, times=self.times)
        vocabulary = model.vocabulary.for_output(shows_special=request.shows_special)
        self.samples = tuple(new_sample(vocabulary, index=index) for index in range(len(request.samples)))
        self.num_callers = 0
        """Open Generate calls; the job is cancelled with the last of them, unless it is detached."""
        self.is_detached = False
        """True if the job goes on without a caller."""
        self.left_as: str | None = None
        """An outcome of `RequestMetrics`, if the job was cancelled because its last caller left."""
        self.is_cancelled = False
        """True once a client cancelled it."""
        self.is_over = False
        """True if there will be no more tokens."""
        self.failure: SlipstreamError | None = None
        """Set if it failed as a whole."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        """Set when there is more to read, in the order in which readers added them, who take them out again."""
        self.waiting_for_turn: dict[asyncio.Future[None], None] = {}
        """The same of readers to whom only the first token and the end of a sample are urgent."""
        self._arrived_at = arrived_at
        self._has_started = False
        self._num_over = 0

    @property
    def unfinished(self) -> tuple[Sample, ...]:
        """The samples that are not over."""
        return tuple(sample for sample in self.samples if not sample.is_over)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all samples together."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def _has_tokens(self) -> bool:
        """True once this server generated a token."""
        return any(sample.num_new_tokens for sample in self.samples)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly."""
        request = _JOB_BYTES + 8 * self.num_prompt_tokens + len(self.request.samples[0].grammar)
        return request + sum(sample.num_bytes for sample in self.samples)

    @property
    def error(self) -> SlipstreamError | None:
        """The reason why the job could not go on."""
        if self.failure is not None:
            return self.failure
        return next((sample.error for sample in self.samples if sample.error is not None), None)

    @property
    def can_go_on(self) -> bool:
        """True if the same request would run on: its caller went away, or the job failed. Not if it was cancelled."""
        return self.error is not None or (self.left_as is not None and not self.is_cancelled)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end; None while a sample goes on, and if one has failed."""
        if self.error is not None:
            return None
        reasons = {sample.finish_reason for sample in self.samples}
        return None if None in reasons else next(reason for reason in _STRONGEST_FIRST if reason in reasons)

    @property
    def abort_cause(self) -> AbortCause:
        """Who had it cancelled, where its finish reason, or that of a sample, is ABORT."""
        return AbortCause(self.left_as or AbortCause.CANCELLED)

    @property
    def usage(self) -> Usage | None:
        """Tokens, drafts and times of all samples; None while one goes on."""
        usages = [sample.usage for sample in self.samples if sample.usage is not None]
        return Usage.together(usages) if len(usages) == len(self.samples) else None

    def fail(self, error: SlipstreamError) -> None:
        """Fails the job unless it is over; the caller cancels its sequences."""
        if not self.is_over:
            self.failure = error

    async def forget_tokenizer(self) -> None:
        """Detokenizes the rest and drops the tokenizer. Called when its model is not served any more."""
        for sample in self.samples:
            await sample.forget_tokenizer()

    def settle(self) -> None:
        """Called when all of its output was read from the journal."""
        for sample in self.samples:
            sample.settle()
        self._has_started = self._has_tokens
        self.is_over = not self.unfinished

    def go_on(self, number: int, vocabulary: Vocabulary) -> list[Sample]:
        """Begins again from the output kept, under a new number. Returns the samples that are not whole."""
        self.number = number
        self.left_as = self.failure = None
        self.is_over = self.is_cancelled = False
        vocabulary = vocabulary.for_output(shows_special=self.request.shows_special)
        begun = [sample for sample in self.samples if sample.go_on(vocabulary, number)]
        if self.error is None:
            return begun
        # What a sample has cannot become text: a job fails with any of its samples.
        for sample in begun:
            sample.end(FinishReason.ABORT)
        return []

    def update(self, metrics: RequestMetrics, now: float, turns: LoopTurns) -> int:
        """Measures the tokens added since the last call, and returns their number; ends the job with its last sample.

        Wakes the readers in turns. `now` is in seconds of `time.monotonic`. Called until the job is over, not after.
        """
        is_urgent = not self._has_started and self._has_tokens
        if is_urgent:
            self._has_started = True
            self._measure_start(metrics, now)
        num_new = sum(sample.measure(metrics, now) for sample in self.samples)
        num_over = sum(sample.is_over for sample in self.samples)
        is_urgent = is_urgent or num_over != self._num_over
        self._num_over = num_over
        if num_over == len(self.samples):
            self.is_over = True
            reason = self.finish_reason
            if self.left_as is None and reason is not None:
                metrics.finished(reason, now - self._arrived_at)
            else:
                metrics.lost(self.left_as or FAILED)
        # Each is woken once, and soon, but a thousand of them not in one turn of the event loop.
        waiting, self.waiting = self.waiting, {}
        turns.wake(waiting)
        if is_urgent:
            waiting, self.waiting_for_turn = self.waiting_for_turn, {}
            turns.wake(waiting)
        return num_new

    def info(self) -> JobInfo:
        """Returns the job as it is now."""
        state = JobState.ENDED
        if not self.is_over:
            is_waiting = all(sample.admitted_at is None and not sample.is_over for sample in self.samples)
            state = JobState.WAITING if is_waiting else JobState.RUNNING
        return JobInfo(
            job_id=self.job_id,
            state=state,
            created_at=self.created_at,
            num_tokens=self.num_tokens,
            finish_reason=self.finish_reason,
            error="" if self.error is None else str(self.error),
            usage=self.usage,
            samples=tuple(sample.info() for sample in self.samples),
            attempt=self.attempt,
            abort_cause=self.abort_cause if self.finish_reason is FinishReason.ABORT else None,
        )

    def _measure_start(self, metrics: RequestMetrics, now: float) -> None:
        admitted_at = min(sample.admitted_at or now for sample in self.samples)
        first_token_at = min(sample.first_token_at or now for sample in self.samples)
        metrics.started(
            prompt_tokens=self.num_prompt_tokens,
            queue_seconds=max(0.0, admitted_at - self._arrived_at),
            first_token_seconds=max(0.0, first_token_at - self._arrived_at),
        )


class JobStore:
    """Jobs by owner and id, in memory. Ended ones are bounded by age, number and bytes.

    An owner knows of no job of another: both may use the same id.
    """

    def __init__(
        self,
        *,
        capacity: int,
        ttl_s: float,
        max_bytes: int = 2**30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps `capacity` jobs at most after their end, each for `ttl_s` seconds of `clock`.

        Together they take `max_bytes` of memory at most; the job that ended first is forgotten first.
        """
        self.on_forget: Callable[[Job], None] = lambda _: None
        """Called with each job that is not kept any longer."""
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._jobs: dict[tuple[str, str], Job] = {}
        self._ended: dict[Job, tuple[float, int]] = {}
        """When each of them is forgotten, and its bytes; the job that ended first is the first."""
        self._ended_bytes = 0

    def __len__(self) -> int:
        self._forget()
        return len(self._jobs)

    def jobs(self) -> Iterable[Job]:
        """Returns all jobs that are kept, the earliest first."""
        return self._jobs.values()

    def add(self, job: Job) -> None:
        """Adds a job that begins, in place of its owner's job of the same id."""
        before = self._jobs.pop((job.owner, job.job_id), None)
        if before is not None:
            self._take_from_ended(before)
            if before is not job:
                self.on_forget(before)
        self._jobs[job.owner, job.job_id] = job

    def end(self, job: Job) -> None:
        """Starts the time after which a job that is over is forgotten."""
        if self._jobs.get((job.owner, job.job_id)) is not job:
            return
        self._take_from_ended(job)
        self._ended[job] = self._clock() + self._ttl_s, job.num_bytes
        self._ended_bytes += job.num_bytes
        self._forget()

    def get(self, owner: str, job_id: str) -> Job | None:
        """Returns the owner's job of this id; None if there is none, or no more."""
        self._forget()
        return self._jobs.get((owner, job_id))

    def latest(self, owner: str, count: int, before: int = 0) -> list[Job]:
        """Returns the owner's latest jobs, at most `count`, with numbers below `before`, unless that is 0."""
        self._forget()
        earlier = (job for job in reversed(self._jobs.values()) if not before or job.number < before)
        return list(islice((job for job in earlier if job.owner == owner), count))

    def _forget(self) -> None:
        now = self._clock()
        while self._ended:
            job, (until, _) = next(iter(self._ended.items()))
            if len(self._ended) <= self._capacity and until > now and self._ended_bytes <= self._max_bytes:
                return
            self._take_from_ended(job)
            del self._jobs[job.owner, job.job_id]
            self.on_forget(job)

    def _take_from_ended(self, job: Job) -> None:
        _, num_bytes = self._ended.pop(job, (0.0, 0))
        self._ended_bytes -= num_bytes
