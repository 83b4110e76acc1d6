"""Clients that come, go and return while services are killed: half a minute of `benchmarks/soak.py`, and its line."""

from __future__ import annotations

import random

import pytest

from slipstream.benchmarks.soak import Plan, Usage, soak


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_request_has_one_end_and_nothing_is_left_in_use() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    report = await soak(Plan(minutes=0.5, fault_every_s=4.0, seed=seed))
    assert report["problems"] == []
    assert len(report["quiet"]) == 3
    assert report["faults"]
    assert min(report["outcomes"][end] for end in ("length", "abort", "left")) > 0


def test_growth_is_found_and_a_warm_up_is_none() -> None:
    times = [float(second) for second in range(200)]
    usage = Usage("scheduler", 1, times)
    usage.memory_mib = [min(200.0, 100.0 + 5 * at) for at in times]
    usage.threads = [10 + int(at) % 2 for at in times]
    usage.descriptors = [20 + int(at) // 20 for at in times]
    assert _slopes(usage) == {"memory_mib": False, "threads": False, "descriptors": True}
    assert Usage("draft", 2, times[:50], times[:50]).growths() == []


def test_noise_is_no_growth_and_a_slope_in_noise_is_one() -> None:
    rng = random.Random(0)
    times = [10.0 * sample for sample in range(60)]
    usage = Usage("scheduler", 1, times)
    usage.threads = [10] * 60
    # As many open descriptors as connections at the moment, and more of them late by chance.
    usage.descriptors = [rng.choice((29, 36)) for _ in times[:55]] + [36] * 5
    # A leak of 5 MiB in a minute, and an epoch's memory that is away at times.
    usage.memory_mib = [250.0 + at / 12 - rng.choice((0, 0, 0, 70)) for at in times]
    assert _slopes(usage) == {"memory_mib": True, "threads": False, "descriptors": False}


def _slopes(usage: Usage) -> dict[str, bool]:
    return {growth["quantity"]: growth["is_slope"] for growth in usage.growths()}
