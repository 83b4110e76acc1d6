"""The comparison of services that measure with services that do not: both serve, and only one of them measures."""

from __future__ import annotations

import sys

import pytest

from slipstream.benchmarks.metrics_cost import Cost, Pair, measure
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import target_dir
from slipstream.client import AsyncClient
from slipstream.common.rpc.scrape import scrape


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_both_serve_and_are_timed() -> None:
    cost = await measure(repeats=1, steps=20)
    assert len(cost.pairs) == 1
    assert cost.pairs[0].with_us > 0
    assert cost.pairs[0].without_us > 0


@pytest.mark.timeout(120)
async def test_the_silent_scheduler_measures_nothing() -> None:
    port, metrics_port = free_ports(2)
    program = (sys.executable, "-m", "slipstream.benchmarks.unmeasured", "scheduler")
    async with Stack() as stack:
        verify = await stack.worker("verify", "--model", str(target_dir()), "--device", "cpu")
        scheduler = stack.scheduler(
            *("--verify", verify, "--device", "cpu"), port=port, metrics_port=metrics_port, program=program
        )
        async with scheduler as address, AsyncClient(address) as client:
            tokens = [chunk.token_ids async for chunk in client.generate("x", max_new_tokens=5, ignore_eos=True)]
            found = await scrape(metrics_port)
    assert sum(map(len, tokens)) == 5
    names = {name for name, _ in found.samples}
    assert "slipstream_epoch" in names
    assert not [
        name for name in names if name.startswith(("slipstream_step_", "slipstream_request", "slipstream_rpcs"))
    ]


def test_the_cost_is_the_median_of_the_pairs_differences() -> None:
    pairs = [Pair(repeat=n, with_us=1000 + 10 * n, without_us=1000) for n in range(9)]
    cost = Cost.of(pairs)
    assert cost.median_us == 40
    assert cost.low_us <= 40 <= cost.high_us
    assert cost.share_of_a_millisecond == 0.04
    assert cost.step_us == 1000
