"""Samples streams: answers, windows in which a batch streams, and clients that stream jobs without a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from slipstream.benchmarks.stack import Served
from slipstream.cli.cancellation import background
from slipstream.cli.load_requests import Request
from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions
from slipstream.common.host import STEP_LOOP
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.metrics import Scrape, scrape
from slipstream.common.wire.job import Usage, mean_accept_length
from slipstream.common.wire.server import ServerState

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


START_TIMEOUT_S = 120.0
POLL_S = 0.05
MOST_RESIDUE = 1e-6
"""The part of the steps' time by which busy and bubbles may miss it: rounding of sums in 64-bit floats."""
MOST_TRIES = 5
PROMPT = "def main():\n"
SEED = 11
TEMPERATURE = 0.8


class Answer(NamedTuple):
    """The output of a request."""

    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage


async def answers(client: AsyncClient, requests: Sequence[Request], at_once: int) -> list[Answer]:
    """Makes requests, `at_once` at a time, and returns their answers."""
    room = asyncio.Semaphore(at_once)

    async def answer(request: Request) -> Answer:
        prompt, options = request
        async with room:
            chunks = [chunk async for chunk in client.generate(prompt, **options)]
        tokens, usage = tuple(token for chunk in chunks for token in chunk.token_ids), chunks[-1].usage
        assert usage is not None, "the last message has it"
        return Answer(tokens, str(chunks[-1].finish_reason), usage)

    return await asyncio.gather(*map(answer, requests))


def accept_length(found: Sequence[Answer]) -> float:
    """Returns the mean over the steps in which a draft was checked; 1 without any."""
    usages = [answer.usage for answer in found]
    num_accepted = sum(usage.total_accepted_tokens for usage in usages)
    return mean_accept_length(num_accepted, sum(usage.num_verify_steps for usage in usages))


class TornWindowError(Exception):
    """A request ended before the window began, or the step metrics of a window do not belong to the same steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """The number of decode steps and the sums over them, all from the same two scrapes."""

    num_steps: int
    step_s: float
    draft_s: float
    verify_s: float
    bubble_s: float

    @staticmethod
    def of(gained: Scrape) -> StepSums:
        """Takes them from the difference of two scrapes.

        Raises TornWindowError unless there are whole steps and busy and bubbles add up to their time: a scrape that
        is not one snapshot has a step in one sum and not yet in the other.
        """

        def total(name: str, **labels: str) -> float:
            return gained.total(f"slipstream_{name}", phase="decode", **labels)

        sums = StepSums(
            num_steps=round(total("step_seconds_count")),
            step_s=total("step_seconds_sum"),
            draft_s=total("busy_seconds_total", service="draft"),
            verify_s=total("busy_seconds_total", service="verify"),
            bubble_s=total("bubble_seconds_total"),
        )
        residue = sums.step_s - sums.draft_s - sums.verify_s - sums.bubble_s
        if sums.num_steps < 1 or abs(residue) > MOST_RESIDUE * sums.step_s:
            raise TornWindowError(f"{residue:+.6f} s of {sums.num_steps} steps are neither busy nor bubbles: {sums}")
        return sums

    def mean_ms(self, seconds: float) -> float:
        """Returns a sum per step, in milliseconds."""
        return 1e3 * seconds / self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(StepSums):
    """The time in which all requests of a batch streamed."""

    elapsed_s: float
    """By this process's clock."""
    num_tokens: int
    cpu_s: dict[str, float]
    """CPU time by process, and of the thread that decides the steps."""
    first_tokens: list[list[int]]
    """The first `warm_up_tokens` of each request."""
    mean_accept_length: float
    """Mean over the requests; 0 if they were not left to end."""
    fence: str
    has_mps: bool

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests, by this process's clock."""
        return self.num_tokens / self.elapsed_s

    def __add__(self, other: Self) -> Window:
        """Returns the sums over both windows."""
        names = ("elapsed_s", "num_tokens", *(each.name for each in fields(StepSums)))
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        cpu_s = {name: seconds + other.cpu_s[name] for name, seconds in self.cpu_s.items()}
        return replace(self, **sums, cpu_s=cpu_s)


@dataclass(slots=True)
class Streaming:
    """Requests that stream at the same time, and what each of them received."""

    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    received: list[list[int]] = field(default_factory=list)
    arrivals: list[list[tuple[float, int]]] = field(default_factory=list)
    """The messages of each request: seconds of `time.monotonic`, and number of tokens."""
    accept_lengths: list[float] = field(default_factory=list)
    """Of the requests that ended."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all requests."""
        return sum(map(len, self.received))

    def check_running(self) -> None:
        """Raises TornWindowError if a request ended, or its error if it failed."""
        for ended in filter(asyncio.Task.done, self.tasks):
            ended.result()
            raise TornWindowError(f"a request ended too early: it had {max(map(len, self.received))} tokens")

    def check_begin(self, warm_up_tokens: int) -> None:
        """Raises what `check_running` raises, and TimeoutError if a request is not warm."""
        self.check_running()
        if min(map(len, self.received)) < warm_up_tokens:
            raise TimeoutError(f"not all requests have {warm_up_tokens} tokens after {START_TIMEOUT_S:.0f} s")


