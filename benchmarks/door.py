"""Measures what OpenAI's interface adds to a message, and its CPU time, in turns with our own interface.

And what the same costs when no outputs arrive at the door together.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from slipstream.benchmarks.runner import NoPlan, Row, Table, benchmark, host
from slipstream.benchmarks.stack import LOG_DIR, Served, Stack, free_ports, running, words
from slipstream.cli.cancellation import background
from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions
from slipstream.common.settings import setting
from slipstream.door.server import TOGETHER_FROM

Stream = Callable[[int, "Arrivals"], Coroutine[Any, Any, None]]
"""A stream with a seed."""

OURS, OPENAI, ALONE = "gRPC", "OpenAI", "OpenAI, each output on a stream of its own"
PROMPT = list(range(300, 332))
OPTIONS: RequestOptions = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 900}


@dataclass(frozen=True, kw_only=True)
class Plan(NoPlan):
    """The settings of a measurement."""

    batches: str = setting("64,256", help="Numbers of concurrent streams.")
    step_ms: str = setting("60,240", help="For each of these batches, the length of verify's dummy kernel.")
    seconds: float = setting(6.0, help="Length of a window.")
    repeats: int = setting(3, help="Turns of each interface.", low=1, high=100)


class Arrivals:
    """Messages of streams, and when steps were published, all by CLOCK_MONOTONIC in nanoseconds."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.published: list[int] = []
        self.num_streams = 0
        """Streams that have begun."""
        self.first_token_s: list[float] = []

    def late_ms(self, begin_ns: int, end_ns: int) -> list[float]:
        """For each message of a window, the time since the newest step before it was published."""
        found = []
        for at in self.received:
            index = bisect_right(self.published, at)
            if begin_ns <= at < end_ns and index:
                found.append((at - self.published[index - 1]) / 1e6)
        return found


async def ours(client: AsyncClient, seed: int, arrivals: Arrivals) -> None:
    """A stream of our own interface."""
    begun_at, has_begun = time.monotonic(), False
    async with aclosing(client.generate(PROMPT, **(OPTIONS | {"seed": seed}))) as chunks:
        async for chunk in chunks:
            arrivals.received.append(time.monotonic_ns())
            if not has_begun:
                has_begun = True
                arrivals.num_streams += 1
                arrivals.first_token_s.append(time.monotonic() - begun_at)
            if chunk.finish_reason is not None:
                raise RuntimeError("a stream ended within the window")


async def openai(port: int, seed: int, arrivals: Arrivals) -> None:
    """A stream of OpenAI's, read as bytes: a client of another kind would measure itself."""
    begun_at = time.monotonic()
    fields = {"prompt": PROMPT, "max_tokens": 900, "seed": seed, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        arrivals.num_streams += 1
        arrivals.first_token_s.append(time.monotonic() - begun_at)
        while True:
            event = await reader.readuntil(b"\n\n")
            arrivals.received.append(time.monotonic_ns())
            if b'"finish_reason":null' not in event:
                raise RuntimeError(f"a stream ended within the window: {event!r}")
    finally:
        writer.close()


async def probe(client: AsyncClient, arrivals: Arrivals) -> None:
    """One more stream of our own, which says when each step was published."""
    async with aclosing(client.generate(PROMPT, **(OPTIONS | {"seed": 0}))) as chunks:
        async for chunk in chunks:
            arrivals.published.append(chunk.published_ns)


@asynccontextmanager
async def door_of(
    stack: Stack, served: Served, *, together_from: int = TOGETHER_FROM
) -> AsyncIterator[tuple[int, int]]:
    """A door before the gateway: its port, and its process."""
    (port,) = free_ports(1)
    private = stack.socket(f"door-{together_from}")
    options = words(listen=f"127.0.0.1:{port}", gateway=served.address, private_listen=private)
    run = f"from slipstream.door import main, server; server.TOGETHER_FROM = {together_from}; main.main()"
    command = (sys.executable, "-c", run, *options)
    async with running("door", f"http://{private}", *command, log=LOG_DIR / "door.log", environment={}) as process:
        yield port, process.pid


def cpu_s(pid: int) -> float:
    """The CPU time that a process has taken."""
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


async def sample(plan: Plan, batch: int, served: Served, stream: Stream, pids: Mapping[str, int]) -> Row:
    """Streams a batch of requests, and measures while all of them run."""
    arrivals = Arrivals()
    streams = (stream(seed, arrivals) for seed in range(1, batch + 1))
    async with AsyncClient(served.address) as client, background(probe(client, arrivals), *streams) as tasks:
        while arrivals.num_streams < batch:
            await asyncio.sleep(0.05)
            [task.result() for task in tasks if task.done()]
        before, begin_ns = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic_ns()
        await asyncio.sleep(plan.seconds)
        end_ns, after = time.monotonic_ns(), {name: cpu_s(pid) for name, pid in pids.items()}
        [task.result() for task in tasks if task.done()]
    late_ms = arrivals.late_ms(begin_ns, end_ns)
    return {
        "messages": len(late_ms),
        "late_p50_ms": median(late_ms),
        "late_p99_ms": quantiles(late_ms, n=100)[98],
        **{f"{name}_us": (after[name] - before[name]) * 1e6 / len(late_ms) for name in pids},
        "first_token_p50_ms": 1000 * median(arrivals.first_token_s),
    }


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures the interfaces of one gateway in turns, over dummy workers."""
    table = Table(file, "batch", "interface", "repeat")
    for batch, step_ms in zip(map(int, plan.batches.split(",")), map(float, plan.step_ms.split(",")), strict=True):
        async with Stack() as stack:
            await stack.dummies(1.0, step_ms)
            options: dict[str, Any] = {
                "slots": batch + 8,
                "queue": 4 * batch,
                "stream_interval_ms": 0,
                "kv_memory_mib": 512,
            }
            async with (
                stack.scheduler("draft", **options) as served,
                door_of(stack, served) as (port, pid),
                door_of(stack, served, together_from=2**30) as (other_port, other_pid),
                AsyncClient(served.address) as client,
            ):
                services = (await client.server_info()).services
                gateway = next(service.pid for service in services if service.name == "gateway")
                ways: dict[str, tuple[Stream, int]] = {
                    OURS: (partial(ours, client), pid),
                    OPENAI: (partial(openai, port), pid),
                    ALONE: (partial(openai, other_port), other_pid),
                }
                for repeat, (interface, (stream, door)) in product(range(plan.repeats), ways.items()):
                    row = await sample(plan, batch, served, stream, {"gateway": gateway, "door": door})
                    about = {"batch": batch, "interface": interface, "repeat": repeat}
                    table.add({**about, **row, "step_ms": step_ms, "host": host()})
