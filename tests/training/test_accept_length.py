"""Accept length offline: walking outputs, repetition, and a draft that is the target."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.training.accept_length import Setting, Walk, generate, matches, measure, repeated_share, walk
from tests.harness.checkpoints import write_checkpoint

T, F = True, False


@pytest.mark.parametrize(
    ("agreed", "expected"),
    [
        ([F] * 11, Walk(steps=8, accepted=(0, 0))),
        ([T] * 11, Walk(steps=3, accepted=(3, 3))),
        # Token 0 is prefill's; the steps' bonus tokens are 2, 3, 6 and 8, whatever the draft says of those.
        ([F, T, F, F, T, T, F, T, F, F, F], Walk(steps=4, accepted=(3, 1))),
        # The last step begins at token 7 and counts whole, past the 9 tokens of the output.
        ([F, T, T, F, T, F, T, F, T, T, F], Walk(steps=4, accepted=(4, 2))),
    ],
)
def test_walk(agreed: list[bool], expected: Walk) -> None:
    assert walk(agreed, Setting(num_draft_tokens=2, num_tokens=9)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_every_token_of_an_output_belongs_to_one_step(seed: int) -> None:
    rng = random.Random(seed)
    setting = Setting(num_draft_tokens=rng.randrange(1, 6), num_tokens=rng.randrange(2, 60))
    share = rng.random()
    agreed = [rng.random() < share for _ in range(setting.num_tokens + setting.num_draft_tokens)]
    result = walk(agreed, setting)
    num_covered = result.steps + sum(result.accepted)
    assert setting.num_tokens - 1 <= num_covered <= setting.num_tokens - 1 + setting.num_draft_tokens
    assert list(result.accepted) == sorted(result.accepted, reverse=True)
    assert result.accepted[0] <= result.steps


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (list(range(20)), 0),
        ([1, 2, 3], 0),
        ([7] * 6, 1),
        ([7] * 5, 0),
        ([*range(5), 9, *range(5)], 10 / 11),
        ([1, 2, 3] * 4, 1),
    ],
)
def test_repeated_share(tokens: list[int], expected: float) -> None:
    assert repeated_share(tokens) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("models") / "it", seed=11)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_is_the_target_is_always_right(model: Any, temperature: float) -> None:
    setting = Setting(num_draft_tokens=3, temperature=temperature, num_tokens=9, seeds=(1, 2))
    prompts = [[1, 2, 3, 4, 5], [9], [8, 7, 6]]
    rows = generate(model, prompts, 1, setting)
    assert rows.shape == (3, 5 + 9 + 3)
    assert [row[: len(prompt)] for row, prompt in zip(rows.tolist(), prompts, strict=True)] == prompts
    alone = generate(model, prompts[1:2], 1, setting)
    assert torch.equal(alone[0], rows[1, : alone.shape[1]]), "a row does not depend on the others"
    assert matches(model, rows, [len(prompt) for prompt in prompts], 1, setting).all()
    result = measure(model, model, prompts, setting)
    assert result["mean_accept_length"] == 4
    assert result["accepted_per_position"] == [1, 1, 1]
    assert result["verify_steps"] == 2 * 3 * 2, "8 tokens after prefill's take two steps of four"
