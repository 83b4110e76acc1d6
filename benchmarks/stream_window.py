"""A window in which a batch of requests streams: the step metrics, tokens and CPU time of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from slipstream.cli.cancellation import background
from slipstream.client import AsyncClient
from slipstream.common.host import STEP_LOOP
from slipstream.common.rpc.scrape import scrape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from slipstream.benchmarks.stack import Served
    from slipstream.client.requests import RequestOptions
    from slipstream.common.api.server_state import ServerState
    from slipstream.common.rpc.scrape import Scrape

START_TIMEOUT_S = 120.0
POLL_S = 0.05
MOST_RESIDUE = 1e-6
"""The part of the steps' time by which busy and bubbles may miss it: rounding of sums in 64-bit floats."""
MOST_TRIES = 5
PROMPT = "def main():\n"


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

    @classmethod
    def of(cls, gained: Scrape) -> StepSums:
        """Takes them from the difference of two scrapes.

        Raises TornWindowError unless there are whole steps and busy and bubbles add up to their time: a scrape that
        is not one snapshot has a step in one sum and not yet in the other.
        """

        def total(name: str, **labels: str) -> float:
            return gained.total(f"slipstream_{name}", phase="decode", **labels)

        sums = cls(
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

    def __add__(self, other: StepSums) -> StepSums:
        """The sums over both."""
        return StepSums(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def mean_ms(self, seconds: float) -> float:
        """One of the sums per step, in milliseconds."""
        return 1e3 * seconds / self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time in which all requests of a batch streamed."""

    sums: StepSums
    elapsed_s: float
    """By this process's clock."""
    num_tokens: int
    first_tokens: list[list[int]]
    """The first `warm_up_tokens` of each request."""
    mean_accept_length: float
    """Over the requests; 0 if they were not left to end."""
    cpu_s: dict[str, float]
    """CPU time by process, and of the thread that decides the steps."""
    fence: str
    has_mps: bool


async def stream_window(
    served: Served,
    prompts: Sequence[str | Sequence[int]],
    options: Sequence[RequestOptions],
    *,
    warm_up_tokens: int,
    seconds: float | None = None,
) -> Window:
    """Streams a request for each prompt and measures while all of them run.

    The window begins when each has `warm_up_tokens`, and a scrape, which takes some milliseconds, has read the metrics.
    It ends when the first request ends, or after `seconds`, when the requests are cancelled. A torn window is told and
    measured again; raises TornWindowError after MOST_TRIES.
    """
    tries = 0
    while True:
        try:
            return await _stream_window(served, prompts, options, warm_up_tokens, seconds)
        except TornWindowError as error:
            print(f"window measured again: {error}", flush=True)
            tries += 1
            if tries == MOST_TRIES:
                raise


async def _stream_window(
    served: Served,
    prompts: Sequence[str | Sequence[int]],
    options: Sequence[RequestOptions],
    warm_up_tokens: int,
    seconds: float | None,
) -> Window:
    received: list[list[int]] = [[] for _ in prompts]
    accepted = [0.0] * len(prompts)
    is_warm = asyncio.Event()

    async def stream(client: AsyncClient, number: int) -> None:
        async for chunk in client.generate(prompts[number], **options[number]):
            received[number].extend(chunk.token_ids)
            if not is_warm.is_set() and min(map(len, received)) >= warm_up_tokens:
                is_warm.set()
            if chunk.usage is not None:
                accepted[number] = chunk.usage.mean_accept_length

    async with AsyncClient(served.address) as client:
        info = await with_draft(client)
        cpu = CpuClock({service.name: service.pid for service in info.services})
        async with background(*(stream(client, number) for number in range(len(prompts)))) as streams:
            async with background(is_warm.wait()) as warm:
                await asyncio.wait((*warm, *streams), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            before, cpu_before = await scrape(served.metrics_port), cpu.read()
            check_begin(streams, received, warm_up_tokens)
            started, num_before = time.monotonic(), sum(map(len, received))
            await asyncio.wait(streams, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            elapsed_s, num_tokens = time.monotonic() - started, sum(map(len, received)) - num_before
            cpu_after, after = cpu.read(), await scrape(served.metrics_port)
            if seconds is None:
                await asyncio.gather(*streams)
            else:
                for ended in filter(asyncio.Task.done, streams):
                    ended.result()
    return Window(
        sums=StepSums.of(after.since(before)),
        elapsed_s=elapsed_s,
        num_tokens=num_tokens,
        first_tokens=[tokens[:warm_up_tokens] for tokens in received],
        mean_accept_length=sum(accepted) / len(prompts),
        cpu_s={name: cpu_after[name] - cpu_before[name] for name in cpu_before},
        fence=info.fence,
        has_mps=info.under_mps,
    )


async def with_draft(client: AsyncClient) -> ServerState:
    """The server's state when a draft that is expected takes part. Raises TimeoutError.

    A draft that takes seconds to attach, as when its kernels are compiled, joins a server that serves already.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            info = await client.server_info()
            if info.draft_state not in ("missing", "catching up"):
                return info
            await asyncio.sleep(POLL_S)


def check_begin(streams: Sequence[asyncio.Task[None]], received: Sequence[Sequence[int]], warm_up_tokens: int) -> None:
    """Raises TornWindowError if a request has ended, its error if it failed, and TimeoutError if one is not warm."""
    for stream in filter(asyncio.Task.done, streams):
        stream.result()
        raise TornWindowError(f"a request ended before its window began: it had {max(map(len, received))} tokens")
    if min(map(len, received)) < warm_up_tokens:
        raise TimeoutError(f"not all requests have {warm_up_tokens} tokens after {START_TIMEOUT_S:.0f} s")


@asynccontextmanager
async def streaming(
    client: AsyncClient, num_clients: int, *, max_new_tokens: int, speculation: bool = True
) -> AsyncIterator[None]:
    """Keeps requests streaming for as long as the context, which begins when all have tokens.

    Raises RuntimeError if one of them ends before.
    """
    num_begun, have_begun = 0, asyncio.Event()

    async def stream() -> None:
        nonlocal num_begun
        chunks = client.generate(PROMPT, max_new_tokens=max_new_tokens, ignore_eos=True, speculation=speculation)
        await anext(chunks)
        num_begun += 1
        if num_begun == num_clients:
            have_begun.set()
        async for _ in chunks:
            pass
        raise RuntimeError("a request came to its end while it was to stream")

    async with background(*(stream() for _ in range(num_clients))) as streams:
        await asyncio.wait_for(have_begun.wait(), START_TIMEOUT_S)
        yield
        for ended in filter(asyncio.Task.done, streams):
            ended.result()


class CpuClock:
    """CPU times of the services."""

    def __init__(self, pids: dict[str, int]) -> None:
        # One process may be several services: it has the name of the first.
        named = {pid: name for name, pid in reversed(pids.items())}
        self._processes = {name: psutil.Process(pid) for pid, name in named.items()}
        threads = (thread for pid in named for thread in Path(f"/proc/{pid}/task").iterdir())
        self._loop = next(thread for thread in threads if (thread / "comm").read_text().strip() == STEP_LOOP)

    def read(self) -> dict[str, float]:
        """Seconds so far, by process, and of the step loop's thread."""
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        nanoseconds = int((self._loop / "schedstat").read_text().split()[0])
        return {**{name: time.user + time.system for name, time in times.items()}, STEP_LOOP: 1e-9 * nanoseconds}
