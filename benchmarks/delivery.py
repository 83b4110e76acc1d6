"""From publish to client: how late tokens arrive, and the CPU time that scheduler and gateway take for them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from slipstream.benchmarks.models import Setup
from slipstream.benchmarks.runner import DevicePlan, Row, Scenario, Table, benchmark, host, run
from slipstream.benchmarks.stack import Served, Stack
from slipstream.benchmarks.streams import POLL_S, SEED, START_TIMEOUT_S, TEMPERATURE, StepMeter, with_draft
from slipstream.cli.cancellation import background
from slipstream.cli.load_requests import request
from slipstream.client import AsyncClient
from slipstream.common.rpc.address import Keepalive
from slipstream.common.settings import setting

Receipts = list[tuple[int, int]]
"""For each message with tokens: when it was received, and when its newest token was published, in nanoseconds."""

STREAMS_PER_CLIENT = 16
"""Streams of a client process; with more of them it would measure itself."""
PROMPT_TOKENS = 128
MAX_NEW_TOKENS = 1900
WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    device: str = setting("cuda", help="Device of the workers.", choices=("cpu", "cuda"))
    shape: str = setting("llama-3.1-8b", help="A shape, or bundled.")
    batches: str = setting("64,256", help="Numbers of concurrent requests.")
    gateways: str = setting("1,8", help="For each of these batches, gateways on the port.")
    journals: str = setting("off,process", help="Modes of the journal.")
    seconds: float = setting(3.0, help="Length of a window.")

    def scenarios(self, context_tokens: int) -> list[Scenario]:
        """Each batch with its gateways, and each journal."""
        found = []
        pairs = zip(map(int, self.batches.split(",")), map(int, self.gateways.split(",")), strict=True)
        for (batch, gateways), journal in product(pairs, self.journals.split(",")):
            options: dict[str, Any] = {"gateways": gateways} if gateways > 1 else {}
            options |= {"slots": batch, "queue": 4 * batch, "journal": journal, "context_tokens": context_tokens}
            about = {"shape": self.shape, "batch": batch, "gateways": gateways, "journal": journal}
            found.append(Scenario(about=about, draft="draft", options=options))
        return found


_SHARED: list[Any] = []
"""In a client process: the number of clients whose streams all have tokens, and an event when they are to stop."""


@asynccontextmanager
async def clients(address: str, batch: int, max_new_tokens: int) -> AsyncIterator[Callable[[], Awaitable[Receipts]]]:
    """Streams requests from processes of their own for as long as the context, which begins when all have tokens.

    Yields what ends the streams and returns what they received. Raises TimeoutError, or a client's error.
    """
    context, loop, seeds = get_context("spawn"), asyncio.get_running_loop(), range(SEED, SEED + batch)
    groups = [seeds[start : start + STREAMS_PER_CLIENT] for start in range(0, batch, STREAMS_PER_CLIENT)]
    num_warm, is_over = shared = context.Value("L", 0), context.Event()
    with ProcessPoolExecutor(len(groups), context, initializer=_set_up, initargs=shared) as pool:
        parts = [loop.run_in_executor(pool, _client, address, group, max_new_tokens) for group in groups]

        async def stop() -> Receipts:
            is_over.set()
            return [receipt for part in await asyncio.gather(*parts) for receipt in part]

        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while num_warm.value < len(groups):
                    for part in parts:
                        if part.done():
                            part.result()
                    await asyncio.sleep(POLL_S)
            yield stop
        finally:
            is_over.set()


def _set_up(*shared: Any) -> None:
    _SHARED.extend(shared)


def _client(address: str, seeds: range, max_new_tokens: int) -> Receipts:
    return asyncio.run(_follow(address, seeds, max_new_tokens))


async def _follow(address: str, seeds: range, max_new_tokens: int) -> Receipts:
    num_warm, is_over = _SHARED
    receipts: Receipts = []
    counts = dict.fromkeys(seeds, 0)
    is_warm = False

    async def stream(client: AsyncClient, seed: int) -> None:
        nonlocal is_warm
        rng = random.Random(seed)
        tokens = [rng.randrange(256, 4096) for _ in range(PROMPT_TOKENS)]
        prompt, options = request(tokens, max_new_tokens, TEMPERATURE, seed)
        async for chunk in client.generate(prompt, **options):
            if chunk.token_ids:
                receipts.append((time.monotonic_ns(), chunk.published_ns))
                counts[seed] += len(chunk.token_ids)
            if not is_warm and min(counts.values()) >= WARM_UP_TOKENS:
                is_warm = True
                with num_warm.get_lock():
                    num_warm.value += 1

    async with AsyncExitStack() as held:
        # Each stream has a connection of its own: gRPC shares a connection where the settings are the same.
        found = [AsyncClient(address, keepalive=Keepalive(interval_ms=10_000 + seed)) for seed in seeds]
        streams = [
            stream(await held.enter_async_context(client), seed) for client, seed in zip(found, seeds, strict=True)
        ]
        async with background(asyncio.to_thread(is_over.wait), *streams) as (stopped, *tasks):
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            early = [repr(task.exception() or "its last token arrived") for task in tasks if task.done()]
            is_over.set()
    if early:
        raise RuntimeError(f"streams ended within the window: {early}")
    return receipts


async def _sample(plan: Plan, served: Served, scenario: Scenario) -> AsyncIterator[Row]:
    """Streams a batch of requests and measures while all of them run."""
    batch = scenario.about["batch"]
    async with AsyncClient(served.address) as client:
        info = await with_draft(client)
    meter = StepMeter(served, info)
    async with clients(served.address, batch, info.context_tokens - PROMPT_TOKENS) as stop:
        before, begun_ns = await meter.read(), time.monotonic_ns()
        await asyncio.sleep(plan.seconds)
        ended_ns, after = time.monotonic_ns(), await meter.read()
        receipts = await stop()
    sums, cpu_s = meter.gained(before, after)
    late_ms = [1e-6 * (received - sent) for received, sent in receipts if begun_ns <= sent and received <= ended_ns]
    yield {
        "num_steps": sums.num_steps,
        "step_ms": sums.mean_ms(sums.step_s),
        "messages_per_step": len(late_ms) / sums.num_steps / batch,  # of a stream; 1 is a message with each step
        "publish_to_client_p50_ms": median(late_ms),
        "publish_to_client_p99_ms": quantiles(late_ms, n=100)[98],
        "cpu_ms": {name: sums.mean_ms(seconds) for name, seconds in cpu_s.items()},  # of a step
        "host": host(plan.device),
    }


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures delivery."""
    setup, table = Setup.named(plan.shape), Table(file)
    context_tokens = PROMPT_TOKENS + MAX_NEW_TOKENS if plan.device == "cuda" else setup.context_tokens
    async with Stack(device=plan.device) as stack:
        await asyncio.gather(stack.worker("verify", **setup.accepting()), stack.worker("draft", **setup.draft_options))
        await run(stack, plan.scenarios(context_tokens), partial(_sample, plan), table)
