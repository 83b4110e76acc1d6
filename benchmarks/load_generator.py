"""Makes requests from processes of its own, and records their outcomes.

Open loop: requests are made at their times without waiting for earlier ones, and a latency counts from the time at
which a request should have been made. So neither a slow server nor a slow generator hides in the figures.
Closed loop: a number of clients, each of which makes its next request when its last one is answered.

A process takes turns among its streams, so a fast server needs several: the processes share the requests of a run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from typing import TYPE_CHECKING

from slipstream.client import AsyncClient
from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.errors import ResourceExhaustedError, SlipstreamError
from slipstream.common.host import yield_to_streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.sharedctypes import Synchronized

    from slipstream.benchmarks.workload import Arrival, PlannedRequest
    from slipstream.common.api.output_chunk import Usage

LEAD_S = 0.5
"""Until the start, for the processes to take in their requests and to connect."""

TIMEOUT_S = 300.0
"""A request that takes longer has failed."""

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
    usage: Usage | None = None
    """The server's counts; None without an end."""
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
    """CPU time of the generator, in the busiest of its processes."""
    wall_s: float
    """From the start to the end of the last request."""

    @classmethod
    def together(cls, parts: Sequence[LoadRun]) -> LoadRun:
        """The parts of a run that several processes made."""
        return cls(
            [record for part in parts for record in part.records],
            max(part.seconds for part in parts),
            max(part.cpu_s for part in parts),
            max(part.wall_s for part in parts),
        )


Session = tuple["PlannedRequest", ...]
"""Requests that a client makes one after the other: the turns of a conversation, or a single request."""


async def open_loop(
    address: str, arrivals: Sequence[Arrival], seconds: float, drain_s: float, *, num_processes: int = 1
) -> LoadRun:
    """Makes each request at its time, and at the end waits `drain_s` at most for those that still run."""
    shares = [(arrivals[number::num_processes], seconds, drain_s) for number in range(num_processes)]
    return await _in_processes(_open_loop, address, shares)


async def closed_loop(
    address: str,
    sessions: Sequence[Session],
    num_clients: int,
    seconds: float | None = None,
    *,
    num_processes: int = 1,
) -> LoadRun:
    """Keeps clients busy, each with one session at a time, until every session was made once.

    With `seconds` the sessions are repeated as needed until the time is over, when the clients leave.
    """
    num_processes = min(num_processes, num_clients)
    shares = [
        (sessions, len(range(number, num_clients, num_processes)), inf if seconds is None else seconds)
        for number in range(num_processes)
    ]
    return await _in_processes(_closed_loop, address, shares)


async def _in_processes(run: object, address: str, shares: Sequence[tuple[object, ...]]) -> LoadRun:
    context, loop = get_context("spawn"), asyncio.get_running_loop()
    num_taken = context.Value("L", 0)
    with ExitStack() as held:
        pools = [
            held.enter_context(ProcessPoolExecutor(1, context, initializer=_set_up, initargs=(num_taken,)))
            for _ in shares
        ]
        await asyncio.gather(*(loop.run_in_executor(pool, gc.freeze) for pool in pools))
        start_at = time.monotonic() + LEAD_S
        parts = (
            loop.run_in_executor(pool, _in_this_process, run, address, start_at, share)
            for pool, share in zip(pools, shares, strict=True)
        )
        return LoadRun.together(await asyncio.gather(*parts))


_num_taken: list[Synchronized[int]] = []
"""In a process of the generator: the number of sessions that all of them have begun."""


def _set_up(num_taken: Synchronized[int]) -> None:
    # The generator stands for clients on other machines: it must not take a core from a stream in mid-step.
    yield_to_streams()
    gc.disable()
    _num_taken.append(num_taken)


def _in_this_process(run: object, address: str, start_at: float, share: tuple[object, ...]) -> LoadRun:
    async def made() -> LoadRun:
        async with AsyncClient(address) as client:
            await client.server_info()
            clock = _Clock(start_at)
            await asyncio.sleep(max(0.0, -clock.now()))
            result: LoadRun = await run(client, clock, *share)  # type: ignore[operator]
            return result

    return asyncio.run(made())


async def _open_loop(
    client: AsyncClient, clock: _Clock, arrivals: Sequence[Arrival], seconds: float, drain_s: float
) -> LoadRun:
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


async def _closed_loop(
    client: AsyncClient, clock: _Clock, sessions: Sequence[Session], num_clients: int, seconds: float
) -> LoadRun:
    records: list[RequestRecord] = []
    remaining = _sessions(sessions, repeats=seconds < inf)
    clients = [asyncio.create_task(_client(client, clock, remaining, records, seconds)) for _ in range(num_clients)]
    await asyncio.wait(clients, timeout=None if seconds == inf else max(0.0, seconds - clock.now()))
    await _leave(clients)
    return clock.run(records, min(seconds, clock.now()))


def _sessions(sessions: Sequence[Session], *, repeats: bool) -> Iterator[Session]:
    """Takes the next session that none of the processes has begun."""
    (num_taken,) = _num_taken
    while True:
        with num_taken.get_lock():
            number = num_taken.value
            num_taken.value += 1
        if number >= len(sessions) and not repeats:
            return
        yield sessions[number % len(sessions)]


async def _client(
    client: AsyncClient, clock: _Clock, sessions: Iterator[Session], records: list[RequestRecord], seconds: float
) -> None:
    for session in sessions:
        for request in session:
            if (now := clock.now()) >= seconds:
                return
            record = RequestRecord(now, now, request.max_new_tokens)
            records.append(record)
            await _make(client, clock, request, record)
            if record.outcome == REJECTED:
                await asyncio.sleep((record.retry_after_ms or 0) / 1000)


async def _make(client: AsyncClient, clock: _Clock, request: PlannedRequest, record: RequestRecord) -> None:
    ends: list[FinishReason] = []
    chunks = client.generate(
        request.prompt,
        timeout_s=TIMEOUT_S,
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
            ends += [] if chunk.finish_reason is None else [chunk.finish_reason]
            record.usage = chunk.job_usage
        is_right = record.num_tokens == record.wanted_tokens and ends == [FinishReason.LENGTH]
        record.outcome, record.error = (COMPLETED, "") if is_right else (FAILED, _told(record, ends))
    except ResourceExhaustedError as error:
        record.outcome = REJECTED
        # A rejection without a RetryInfo reads as 0.
        record.retry_after_ms = error.retry_after_ms or None
    except SlipstreamError as error:
        record.outcome, record.error = FAILED, repr(error)
    finally:
        record.ended_s = clock.now()


def _told(record: RequestRecord, ends: Sequence[FinishReason]) -> str:
    return f"{record.num_tokens} of {record.wanted_tokens} tokens, ends: {', '.join(ends) or 'none'}"


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

    def now(self) -> float:
        """Below 0 before the start."""
        return time.monotonic() - self._start_at

    def run(self, records: list[RequestRecord], seconds: float) -> LoadRun:
        """The run that ends now."""
        return LoadRun(records, seconds, time.process_time() - self._cpu_s, self.now())
