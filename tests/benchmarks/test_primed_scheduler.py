"""Schedulers that are primed: they serve when they are told to, and none outlives its stack."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import standalone_dir, target_dir
from slipstream.client import AsyncClient

SCHEDULER = "slipstream.scheduler.main"


@pytest.mark.timeout(120)
async def test_a_primed_scheduler_serves_and_one_that_is_not_needed_ends() -> None:
    port, metrics_port = free_ports(2)
    async with Stack() as stack:
        verify, draft, primed, spare = await asyncio.gather(
            stack.dummy_worker("verify", 1, "--model", str(target_dir()), "--device", "cpu"),
            stack.dummy_worker("draft", 1, "--model", str(standalone_dir()), "--device", "cpu"),
            stack.primed(SCHEDULER),
            stack.primed(SCHEDULER),
        )
        options = ("--verify", verify, "--draft", draft, "--device", "cpu")
        scheduler = stack.scheduler(*options, port=port, metrics_port=metrics_port, program=primed)
        async with scheduler as address, AsyncClient(address) as client:
            tokens = [chunk.token_ids async for chunk in client.generate("x", max_new_tokens=5, ignore_eos=True)]
            assert (await client.server_info()).num_slots
        assert sum(map(len, tokens)) == 5
        assert primed.process.returncode == 0
        assert spare.process.returncode is None
    assert spare.process.returncode is not None


@pytest.mark.timeout(60)
async def test_a_primed_scheduler_ends_with_its_input() -> None:
    async with Stack() as stack:
        primed = await stack.primed(SCHEDULER)
        assert primed.process.stdin is not None
        primed.process.stdin.close()
        assert await primed.process.wait() == 0


@pytest.mark.timeout(60)
async def test_what_cannot_be_primed_is_an_error() -> None:
    async with Stack() as stack:
        with pytest.raises(RuntimeError, match="before it was primed"):
            await stack.primed("slipstream.scheduler.nowhere")
