"""Checkpoints of each family, made on the spot and served by `slipstream up`: transformers' tokens come out."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from slipstream.client import AsyncClient
from slipstream.common.wire.job import OutputChunk
from tests.harness.checkpoints import write_checkpoint
from tests.harness.running import leftovers, running_up, status
from tests.harness.transformers_checkpoints import greedy_tokens
from tests.scheduler.test_families import CHANGES

pytestmark = pytest.mark.timeout(120)

SEED = 23
NUM_TOKENS = 48
CHUNK_TOKENS = 16
PROMPT_TOKENS = (1, 15, 16, 40, 130)
TEXT = "the man and the other one; " * 3
FAMILIES = tuple(CHANGES)
NUM_DRAFT_TOKENS = 3
ITS_OWN_DRAFT = "llama"


@pytest.mark.slow
async def test_a_family_drawn_at_random(tmp_path: Path) -> None:
    """A part of the others."""
    family = random.SystemRandom().choice(FAMILIES)
    print("family", family)
    await check(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family(tmp_path: Path, family: str) -> None:
    await check(tmp_path, family)


@pytest.mark.slow
async def test_a_target_that_is_its_own_draft(tmp_path: Path) -> None:
    drafted = await check(tmp_path, ITS_OWN_DRAFT, "--algorithm", "standalone")
    for chunks in drafted:
        usage = chunks[-1].usage
        assert usage is not None
        # Right every time; in the last step tokens are drafted that there is no room for.
        assert usage.num_verify_steps == -(-(NUM_TOKENS - 1) // (NUM_DRAFT_TOKENS + 1))


async def check(folder: Path, family: str, *options: str) -> list[list[OutputChunk]]:
    """Serves a checkpoint, as its own draft if the options say so, and compares; returns what came, by prompt."""
    target = write_checkpoint(folder / "target", family=family, seed=SEED, **CHANGES[family])
    if options:
        options = (*options, "--draft", str(target), "--fixed-draft-tokens", str(NUM_DRAFT_TOKENS))
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in PROMPT_TOKENS]
    as_ids = [*prompts, tokenizer.encode(TEXT)]
    assert len(as_ids[-1]) > CHUNK_TOKENS
    expected = greedy_tokens(target, as_ids, NUM_TOKENS)
    assert sum(len(set(tokens)) for tokens in expected) > 20 * len(expected), "one that repeats itself proves little"

    state_dir = folder / "state"
    sizes = (
        "--target",
        str(target),
        "--max-batched-tokens",
        str(CHUNK_TOKENS),
        "--slots",
        "4",
        "--kv-memory-mib",
        "64",
    )
    with running_up(state_dir, *sizes, *options) as up:
        children = up.children()
        assert status(state_dir)["algorithm"] == ("standalone" if options else "none")
        async with AsyncClient((state_dir / "server").read_text()) as client:
            # More than there are slots, so that some wait and the others' chunks and steps take turns.
            outputs = await asyncio.gather(*(generate(client, prompt) for prompt in [*prompts, TEXT]))
        up.signal(signal.SIGTERM)
        assert up.end() == 0, up.errors()
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not leftovers(state_dir)

    assert [[token for chunk in chunks for token in chunk.token_ids] for chunks in outputs] == expected
    text = "".join(chunk.text for chunk in outputs[-1])
    assert text == tokenizer.decode(expected[-1], skip_special_tokens=True)
    return outputs


async def generate(client: AsyncClient, prompt: str | list[int]) -> list[OutputChunk]:
    """Returns all chunks of a greedy request."""
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return [chunk async for chunk in client.generate(prompt, **options)]
