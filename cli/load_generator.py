"""Samples whole requests: makes them from processes of its own, records their outcomes, and sums these up.

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
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from slipstream.client import AsyncClient
from slipstream.client.connection import AccessOptions
from slipstream.common.errors import ResourceExhaustedError, SlipstreamError
from slipstream.common.host import yield_to_streams
from slipstream.common.wire.job import FinishReason, mean_accept_length

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from multiprocessing.sharedctypes import Synchronized

    from slipstream.cli.load_requests import Arrival, Request, Session

LEAD_S = 0.5
"""Until the start, for the processes to take in their requests and to connect."""

TIMEOUT_S = 300.0
"""A request that takes longer has failed."""

COMPLETED, REJECTED, FAILED, LEFT = "completed", "rejected", "failed", "left"
"""Outcomes of a request; it is left if the run is over first."""


Row = dict[str, Any]
"""A row of results, as JSON has it."""


class Counts(NamedTuple):
    """A server's counts of a request, as in `Usage`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    total_accepted_tokens: int = 0
    num_verify_steps: int = 0


class Part(NamedTuple):
    """A message of an answer."""

    num_tokens: int
    finish_reason: str | None
    usage: Counts | None
    """None before the end."""


LoadClient: TypeAlias = "Callable[[Request], AsyncIterator[Part]]"
"""Makes a request on a connection. Raises ResourceExhaustedError if it is rejected, and other SlipstreamErrors."""


