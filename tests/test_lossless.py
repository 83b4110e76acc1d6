"""The tokens of a request are the same, whoever drafts, whatever runs beside it, however far the hosts run ahead.

A random sixth of `benchmarks/lossless.py`, through the real services.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks.lossless import CASES, REFERENCE, WAYS, differences, serve
from slipstream.benchmarks.serving_stack import ServingStack

if TYPE_CHECKING:
    from pathlib import Path

SHARE = 6


@pytest.mark.timeout(300)
async def test_a_random_sixth_of_all_cases_gives_the_same_tokens(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # One run-ahead of three, half of the cases: drawn so that drafting and plain decoding are always compared.
    run_ahead = rng.choice((0, 1, 2))
    cases = sorted(rng.sample(CASES, k=3 * len(CASES) // SHARE), key=CASES.index)
    ways = [way for way in WAYS if way.run_ahead == run_ahead or way == REFERENCE]
    async with ServingStack.start(tmp_path / "logs") as stack:
        outputs = await serve(stack, ways, cases)
    assert not differences(outputs, cases)
    assert min(len(set(output)) for output in outputs[REFERENCE]) > 2, "outputs that only repeat prove nothing"
