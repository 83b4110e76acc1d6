"""Far more requests than the server can take, for a few seconds: `benchmarks/overload.py` without its stopwatch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks.overload import Plan, faults, overload, shortcomings
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.workloads import Lengths

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_requests_beyond_the_capacity_are_refused_and_the_others_served(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    plan = Plan(
        seconds=2.5,
        warm_up_s=1.0,
        capacity_seconds=1.5,
        capacity_warm_up_s=0.5,
        slots=4,
        queue=4,
        sample_s=0.1,
        seed=seed,
    )
    async with Stack(tmp_path / "logs") as stack:
        report = await overload(stack, Lengths(scale=0.1, context_tokens=256), plan)
    assert not faults(report)
    assert report["load"]["num_rejected"] > report["load"]["num_completed"] > 0
    assert report["load"]["rejection_ms"]["count"] == report["load"]["num_rejected"]
    assert report["goodput"] > 0
    assert set(report["footprints"]) == {"gateway", "scheduler", "verify", "draft"}
    assert all(isinstance(shortcoming, str) for shortcoming in shortcomings(report))