@asynccontextmanager
async def streaming(
    client: AsyncClient, requests: Sequence[Request], *, warm_up_tokens: int = 1
) -> AsyncIterator[Streaming]:
    """Streams requests for as long as the context, which begins when each has `warm_up_tokens`; raises their errors."""
    streams = Streaming(received=[[] for _ in requests], arrivals=[[] for _ in requests])
    is_warm = asyncio.Event()

    async def stream(number: int) -> None:
        prompt, options = requests[number]
        async for chunk in client.generate(prompt, **options):
            streams.received[number].extend(chunk.token_ids)
            streams.arrivals[number].append((time.monotonic(), len(chunk.token_ids)))
            if not is_warm.is_set() and min(map(len, streams.received)) >= warm_up_tokens:
                is_warm.set()
            if chunk.usage is not None:
                streams.accept_lengths.append(chunk.usage.mean_accept_length)

    async with background(*map(stream, range(len(requests)))) as streams.tasks:
        async with background(is_warm.wait()) as warm:
            await asyncio.wait((*warm, *streams.tasks), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        streams.check_begin(warm_up_tokens)
        yield streams
        for ended in filter(asyncio.Task.done, streams.tasks):
            ended.result()


async def stream_window(
    served: Served, requests: Sequence[Request], *, warm_up_tokens: int, seconds: float | None = None
) -> Window:
    """Streams requests and measures while all of them run.

    The window begins when each has `warm_up_tokens`, and a scrape, which takes some milliseconds, has read the metrics.
    It ends when the first request ends, or after `seconds`, when the requests are cancelled. A torn window is told and
    measured again; raises TornWindowError after MOST_TRIES.
    """
    tries = 0
    while True:
        try:
            return await _stream_window(served, requests, warm_up_tokens, seconds)
        except TornWindowError as error:
            print(f"window measured again: {error}", flush=True)
            tries += 1
            if tries == MOST_TRIES:
                raise


async def _stream_window(
    served: Served, requests: Sequence[Request], warm_up_tokens: int, seconds: float | None
) -> Window:
    async with AsyncClient(served.address) as client:
        info = await with_draft(client)
        meter = StepMeter(served, info)
        async with streaming(client, requests, warm_up_tokens=warm_up_tokens) as streams:
            before = await meter.read()
            streams.check_begin(warm_up_tokens)
            started, num_before = time.monotonic(), streams.num_tokens
            await asyncio.wait(streams.tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            elapsed_s, num_tokens = time.monotonic() - started, streams.num_tokens - num_before
            after = await meter.read()
            if seconds is None:
                await asyncio.gather(*streams.tasks)
    sums, cpu_s = meter.gained(before, after)
    return Window(
        **asdict(sums),
        elapsed_s=elapsed_s,
        num_tokens=num_tokens,
        cpu_s=cpu_s,
        first_tokens=[tokens[:warm_up_tokens] for tokens in streams.received],
        mean_accept_length=sum(streams.accept_lengths) / len(requests),
        fence=info.fence,
        has_mps=info.under_mps,
    )


async def with_draft(client: AsyncClient) -> ServerState:
    """Returns the server's state when a draft that is expected takes part. Raises TimeoutError.

    A draft that takes seconds to attach, as when its kernels are compiled, joins a server that serves already.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            info = await client.server_info()
            if info.draft_state not in ("missing", "catching up"):
                return info
            await asyncio.sleep(POLL_S)


class StepMeter:
    """Reads the metrics of a server, and the CPU times of its services and of its step loop's thread."""

    def __init__(self, served: Served, info: ServerState) -> None:
        self._metrics_port = served.metrics_port
        # One process may be several services: it has the name of the first.
        named = {service.pid: service.name for service in reversed(info.services)}
        self._processes = {name: psutil.Process(pid) for pid, name in reversed(named.items())}
        threads = (thread for pid in named for thread in Path(f"/proc/{pid}/task").iterdir())
        self._loop = next(thread for thread in threads if (thread / "comm").read_text().strip() == STEP_LOOP)

    async def read(self) -> tuple[Scrape, dict[str, float]]:
        """Returns the metrics, and seconds of CPU time so far."""
        metrics = await scrape(self._metrics_port)
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        nanoseconds = int((self._loop / "schedstat").read_text().split()[0])
        cpu_s = {name: time.user + time.system for name, time in times.items()}
        return metrics, {**cpu_s, STEP_LOOP: 1e-9 * nanoseconds}

    def gained(
        self, before: tuple[Scrape, dict[str, float]], after: tuple[Scrape, dict[str, float]]
    ) -> tuple[StepSums, dict[str, float]]:
        """Returns what is between two readings. Raises TornWindowError."""
        cpu_s = {name: seconds - before[1][name] for name, seconds in after[1].items()}
        return StepSums.of(after[0].since(before[0])), cpu_s
