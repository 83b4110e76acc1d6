"""Clients of the Python library that stream jobs without a pause, and what each of them saw."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from slipstream.client import AsyncClient
from slipstream.common.idle_collection import IdleCollection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from slipstream.client.requests import RequestOptions

FLOW_S = 0.1
"""Messages that a client gets so soon after a fault were under way before it."""
FLOW_TIMEOUT_S = 120.0


def in_ms(seconds: float) -> float:
    """Milliseconds, as results have them."""
    return round(1e3 * seconds, 1)


class Message(NamedTuple):
    """A message of a job, as its client got it."""

    at: float
    """By the monotonic clock."""
    is_draft: tuple[bool, ...]
    """For each of its tokens, whether it was an accepted draft token; the others are one for each step."""


@dataclass(slots=True)
class JobLog:
    """The messages of a job."""

    messages: list[Message] = field(default_factory=list)
    is_over: bool = False

    @property
    def is_draft(self) -> list[bool]:
        """`Message.is_draft` of all its tokens."""
        return [flag for message in self.messages for flag in message.is_draft]


@dataclass(slots=True)
class Stream:
    """A client, and its jobs, the newest last. All of them ask for the same."""

    index: int
    jobs: list[JobLog] = field(default_factory=list)
    expected: tuple[int, ...] | None = None
    """Tokens of the undisturbed run."""

    @property
    def last_token_at(self) -> float:
        """Time of its newest token; 0 before the first."""
        return max((job.messages[-1].at for job in self.jobs[-2:] if job.messages), default=0.0)


class Streams:
    """Clients of one server: half of them with Generate, half with CreateJob and WatchJob, half greedy, half sampled.

    The tokens of each job are compared with those of the client's first one, which nothing disturbs.
    """

    def __init__(self, address: str, num_clients: int, max_new_tokens: int, *, compares: bool = True) -> None:
        """`compares`: False where tokens depend on the batch."""
        self._address = address
        self._max_new_tokens = max_new_tokens
        self._compares = compares
        self._is_over = False
        self._news = asyncio.Event()
        self.streams = [Stream(index) for index in range(num_clients)]
        self.num_jobs = 0
        """Jobs that ended with the tokens of the undisturbed run."""
        self.errors: list[str] = []
        """Errors that clients saw, and jobs with other tokens."""

    async def reference(self) -> None:
        """Runs one job of each client, all at the same time: their tokens are what every later job must have."""
        async with AsyncClient(self._address) as client:
            jobs = (self._tokens(client, stream, f"undisturbed-{stream.index}") for stream in self.streams)
            for stream, tokens in zip(self.streams, await asyncio.gather(*jobs), strict=True):
                stream.expected = tokens

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All clients stream while the context lasts; it ends when their last jobs have ended.

        Meanwhile Python looks only at young objects for garbage: a look at all of them would hold up all clients.
        """
        self._is_over = False
        with IdleCollection(keeps_young=True).in_charge():
            async with asyncio.TaskGroup() as group:
                for stream in self.streams:
                    group.create_task(self._follow(stream))
                try:
                    yield
                finally:
                    self._is_over = True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the clients' logs meet a condition, or a client has seen an error. Raises TimeoutError."""
        async with asyncio.timeout(FLOW_TIMEOUT_S):
            while not condition() and not self.errors:
                self._news.clear()
                await self._news.wait()

    async def flow(self, since: float) -> None:
        """Waits as `until` does, until each client has a token that arrived after `since`."""
        await self.until(lambda: all(stream.last_token_at > since + FLOW_S for stream in self.streams))

    def longest_gaps(self, start: float, end: float, *, begun_after: float = 0.0) -> list[float]:
        """Returns, of each stream, the longest time between two messages of a job that overlaps [start, end].

        A stream without such a gap has none here. The time to a job's first token does not count, nor do gaps that
        began before `begun_after`.
        """
        gaps = [
            [
                after.at - before.at
                for job in stream.jobs
                for before, after in pairwise(job.messages)
                if after.at > start and begun_after <= before.at < end
            ]
            for stream in self.streams
        ]
        return [max(found) for found in gaps if found]

    async def settle(self) -> None:
        """Drops the logs of jobs that are over, and waits until each client has new tokens.

        What this process works out from the logs holds up all of its clients: gaps from here on are the server's.
        Raises TimeoutError.
        """
        for stream in self.streams:
            stream.jobs = stream.jobs[-1:]
        await self.flow(time.monotonic())

    async def _follow(self, stream: Stream) -> None:
        async with AsyncClient(self._address) as client:
            while not self._is_over and not self.errors:
                name = f"client-{stream.index}-{time.monotonic_ns()}"
                try:
                    tokens = await self._tokens(client, stream, name)
                    if self._compares and tokens != stream.expected:
                        self.errors.append(f"{name}: other tokens than without a fault")
                    self.num_jobs += not self.errors
                except Exception as error:
                    self.errors.append(f"{name}: {error!r}")
                self._news.set()

    async def _tokens(self, client: AsyncClient, stream: Stream, job_id: str) -> tuple[int, ...]:
        log, prompt = JobLog(), f"Chapter {stream.index}. In the beginning"
        stream.jobs.append(log)
        options: RequestOptions = {"max_new_tokens": self._max_new_tokens, "seed": 7, "ignore_eos": True}
        options |= {"temperature": 0.8 * (stream.index % 2)}
        if stream.index % 4 >= 2:
            await client.create_job(prompt, job_id=job_id, **options)
            chunks = client.watch_job(job_id)
        else:
            chunks = client.generate(prompt, job_id=job_id, **options)
        tokens: list[int] = []
        async for chunk in chunks:
            if chunk.token_ids:
                log.messages.append(Message(time.monotonic(), chunk.is_draft))
                self._news.set()
                tokens += chunk.token_ids
        log.is_over = True
        return tuple(tokens)
