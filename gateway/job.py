"""A client's job, its samples, and the readers that follow it."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from slipstream.common.api.job_info import JobInfo, JobState
from slipstream.common.api.output_chunk import FinishReason, Usage
from slipstream.common.errors import DeadlineExceededError, InvalidArgumentError
from slipstream.gateway.request_metrics import FAILED
from slipstream.gateway.sample import MAX_CHUNK_TOKENS, Sample, SampleOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.common.api.sequence import SubmittedSequence
    from slipstream.common.errors import SlipstreamError
    from slipstream.gateway.detokenizer import Detokenizer
    from slipstream.gateway.request_metrics import RequestMetrics
    from slipstream.gateway.validation import CheckedRequest

_STRONGEST_FIRST = (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Job:
    """A client's request, from its creation until it is forgotten. Belongs to the event loop."""

    def __init__(
        self,
        request: CheckedRequest,
        sequences: Iterable[SubmittedSequence],
        new_detokenizer: Callable[[], Detokenizer],
        *,
        number: int,
    ) -> None:
        """`sequences`: one for each sample. `number` grows from job to job."""
        self.job_id = request.job_id
        self.digest = request.digest
        self.number = number
        self.samples = tuple(
            Sample(sequence, SampleOutput(request, new_detokenizer(), sample_index=index))
            for index, sequence in enumerate(sequences)
        )
        self.num_callers = 0
        """Open Generate calls; the job is cancelled with the last of them, unless it is detached."""
        self.is_detached = False
        """True if the job goes on without a caller."""
        self.left_as: str | None = None
        """An outcome of `RequestMetrics`, if the job was cancelled because its last caller left."""
        self.is_over = False
        """True if there will be no more tokens."""
        self._created_at = datetime.now(UTC)
        self._arrived_at = time.monotonic()
        self._has_started = False
        self._failure: SlipstreamError | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def sequences(self) -> tuple[SubmittedSequence, ...]:
        """The sequences that are not over."""
        return tuple(sample.sequence for sample in self.samples if sample.sequence is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all samples together."""
        return sum(sample.output.num_tokens for sample in self.samples)

    @property
    def error(self) -> SlipstreamError | None:
        """The reason why the job could not go on."""
        if self._failure is not None:
            return self._failure
        for sample in self.samples:
            if sample.error is not None:
                return sample.error
        return None

    @property
    def can_be_repeated(self) -> bool:
        """True if the same request may run again: its caller went away, or the job failed."""
        return self.left_as is not None or self.error is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end; None while a sample goes on, and if one has failed."""
        if self.error is not None:
            return None
        reasons = {sample.output.finish_reason for sample in self.samples}
        return None if None in reasons else next(reason for reason in _STRONGEST_FIRST if reason in reasons)

    @property
    def usage(self) -> Usage | None:
        """Tokens, drafts and times of all samples; None while one goes on."""
        usages = [sample.usage for sample in self.samples if sample.usage is not None]
        return Usage.together(usages) if len(usages) == len(self.samples) else None

    def fail(self, error: SlipstreamError) -> None:
        """Fails the job unless it is over; the caller cancels its sequences."""
        if not self.is_over:
            self._failure = error

    async def wait_for_change(self, wake: asyncio.Future[None]) -> None:
        """Returns when there is more to read than at the call, or when `wake` is set otherwise."""
        self._waiting.add(wake)
        try:
            await wake
        finally:
            self._waiting.discard(wake)

    def measure(self, metrics: RequestMetrics, now: float) -> int:
        """Measures the tokens added since the last call, wakes the readers and returns the number of tokens.

        `now` is in seconds of `time.monotonic`. Called until the job is over, not after.
        """
        if not self._has_started and self.num_tokens:
            self._has_started = True
            self._measure_start(metrics, now)
        num_new, is_over = 0, True
        for sample in self.samples:
            num_new += sample.measure(metrics, now)
            is_over = is_over and sample.sequence is None
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
                sequence.stats.admitted_at is None for sequence in self.sequences
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
        sequences = self.sequences
        admitted_at = min((sequence.stats.admitted_at or now for sequence in sequences), default=now)
        first_token_at = min((sequence.stats.first_token_at or now for sequence in sequences), default=now)
        metrics.started(
            prompt_tokens=len(sequences[0].spec.prompt),
            queue_seconds=admitted_at - self._arrived_at,
            first_token_seconds=first_token_at - self._arrived_at,
        )


class JobReader:
    """Reads every sample of a job from a token on, up to its end. Belongs to the event loop."""

    def __init__(self, job: Job, from_tokens: Sequence[int], *, field: str) -> None:
        """`from_tokens`: an offset for each sample, 0 for samples without one; `field` is its name on the wire.

        Raises InvalidArgumentError for an offset beyond the output, and for a sample that does not exist.
        """
        samples = job.samples
        if len(from_tokens) > len(samples):
            raise InvalidArgumentError(field, f"{len(from_tokens)} numbers", f"at most {len(samples)}, one a sample")
        for index, (offset, sample) in enumerate(zip(from_tokens, samples, strict=False)):
            if offset > sample.output.num_tokens:
                name = field if len(from_tokens) == 1 else f"{field}[{index}]"
                accepted = f"0 to {sample.output.num_tokens}, the tokens that there are"
                raise InvalidArgumentError(name, offset, accepted)
        self._job = job
        self._offsets = [*from_tokens, *(0 for _ in samples[len(from_tokens) :])]
        self._unfinished = list(range(len(samples)))
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._is_late = False

    async def chunks(self, *, timeout_s: float | None = None) -> AsyncGenerator[OutputChunk, None]:
        """Yields the output as it comes.

        Raises DeadlineExceededError when `timeout_s` is over, and the error that ends the job.
        """
        with self._deadline(timeout_s):
            await self._spell_what_is_known()
            while self._unfinished:
                has_read = False
                for index in tuple(self._unfinished):
                    chunk = self._read(index)
                    if chunk is not None:
                        has_read = True
                        yield chunk
                if not has_read:
                    await self._wait()

    def _read(self, index: int) -> OutputChunk | None:
        """The next chunk of a sample, if it has one."""
        chunk = self._job.samples[index].output.read(self._offsets[index])
        if chunk is None:
            return None
        self._offsets[index] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._unfinished.remove(index)
        return chunk if self._unfinished else replace(chunk, job_usage=self._job.usage)

    async def _spell_what_is_known(self) -> None:
        """Spells the text before the offsets bit by bit, so that the event loop serves other calls in between."""
        for sample, offset in zip(self._job.samples, self._offsets, strict=True):
            output = sample.output
            while output.num_spelled < offset:
                output.spell(min(offset, output.num_spelled + MAX_CHUNK_TOKENS))
                await asyncio.sleep(0)

    async def _wait(self) -> None:
        job = self._job
        if job.error is not None:
            # The same error may end other calls, too.
            raise job.error.with_traceback(None)
        if self._is_late:
            raise DeadlineExceededError(f"job {job.job_id!r} had {job.num_tokens} tokens at the call's deadline")
        self._wake = self._loop.create_future()
        await job.wait_for_change(self._wake)

    @contextmanager
    def _deadline(self, timeout_s: float | None) -> Iterator[None]:
        """One timer for all waits of the reader."""
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._be_late)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _be_late(self) -> None:
        self._is_late = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
