"""The tokens of a request are the same, whoever drafts, whatever runs beside it, however it is served.

A part of `benchmarks/lossless.py`, drawn anew each time, through the real services.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from slipstream.benchmarks.lossless import (
    CASES,
    REFERENCE,
    SAMPLINGS,
    WAYS,
    Case,
    Way,
    differences,
    serve,
)
from slipstream.benchmarks.models import NONE
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.streams import accept_length

NUM_PROMPTS = 3


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_random_part_of_all_cases_gives_the_same_tokens(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    ways, cases = draw(random.Random(seed))
    async with Stack(tmp_path / "logs") as stack:
        outputs = await serve(stack, ways, cases)
    assert not differences(outputs, cases)
    assert min(len(set(output.token_ids)) for output in outputs[REFERENCE]) > 2, "to only repeat proves nothing"
    for way in ways:
        if way.algorithm != NONE:
            assert accept_length(outputs[way]) > 1, "nothing was drafted"


def draw(rng: random.Random) -> tuple[list[Way], list[Case]]:
    """The reference, and what one scheduler serves with drafts by any algorithm; some prompts, with all samplings."""
    algorithm = rng.choice(sorted({way.algorithm for way in WAYS} - {NONE}))
    scheduler = rng.choice([way.scheduler for way in WAYS if way.algorithm == algorithm])
    ways = [way for way in WAYS if way.scheduler == scheduler]
    chosen = rng.sample(sorted({case.prompt for case in CASES}), NUM_PROMPTS)
    return [REFERENCE, *ways], [Case(prompt, sampling) for prompt in chosen for sampling in SAMPLINGS]


def test_every_dimension_meets_every_algorithm() -> None:
    """Checks the combinations that the complete script covers."""
    for algorithm in {way.algorithm for way in WAYS}:
        own = [way for way in WAYS if way.algorithm == algorithm]
        pairs = {(way.run_ahead, way.concurrency) for way in own}
        assert pairs == {(run_ahead, concurrency) for run_ahead in (0, 1, 2) for concurrency in (1, 8)}
        assert {(way.chunk_tokens, way.concurrency) for way in own} == {
            (chunk, concurrency) for chunk in {way.chunk_tokens for way in WAYS} for concurrency in (1, 8)
        }
        assert {way.is_mixed for way in own} == ({False} if algorithm == NONE else {False, True})
