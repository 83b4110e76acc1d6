"""Makes requests from a process of its own, and records their outcomes.

Open loop: requests are made at their times without waiting for earlier ones, and a latency counts from the time at
which a request should have been made. So neither a slow server nor a slow generator hides in the figures.
Closed loop: a number of clients, each of which makes its next request when its last one is answered.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING

from slipstream.client import AsyncClient
from slipstream.common.errors import ResourceExhaustedError, SlipstreamError
from slipstream.common.host import yield_to_streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slipstream.benchmarks.workload import Arrival, PlannedRequest

LEAD_S = 0.2
"""From the first connection to the start."""

COMPLETED = "completed"
REJECTED = "rejected"
FAILED = "failed"
LEFT = "left"
"""The run was over first."""


@dataclass(slots=True)
class RequestRecord:
    """The outcome of a request. Times in seconds from the start of the run."""

    intended_s: float
    """The time at which it should have been made."""
    sent_s: float
    """The time at which it was made."""
    wanted_tokens: int
    times_s: array[float] = field(default_factory=lambda: array("d"))
    """The arrival of each message with tokens."""
    counts: array[int] = field(default_factory=lambda: array("I"))
    """The number of tokens in it."""
    ended_s: float = 0.0
    outcome: str = LEFT
    retry_after_ms: int | None = None
    """The delay that a rejection asks for; None if it does not."""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All requests of a run."""

    records: list[RequestRecord]
    seconds: float
    """From the start to the due time of the last request."""
    cpu_s: float
    """CPU time of the generator."""
    wall_s: float
    """From the start to the end of the last request."""


async def open_loop(address: str, arrivals: Sequence[Arrival], seconds: float, drain_s: float) -> LoadRun:
    """Makes each request at its time, and at the end waits `drain_s` at most for those that still run."""
    return await _in_new_process(_open_loop, address, arrivals, seconds, drain_s)


async def closed_loop(address: str, requests: Sequence[PlannedRequest], num_clients: int, seconds: float) -> LoadRun:
    """Keeps clients busy until the time is over, when they leave; `requests` are repeated as needed."""
    return await _in_new_process(_closed_loop, address, requests, num_clients, seconds)


async def _in_new_process(run: object, *arguments: object) -> LoadRun:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, _in_this_process, run, arguments)


def _in_this_process(run: object, arguments: tuple[object, ...]) -> LoadRun:
    # The generator stands for clients on other machines: it must not take a core from a stream in mid-step.
    yield_to_streams()
    gc.collect()
    gc.freeze()
    gc.disable()
    result: LoadRun = asyncio.run(run(*arguments))  # type: ignore[operator]
    return result


async def _open_loop(address: str, arrivals: Sequence[Arrival], seconds: float, drain_s: float) -> LoadRun:
    async with AsyncClient(address) as client:
        clock = await _Clock.start(client)
        calls: list[asyncio.Task[None]] = []
        records: list[RequestRecord] = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, arrival.at_s - clock.now()))
            record = RequestRecord(arrival.at_s, clock.now(), arrival.request.max_new_tokens)
            records.append(record)
            calls.append(asyncio.create_task(_make(client, clock, arrival.request, record)))
        await asyncio.sleep(max(0.0, seconds - clock.now()))
        if calls:
            await asyncio.wait(calls, timeout=drain_s)
        await _leave(calls)
        return clock.run(records, seconds)


async def _closed_loop(address: str, requests: Sequence[PlannedRequest], num_clients: int, seconds: float) -> LoadRun:
    async with AsyncClient(address) as client:
        clock = await _Clock.start(client)
        records: list[RequestRecord] = []
        remaining = itertools.cycle(requests)
        clients = [asyncio.create_task(_client(client, clock, remaining, records, seconds)) for _ in range(num_clients)]
        await asyncio.wait(clients, timeout=max(0.0, seconds - clock.now()))
        await _leave(clients)
        return clock.run(records, seconds)


async def _client(
    client: AsyncClient,
    clock: _Clock,
    requests: Iterator[PlannedRequest],
    records: list[RequestRecord],
    seconds: float,
) -> None:
    while (now := clock.now()) < seconds:
        request = next(requests)
        record = RequestRecord(now, now, request.max_new_tokens)
        records.append(record)
        await _make(client, clock, request, record)
        if record.outcome == REJECTED:
            await asyncio.sleep((record.retry_after_ms or 0) / 1000)


async def _make(client: AsyncClient, clock: _Clock, request: PlannedRequest, record: RequestRecord) -> None:
    chunks = client.generate(
        request.prompt,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=True,
    )
    try:
        async for chunk in chunks:
            if chunk.token_ids:
                record.times_s.append(clock.now())
                record.counts.append(len(chunk.token_ids))
        record.outcome = COMPLETED if record.num_tokens == record.wanted_tokens else FAILED
    except ResourceExhaustedError as error:
        record.outcome = REJECTED
        # A rejection without a RetryInfo reads as 0.
        record.retry_after_ms = error.retry_after_ms or None
    except SlipstreamError as error:
        record.outcome, record.error = FAILED, repr(error)
    finally:
        record.ended_s = clock.now()


async def _leave(calls: list[asyncio.Task[None]]) -> None:
    for call in calls:
        call.cancel()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


class _Clock:
    """Seconds since the start of a run."""

    def __init__(self, start_at: float) -> None:
        self._start_at = start_at
        self._cpu_s = time.process_time()

    @classmethod
    async def start(cls, client: AsyncClient) -> _Clock:
        """Connects first; the run starts LEAD_S later."""
        await client.server_info()
        clock = cls(time.monotonic() + LEAD_S)
        await asyncio.sleep(LEAD_S)
        return clock

    def now(self) -> float:
        """Below 0 before the start."""
        return time.monotonic() - self._start_at

    def run(self, records: list[RequestRecord], seconds: float) -> LoadRun:
        """The run that ends now."""
        return LoadRun(records, seconds, time.process_time() - self._cpu_s, self.now())
