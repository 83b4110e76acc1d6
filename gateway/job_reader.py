"""Reads a job's output for one call."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.common.errors import DeadlineExceededError, InternalError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.common.rpc.loop_turns import LoopTurns
    from slipstream.gateway.job import Job
    from slipstream.gateway.request_metrics import RequestMetrics
    from slipstream.gateway.sample_output import SampleOutput

    Write = Callable[[OutputChunk | bytes], Awaitable[None]]

BROKEN_OUTPUT = "the output could not be taken in; the server's log has more"


class JobReader:
    """Reads every sample of a job from a token on, up to its end. Belongs to the event loop."""

    def __init__(
        self,
        job: Job,
        from_tokens: Sequence[int],
        metrics: RequestMetrics,
        turns: LoopTurns,
        *,
        on_broken: Callable[[Exception], None],
        field: str = "from_token",
        interval_s: float = 0.0,
    ) -> None:
        """`from_tokens`: an offset for each sample, 0 for samples without one; `field` is its name on the wire.

        `interval_s`: least time between two chunks, first tokens and ends excepted. `on_broken` is called with the
        error if the output cannot be turned into text. Raises InvalidArgumentError for an offset beyond the output, and
        for a sample that does not exist.
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
        self._metrics = metrics
        self._turns = turns
        self._on_broken = on_broken
        self._interval_s = interval_s
        self._offsets = [*from_tokens, *(0 for _ in samples[len(from_tokens) :])]
        self._steps = [0 for _ in samples]
        """For each sample, the steps whose output was read."""
        self._unfinished = list(range(len(samples)))
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._is_late = False
        self._is_live = False
        """True once all that there was is read."""
        self._sent_at = 0.0

    async def send(self, write: Write, *, takes_bytes: bool = False, timeout_s: float | None = None) -> None:
        """Calls `write` with each chunk as the output comes, and returns after the last one.

        With `takes_bytes`, most chunks of plain text are encoded messages. Raises DeadlineExceededError when
        `timeout_s` is over, the error that ends the job, and InternalError if the output is broken.
        """
        with self._deadline(timeout_s):
            await self._detokenize_up_to_offsets()
            while self._unfinished:
                has_read = False
                for index in tuple(self._unfinished):
                    sample = self._job.samples[index]
                    output = sample.output
                    # A reader that has sent all there is goes to wait at once, without a turn for it.
                    if not output.can_read(self._offsets[index]):
                        continue
                    if not self._turns.has_time():
                        await self._turns.begin()
                    chunk = self._read_next(output, index, takes_bytes)
                    if chunk is not None:
                        has_read = True
                        await write(chunk)
                        if sample.stats.first_sent_at is None and self._offsets[index]:
                            sample.stats.first_sent_at = time.monotonic()
                if not has_read:
                    await self._wait()
                elif self._interval_s and self._unfinished and not self._has_end():
                    await self._wait_for_turn()

    def _read_next(self, output: SampleOutput, index: int, takes_bytes: bool) -> OutputChunk | bytes | None:
        try:
            if takes_bytes:
                encoded = output.read_encoded(self._offsets[index])
                if encoded is not None:
                    self._advance(output, index, len(output.token_ids))
                    return encoded
            return self._read(output, index)
        except Exception as error:
            # Without stop strings, tokens become text with their first reader.
            self._on_broken(error)
            raise InternalError(BROKEN_OUTPUT) from error

    def _read(self, output: SampleOutput, index: int) -> OutputChunk | None:
        """The next chunk of a sample, if it has one."""
        chunk = output.read(self._offsets[index])
        if chunk is None:
            return None
        if chunk.token_ids:
            self._advance(output, index, self._offsets[index] + len(chunk.token_ids))
        if chunk.finish_reason is not None:
            self._unfinished.remove(index)
            if not self._unfinished:
                return replace(chunk, job_usage=self._job.usage)
        return chunk

    def _advance(self, output: SampleOutput, index: int, offset: int) -> None:
        if self._is_live:
            self._measure(output, index)
        self._steps[index] = output.num_steps
        self._offsets[index] = offset

    def _measure(self, output: SampleOutput, index: int) -> None:
        """Measures a chunk that is sent while the job runs."""
        now = time.monotonic()
        self._metrics.publish_to_send.observe(now - output.published_ns / 1e9)
        is_behind = output.published_before_ns / 1e9 >= self._sent_at + self._interval_s
        if output.num_steps - self._steps[index] > 1 and (is_behind or not self._interval_s):
            self._metrics.coalesced.inc()
        self._sent_at = now

    async def _detokenize_up_to_offsets(self) -> None:
        """Detokenizes what is before the offsets bit by bit, so that the event loop serves other calls in between."""
        for sample, offset in zip(self._job.samples, self._offsets, strict=True):
            await sample.output.detokenize_in_turns(offset)

    async def _wait(self) -> None:
        job = self._job
        if job.error is not None:
            raise job.error.again()
        if self._is_late:
            raise DeadlineExceededError(f"job {job.job_id!r} had {job.num_tokens} tokens at the call's deadline")
        self._is_live = True
        self._wake = self._loop.create_future()
        await job.wait_for_change(self._wake)

    def _has_end(self) -> bool:
        """True if the end of a sample is there to be read."""
        return any(self._job.samples[index].usage is not None for index in self._unfinished)

    async def _wait_for_turn(self) -> None:
        """Waits until the next chunk may be sent."""
        self._wake = self._loop.create_future()
        timer = self._loop.call_later(self._interval_s, _set, self._wake)
        try:
            await self._job.wait_for_change(self._wake, is_urgent=False)
        finally:
            timer.cancel()

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
        if self._wake is not None:
            _set(self._wake)


def _set(wake: asyncio.Future[None]) -> None:
    if not wake.done():
        wake.set_result(None)
