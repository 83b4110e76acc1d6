"""One watcher's way through a job's output."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.common.errors import DeadlineExceededError, InvalidArgumentError
from slipstream.gateway.job_output import MAX_CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.gateway.job import Job


class JobReader:
    """Reads every sample of a job from a token on, up to its end. Belongs to the event loop."""

    def __init__(self, kept: Job, from_tokens: Sequence[int], *, field: str) -> None:
        """`from_tokens`: for each sample, 0 for those behind the last; `field` is what a client calls them.

        Raises InvalidArgumentError for a token beyond those that there are, and for a sample that there is not.
        """
        samples = kept.samples
        if len(from_tokens) > len(samples):
            raise InvalidArgumentError(field, f"{len(from_tokens)} numbers", f"at most {len(samples)}, one a sample")
        for index, (offset, sample) in enumerate(zip(from_tokens, samples, strict=False)):
            if offset > sample.output.num_tokens:
                name = field if len(from_tokens) == 1 else f"{field}[{index}]"
                accepted = f"0 to {sample.output.num_tokens}, the tokens that there are"
                raise InvalidArgumentError(name, offset, accepted)
        self._kept = kept
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
        chunk = self._kept.samples[index].output.read(self._offsets[index])
        if chunk is None:
            return None
        self._offsets[index] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._unfinished.remove(index)
        return chunk if self._unfinished else replace(chunk, job_usage=self._kept.usage)

    async def _spell_what_is_known(self) -> None:
        """A job that nobody has watched yet has its text to be made, which takes time."""
        for sample, offset in zip(self._kept.samples, self._offsets, strict=True):
            output = sample.output
            while output.num_spelled < offset:
                output.spell(min(offset, output.num_spelled + MAX_CHUNK_TOKENS))
                await asyncio.sleep(0)

    async def _wait(self) -> None:
        kept = self._kept
        if kept.error is not None:
            # The same one may end other calls, too.
            raise kept.error.with_traceback(None)
        if self._is_late:
            raise DeadlineExceededError(f"job {kept.job_id!r} had {kept.num_tokens} tokens at the call's deadline")
        self._wake = self._loop.create_future()
        await kept.wait_for_change(self._wake)

    @contextmanager
    def _deadline(self, timeout_s: float | None) -> Iterator[None]:
        """One timer, however often the reader waits."""
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