class LoadServer(Protocol):
    """A server under load. Goes to the generator's processes, and so can be pickled."""

    def connect(self) -> AbstractAsyncContextManager[LoadClient]:
        """Connects. Raises ConnectionLostError if nothing answers."""
        ...


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A gateway, by gRPC."""

    address: str
    access: AccessOptions = field(default_factory=AccessOptions)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LoadClient]:
        async with AsyncClient(self.address, **self.access) as client:
            await client.server_info()
            yield partial(_stream, client)


async def _stream(client: AsyncClient, request: Request) -> AsyncIterator[Part]:
    prompt, options = request
    async for chunk in client.generate(prompt, timeout_s=TIMEOUT_S, **options):
        usage = chunk.job_usage
        counts = None if usage is None else Counts(*(getattr(usage, name) for name in Counts._fields))
        yield Part(len(chunk.token_ids), chunk.finish_reason, counts)


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
    usage: Counts | None = None
    """None without an end."""
    retry_after_ms: int | None = None
    """The delay that a rejection asks for; None if it does not."""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(self.counts)

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens received in a part of the run."""
        return sum(n for at, n in zip(self.times_s, self.counts, strict=True) if start_s <= at < end_s)

    def spread(self, num_tokens: int) -> None:
        """Spreads the tokens that a server counted over the messages, where these do not say how many they have."""
        missing, index = num_tokens - self.num_tokens, 0
        while missing > 0 and self.counts:
            added = -(-missing // (len(self.counts) - index))
            self.counts[index] += added
            missing, index = missing - added, index + 1

    def inter_token_s(self) -> Iterator[float]:
        """Yields the seconds between tokens; those of a message share the time since the message before."""
        for (before, after), count in zip(pairwise(self.times_s), self.counts[1:], strict=True):
            yield from [(after - before) / count] * count


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

    @property
    def failures(self) -> list[str]:
        """A line for each request that failed: the error, or what its end had to be."""
        return [record.error for record in self.records if record.outcome == FAILED]

    def report(self, warm_up_s: float) -> Row:
        """Sums up the window from `warm_up_s` on; earlier requests do not count.

        Latencies are in milliseconds and count from the due time of requests; but for the time to a rejection, they are
        those of completed requests.
        """
        window_s = self.seconds - warm_up_s
        records = [record for record in self.records if record.intended_s >= warm_up_s]
        completed = [record for record in records if record.outcome == COMPLETED]
        all_completed = [record for record in self.records if record.outcome == COMPLETED]
        ended = [record for record in all_completed if warm_up_s <= record.ended_s < self.seconds]
        outcomes = Counter(record.outcome for record in records)
        usages = [record.usage for record in completed if record.usage is not None]
        num_tokens, num_tokens_of_completed = (
            sum(record.tokens_between(warm_up_s, self.seconds) for record in found)
            for found in (self.records, all_completed)
        )
        accepted, steps = (
            sum(getattr(usage, name) for usage in usages) for name in ("total_accepted_tokens", "num_verify_steps")
        )
        prompt_tokens = sum(record.usage.prompt_tokens for record in ended if record.usage)
        times = latencies(completed)
        return {
            "seconds": window_s,
            "num_requests": len(records),  # due in the window
            **{f"num_{outcome}": outcomes[outcome] for outcome in (COMPLETED, REJECTED, FAILED, LEFT)},
            "requests_per_second": len(ended) / window_s,  # completed in the window
            "tokens_per_second": num_tokens / window_s,  # received in the window, of all requests
            "completed_tokens_per_second": num_tokens_of_completed / window_s,  # of requests completed then or later
            "all_tokens_per_second": (num_tokens + prompt_tokens) / window_s,  # prompts of those completed in it
            **{f"{name}_ms": percentiles(times[short]) for short, name in NAMES.items()},
            "message_gap_ms": percentiles(b - a for record in completed for a, b in pairwise(record.times_s)),
            "rejection_ms": percentiles(r.ended_s - r.intended_s for r in records if r.outcome == REJECTED),
            "lateness_ms": percentiles(record.sent_s - record.intended_s for record in records),  # the generator's own
            "generator_cpu_share": self.cpu_s / self.wall_s,  # of a core; near 1 the generator measures itself
            "cached_share": sum(u.cached_tokens for u in usages) / max(1, sum(u.prompt_tokens for u in usages)),
            "mean_accept_length": mean_accept_length(accepted, steps),
        }


NAMES = {"ttft": "ttft", "itl": "inter_token", "tpot": "time_per_token", "e2el": "end_to_end"}
"""Names of the latencies in a report, by those in `latencies`."""


def latencies(completed: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Latencies of completed requests, in seconds: to the first token, between tokens, the mean of a request after its
    first token, and to the end. All but the second and third count from when a request was to be made."""
    return {
        "ttft": [record.times_s[0] - record.intended_s for record in completed],
        "itl": [seconds for record in completed for seconds in record.inter_token_s()],
        "tpot": [(r.times_s[-1] - r.times_s[0]) / (r.num_tokens - 1) for r in completed if r.num_tokens > 1],
        "e2el": [record.ended_s - record.intended_s for record in completed],
    }


def summary(seconds: Sequence[float]) -> Row:
    """Mean, median and 99th percentile of latencies, in milliseconds; all 0 without latencies."""
    found = 1e3 * np.array(seconds or [0.0])
    return {"mean": float(found.mean()), "median": float(np.median(found)), "p99": float(np.percentile(found, 99))}


def percentiles(seconds: Iterable[float]) -> Row:
    """Percentiles of latencies in milliseconds; all 0 without latencies."""
    found = 1e3 * np.fromiter(seconds, dtype=np.float64)
    values = [*np.percentile(found, (50, 90, 99)), found.max()] if found.size else [0.0] * 4
    names = ("p50", "p90", "p99", "most")
    return {"count": found.size, **{name: round(float(value), 3) for name, value in zip(names, values, strict=True)}}


async def open_loop(
    server: LoadServer, arrivals: Sequence[Arrival], seconds: float, drain_s: float, *, num_processes: int = 1
) -> LoadRun:
    """Makes each request at its time, and at the end waits `drain_s` at most for those that still run."""
    shares = [(arrivals[number::num_processes], seconds, drain_s) for number in range(num_processes)]
    return await _in_processes(Generator.open_loop, server, shares)


async def closed_loop(
    server: LoadServer, sessions: Sequence[Session], num_clients: int, seconds: float = inf, *, num_processes: int = 1
) -> LoadRun:
    """Keeps clients busy, each with one session at a time, until every session was made once.

    With `seconds` the sessions are repeated as needed until the time is over, when the clients leave.
    """
    num_processes = min(num_processes, num_clients)
    counts = [len(range(number, num_clients, num_processes)) for number in range(num_processes)]
    return await _in_processes(Generator.closed_loop, server, [(sessions, count, seconds) for count in counts])


async def _in_processes(run: object, server: LoadServer, shares: Sequence[tuple[object, ...]]) -> LoadRun:
    context, loop = get_context("spawn"), asyncio.get_running_loop()
    num_taken = context.Value("L", 0)
    with ExitStack() as held:
        pools = [ProcessPoolExecutor(1, context, initializer=_set_up, initargs=(num_taken,)) for _ in shares]
        for pool in pools:
            held.enter_context(pool)
        await asyncio.gather(*(loop.run_in_executor(pool, gc.freeze) for pool in pools))
        start_at = time.monotonic() + LEAD_S
        calls = zip(pools, shares, strict=True)
        parts = [loop.run_in_executor(pool, _in_this_process, run, server, start_at, share) for pool, share in calls]
        made = await asyncio.gather(*parts)
    records = [record for part in made for record in part.records]
    return LoadRun(records, *(max(getattr(part, name) for part in made) for name in ("seconds", "cpu_s", "wall_s")))


_num_taken: list[Synchronized[int]] = []
"""In a process of the generator: the number of sessions that all of them have begun."""


def _set_up(num_taken: Synchronized[int]) -> None:
    # The generator stands for clients on other machines: it must not take a core from a stream in mid-step.
    yield_to_streams()
    gc.disable()
    _num_taken.append(num_taken)


def _in_this_process(run: object, server: LoadServer, start_at: float, share: tuple[object, ...]) -> LoadRun:
    async def made() -> LoadRun:
        async with server.connect() as client:
            generator = Generator(client, start_at)
            await asyncio.sleep(max(0.0, -generator.now()))
            result: LoadRun = await run(generator, *share)  # type: ignore[operator]
            return result

    return asyncio.run(made())


class Generator:
    """Makes the requests of one process, and records them."""

    def __init__(self, client: LoadClient, start_at: float) -> None:
        self._client = client
        self._start_at = start_at
        self._cpu_s = time.process_time()
        self._records: list[RequestRecord] = []

    def now(self) -> float:
        """Seconds since the start of the run; below 0 before."""
        return time.monotonic() - self._start_at

    async def open_loop(self, arrivals: Sequence[Arrival], seconds: float, drain_s: float) -> LoadRun:
        """Makes each request at its time."""
        calls: list[asyncio.Task[RequestRecord]] = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, arrival.at_s - self.now()))
            calls.append(asyncio.create_task(self._make(arrival.request, arrival.at_s)))
        await asyncio.sleep(max(0.0, seconds - self.now()))
        if calls:
            await asyncio.wait(calls, timeout=drain_s)
        return await self._end(calls, seconds)

    async def closed_loop(self, sessions: Sequence[Session], num_clients: int, seconds: float) -> LoadRun:
        """Keeps clients busy."""
        remaining = self._remaining(sessions, repeats=seconds < inf)
        clients = [asyncio.create_task(self._follow(remaining, seconds)) for _ in range(num_clients)]
        await asyncio.wait(clients, timeout=None if seconds == inf else max(0.0, seconds - self.now()))
        return await self._end(clients, min(seconds, self.now()))

    def _remaining(self, sessions: Sequence[Session], *, repeats: bool) -> Iterator[Session]:
        """Takes the next session that none of the processes has begun."""
        (num_taken,) = _num_taken
        while True:
            with num_taken.get_lock():
                number = num_taken.value
                num_taken.value += 1
            if number >= len(sessions) and not repeats:
                return
            yield sessions[number % len(sessions)]

    async def _follow(self, sessions: Iterator[Session], seconds: float) -> None:
        for session in sessions:
            for request in session:
                if (now := self.now()) >= seconds:
                    return
                record = await self._make(request, now)
                if record.outcome == REJECTED:
                    await asyncio.sleep((record.retry_after_ms or 0) / 1000)

    async def _make(self, request: Request, intended_s: float) -> RequestRecord:
        record, ends = RequestRecord(intended_s, self.now(), request.options["max_new_tokens"] or 0), []
        self._records.append(record)
        try:
            async for part in self._client(request):
                if part.num_tokens:
                    record.times_s.append(self.now())
                    record.counts.append(part.num_tokens)
                ends += [] if part.finish_reason is None else [part.finish_reason]
                record.usage = part.usage
            record.outcome = COMPLETED
            if record.usage is not None:
                record.spread(record.usage.completion_tokens)
            if record.num_tokens != record.wanted_tokens or ends != [FinishReason.LENGTH]:
                told = f"{record.num_tokens} of {record.wanted_tokens} tokens, ends: {', '.join(ends) or 'none'}"
                record.outcome, record.error = FAILED, told
        except ResourceExhaustedError as error:
            record.outcome = REJECTED
            # A rejection without a RetryInfo reads as 0.
            record.retry_after_ms = error.retry_after_ms or None
        except SlipstreamError as error:
            record.outcome, record.error = FAILED, repr(error)
        finally:
            record.ended_s = self.now()
        return record

    async def _end(self, calls: Sequence[asyncio.Task[Any]], seconds: float) -> LoadRun:
        """Cancels what still runs, and returns the run."""
        for call in calls:
            call.cancel()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return LoadRun(self._records, seconds, time.process_time() - self._cpu_s, self.now())
