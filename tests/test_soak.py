"""Clients that come, go and cancel leave nothing behind: 10 seconds of `benchmarks/soak.py`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks.soak import soak
from slipstream.benchmarks.stack import Stack

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 10.0


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_everything_is_as_it_was_after_many_clients(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    async with Stack(tmp_path / "logs") as stack:
        report = await soak(stack, SECONDS, seed)
    assert not report.problems
    assert report.outcomes["length"] > 0
    assert report.outcomes["abort"] > 0
    assert report.outcomes["left"] > 0
