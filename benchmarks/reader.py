"""Follows one stream and notes when its tokens come."""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from slipstream.client import AsyncClient

WARM_TOKENS = 32
TIMEOUT_S = 60.0


class Reader:
    """The messages of a stream that goes on and on."""

    def __init__(self) -> None:
        self.times_s = array("d")
        """When each message with tokens came, in seconds of `time.monotonic`."""
        self.counts = array("I")
        """How many tokens were in it."""
        self._is_warm = asyncio.Event()
        self._came = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def reading(
        cls, client: AsyncClient, prompt: list[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> AsyncIterator[Reader]:
        """Reads for as long as the context, which begins when tokens flow. Raises what ends the stream before."""
        reader = cls()
        task = asyncio.create_task(reader._read(client, prompt, max_new_tokens, temperature, seed))
        warm = asyncio.create_task(reader._is_warm.wait())
        try:
            await asyncio.wait((task, warm), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not reader._is_warm.is_set():
                raise RuntimeError("the stream did not begin")
            yield reader
            if task.done():
                task.result()
                raise RuntimeError("the stream ended before the measurement did")
        finally:
            for each in (task, warm):
                each.cancel()
            await asyncio.gather(task, warm, return_exceptions=True)

    def gaps_within(self, start_s: float, end_s: float) -> Iterator[tuple[float, int]]:
        """For each message that came in this time, as did the one before: seconds since then, and its tokens."""
        return ((at - before, count) for before, at, count in self._messages() if start_s <= before and at < end_s)

    def gaps_across(self, start_s: float, end_s: float) -> Iterator[tuple[float, int]]:
        """For each message that was waited for in some of this time: seconds since the one before, and its tokens."""
        return ((at - before, count) for before, at, count in self._messages() if start_s <= at and before < end_s)

    async def next_message(self) -> None:
        """Returns when another message has come. Raises TimeoutError."""
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), TIMEOUT_S)

    def _messages(self) -> Iterator[tuple[float, float, int]]:
        return zip(self.times_s, self.times_s[1:], self.counts[1:], strict=False)

    async def _read(
        self, client: AsyncClient, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
    ) -> None:
        chunks = client.generate(
            prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True
        )
        num_tokens = 0
        async for chunk in chunks:
            self.times_s.append(time.monotonic())
            self.counts.append(len(chunk.token_ids))
            self._came.set()
            num_tokens += len(chunk.token_ids)
            if num_tokens >= WARM_TOKENS:
                self._is_warm.set()
