"""What measuring costs a step: the real services with and without it, in turns.

    python benchmarks/metrics_cost.py --json benchmarks/results/metrics_cost_cpu.json

Dummy kernels of 0.3 + 0.7 ms, a millisecond a step. "With" is the services as they are, scraped once a second;
"without" is the same with everything that measures taken out (`unmeasured.py`): stamps, step and request metrics,
heartbeats, scrapes. Without stamps nobody but the client has a clock: each run is as long as its slowest stream takes
from its first token to its last, over the verify steps in between. The machine must be quiet: a per cent of a
millisecond is 10 microseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.unmeasured import SERVICES
from slipstream.bundled import standalone_dir, target_dir
from slipstream.client import AsyncClient

NUM_CLIENTS = 4
NUM_DRAFT_TOKENS = 4
CONTEXT_TOKENS = 1 << 17
DRAFT_MS, VERIFY_MS = 0.3, 0.7
SCRAPE_S = 1.0
TOKENS_PER_STEP = NUM_DRAFT_TOKENS // 2 + 1
"""Dummy drafts guess the first half of their tokens right."""
NUM_WARM_UPS = 4
LOG_DIR = Path("build/benchmarks")
SEED = 1
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run with and a run without, one right after the other; mean time of a step, in microseconds."""

    repeat: int
    with_us: float
    without_us: float

    @property
    def cost_us(self) -> float:
        """What measuring adds to a step."""
        return self.with_us - self.without_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """All pairs together."""

    median_us: float
    low_us: float
    """With `high_us`, an interval that holds the median in 95 of 100 resamples."""
    high_us: float
    step_us: float
    """Median step without measuring."""
    median_share: float
    """median_us / step_us."""
    share_of_a_millisecond: float
    host: str
    pairs: tuple[Pair, ...]

    @classmethod
    def of(cls, pairs: list[Pair]) -> Cost:
        """Resamples with a fixed seed."""
        costs = [pair.cost_us for pair in pairs]
        chance = random.Random(SEED)
        medians = sorted(statistics.median(chance.choices(costs, k=len(costs))) for _ in range(NUM_RESAMPLES))
        median, step = statistics.median(costs), statistics.median(pair.without_us for pair in pairs)
        return cls(
            median_us=median,
            low_us=medians[int(0.025 * NUM_RESAMPLES)],
            high_us=medians[int(0.975 * NUM_RESAMPLES)],
            step_us=step,
            median_share=median / step,
            share_of_a_millisecond=median / 1000,
            host=host(),
            pairs=tuple(pairs),
        )


def main(
    repeats: Annotated[int, typer.Option(help="Pairs of runs.")] = 200,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 400,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write it.")] = None,
) -> None:
    """Measures the cost of measuring."""
    cost = asyncio.run(measure(repeats, steps))
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(cost), indent=1) + "\n")
    print(
        f"measuring adds {cost.median_us:.1f} us (95 %: {cost.low_us:.1f} to {cost.high_us:.1f}) to a step of "
        f"{cost.step_us:.0f} us: {100 * cost.share_of_a_millisecond:.2f} % of a millisecond; {cost.host}"
    )


async def measure(repeats: int, steps: int) -> Cost:
    """Runs the pairs; which one of a pair comes first changes from one to the next.

    All six services run all the time, so that runs can be short and alternate often: idle ones cost next to nothing.
    """
    pairs = []
    async with Stack(LOG_DIR) as stack, AsyncExitStack() as held:
        await asyncio.gather(*(_start_workers(stack, is_measured=is_measured) for is_measured in (True, False)))
        clients = {is_measured: await _client(stack, held, is_measured=is_measured) for is_measured in (True, False)}
        for repeat in range(-NUM_WARM_UPS, repeats):
            order = (True, False) if repeat % 2 == 0 else (False, True)
            found = {is_measured: await _run(clients[is_measured], steps) for is_measured in order}
            if repeat >= 0:
                pairs.append(Pair(repeat=repeat, with_us=found[True], without_us=found[False]))
    return Cost.of(pairs)


async def _start_workers(stack: Stack, *, is_measured: bool) -> None:
    starts = []
    for role, model, length_ms in (("draft", standalone_dir(), DRAFT_MS), ("verify", target_dir(), VERIFY_MS)):
        name = _name(role, is_measured=is_measured)
        dummy = ("dummy_worker", role, "--length-ms", f"{length_ms:g}", "--model", str(model), "--device", "cpu")
        command = _command(*dummy, "--listen", stack.socket(name), is_measured=is_measured)
        starts.append(stack.process(name, *command))
    await asyncio.gather(*starts)


async def _client(stack: Stack, held: AsyncExitStack, *, is_measured: bool) -> AsyncClient:
    """A client of a scheduler that lives as long as `held`."""
    port, metrics_port = free_ports(2)
    workers = [f"--{role}={stack.socket(_name(role, is_measured=is_measured))}" for role in ("verify", "draft")]
    sizes = ("--slots", str(NUM_CLIENTS), "--context-tokens", str(CONTEXT_TOKENS), "--device", "cpu")
    program = _command("scheduler", is_measured=is_measured)
    scheduler = stack.scheduler(*workers, *sizes, port=port, metrics_port=metrics_port, program=program)
    client = await held.enter_async_context(AsyncClient(await held.enter_async_context(scheduler)))
    if is_measured:
        scraping = asyncio.create_task(_scrape(metrics_port))
        held.push_async_callback(_end, scraping)
    return client


async def _run(client: AsyncClient, steps: int) -> float:
    """Mean time of a step, in microseconds."""
    return 1e6 * max(await asyncio.gather(*(_stream(client, steps * TOKENS_PER_STEP) for _ in range(NUM_CLIENTS))))


async def _stream(client: AsyncClient, num_tokens: int) -> float:
    """Seconds per verify step of one request, from its first token to its last."""
    started = 0.0
    async for chunk in client.generate("def main():\n", max_new_tokens=num_tokens, ignore_eos=True):
        started = started or time.monotonic()
        if chunk.usage is not None:
            return (time.monotonic() - started) / chunk.usage.num_verify_steps
    raise RuntimeError("the stream ended without its usage")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _scrape(port: int) -> None:
    while True:
        await asyncio.to_thread(_fetch, port)
        await asyncio.sleep(SCRAPE_S)


def _fetch(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        response.read()


def _name(service: str, *, is_measured: bool) -> str:
    return service if is_measured else f"{service}-unmeasured"


def _command(service: str, *arguments: str, is_measured: bool) -> tuple[str, ...]:
    module = (SERVICES[service],) if is_measured else ("slipstream.benchmarks.unmeasured", service)
    return (sys.executable, "-m", *module, *arguments)


if __name__ == "__main__":
    typer.run(main)
