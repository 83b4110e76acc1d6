"""The time in which all requests of a batch stream: what the services did in it, and what it cost."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from slipstream.client import AsyncClient
from slipstream.common.host import STEP_LOOP
from slipstream.common.rpc.scrape import Scrape, scrape

if TYPE_CHECKING:
    from slipstream.benchmarks.decode import Setup

SEED = 11
TEMPERATURE = 0.8
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened while all of a batch streamed."""

    used: Scrape
    elapsed_s: float
    num_tokens: int
    mean_accept_length: float
    cpu_s: dict[str, float]
    fence: str
    has_mps: bool

    def total(self, name: str, **labels: str) -> float:
        """What a metric of decode steps gained."""
        return self.used.total(name, phase="decode", **labels)


class Served:
    """A scheduler with its workers."""

    def __init__(self, address: str, metrics_port: int) -> None:
        self._address = address
        self._metrics_port = metrics_port

    async def window(self, setup: Setup, batch: int) -> Window:
        """From when the last of a batch has begun until the first ends."""
        received = [0] * batch
        has_begun, accepted = asyncio.Event(), [0.0] * batch
        rng = random.Random(SEED)
        prompts = [[rng.randrange(256, 4096) for _ in range(setup.prompt_tokens)] for _ in range(batch)]

        async def stream(client: AsyncClient, number: int) -> None:
            options = {"temperature": TEMPERATURE, "seed": SEED + number, "ignore_eos": True}
            async for chunk in client.generate(
                prompts[number],
                max_new_tokens=setup.max_new_tokens,
                **options,  # type: ignore[arg-type]
            ):
                received[number] += len(chunk.token_ids)
                if min(received) >= WARM_UP_TOKENS:
                    has_begun.set()
                if chunk.usage is not None:
                    accepted[number] = chunk.usage.mean_accept_length

        async with AsyncClient(self._address) as client:
            info = await client.server_info()
            processes = _processes({service.name: service.pid for service in info.services})
            loop = _loop_thread([process.pid for process in processes.values()])
            streams = [asyncio.create_task(stream(client, number)) for number in range(batch)]
            await asyncio.wait_for(has_begun.wait(), 120)
            before, cpu_before = await scrape(self._metrics_port), _cpu_s(processes, loop)
            started, num_before = time.monotonic(), sum(received)
            await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            elapsed, num_tokens = time.monotonic() - started, sum(received) - num_before
            cpu_after, after = _cpu_s(processes, loop), await scrape(self._metrics_port)
            await asyncio.gather(*streams)
        return Window(
            used=after.since(before),
            elapsed_s=elapsed,
            num_tokens=num_tokens,
            mean_accept_length=sum(accepted) / batch,
            cpu_s={name: cpu_after[name] - cpu_before[name] for name in cpu_before},
            fence=info.fence,
            has_mps=info.under_mps,
        )


def _processes(pids: dict[str, int]) -> dict[str, psutil.Process]:
    """By name; one that is several services by the name of the first."""
    named = {pid: name for name, pid in reversed(pids.items())}
    return {name: psutil.Process(pid) for pid, name in named.items()}


def _loop_thread(pids: list[int]) -> Path:
    """The thread that decides the steps, in /proc."""
    threads = (thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir())
    return next(thread for thread in threads if (thread / "comm").read_text().strip() == STEP_LOOP)


def _cpu_s(processes: dict[str, psutil.Process], loop: Path) -> dict[str, float]:
    times = {name: process.cpu_times() for name, process in processes.items()}
    cpu_s = {name: time.user + time.system for name, time in times.items()}
    nanoseconds = int((loop / "schedstat").read_text().split()[0])
    return {**cpu_s, STEP_LOOP: 1e-9 * nanoseconds}
