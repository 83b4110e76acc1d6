"""The connection from a gateway's process to the scheduler breaks, is slow or stands still: every token comes once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.bundled import target_dir
from slipstream.client import AsyncClient
from slipstream.common.wire.job import OutputChunk
from tests.harness.breaking_proxy import BreakingProxy, breaking_proxy
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.gateway_processes import GatewayProcesses
from tests.harness.generation_server import collect, tokens_of
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, serving
from tests.harness.waiting import until

pytestmark = pytest.mark.timeout(120)

PROMPT = [5, 6, 7, 8, 9]
NUM_JOBS = 4
NUM_TOKENS = 120


@asynccontextmanager
async def behind_a_proxy(folder: Path) -> AsyncIterator[tuple[ScriptedScheduler, BreakingProxy, AsyncClient]]:
    """A gateway's process with its way to the scheduler, and its client."""
    scheduler = ScriptedScheduler(replace(DESCRIPTION, tokenizer_path=str(target_dir())))
    with ExitStack() as held:
        behind = held.enter_context(serving(scheduler, folder))
        async with breaking_proxy(behind, folder / "proxy.sock") as (way, proxy):
            gateways = GatewayProcesses(folder, scheduler, way, [f"unix:{folder}/clients.sock"])
            with closing(gateways):
                gateways.start(0)
                await gateways.serve(0)
                async with AsyncClient(gateways.addresses[0]) as client:
                    yield scheduler, proxy, client


def start(client: AsyncClient) -> list[asyncio.Task[list[OutputChunk]]]:
    """Starts the jobs."""
    return [
        asyncio.create_task(collect(client.generate(PROMPT, job_id=f"job-{number}", max_new_tokens=NUM_TOKENS)))
        for number in range(NUM_JOBS)
    ]


async def check(outputs: list[asyncio.Task[list[OutputChunk]]]) -> None:
    """Every job has its tokens, each once."""
    for chunks in await asyncio.gather(*outputs):
        assert tokens_of(chunks) == (PROMPT * NUM_TOKENS)[:NUM_TOKENS]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS


async def test_a_connection_that_is_reset_again_and_again(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with behind_a_proxy(tmp_path) as (scheduler, proxy, client):
        scheduler.pause_tokens = TOKENS_PER_STEP
        outputs = start(client)
        for _ in range(8):
            await until(lambda: len(scheduler.running) == NUM_JOBS)
            scheduler.pause_tokens += TOKENS_PER_STEP * rng.randrange(1, 4)
            # In the middle of what is sent, or after it.
            await asyncio.sleep(rng.random() * 0.02)
            before = scheduler.num_streams
            proxy.cut()
            await until(lambda before=before: scheduler.num_streams > before)  # type: ignore[misc]
        scheduler.pause_tokens = None
        await check(outputs)
        assert proxy.num_connections > 8


async def test_a_slow_connection(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path) as (scheduler, proxy, client):
        proxy.delay_s = 0.05
        scheduler.pause_tokens = 10 * TOKENS_PER_STEP
        outputs = start(client)
        await until(lambda: len(scheduler.running) == NUM_JOBS)
        scheduler.pause_tokens = None
        proxy.cut()
        await check(outputs)


async def test_a_connection_that_stands_still_is_given_up(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path) as (scheduler, proxy, client):
        scheduler.pause_tokens = 10 * TOKENS_PER_STEP
        outputs = start(client)
        await until(lambda: len(scheduler.running) == NUM_JOBS)
        proxy.loses_everything = True
        scheduler.pause_tokens = None
        # Only pings find out. What the scheduler has sent meanwhile is lost.
        before = proxy.num_connections
        await until(lambda: proxy.num_connections > before)
        assert not any(output.done() for output in outputs)
        proxy.loses_everything = False
        proxy.cut()
        await check(outputs)
