"""The sampler's kernels against the sampler, and their noise against `services/models/sampler.py`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.wire.sequence import LEAST_TEMPERATURE, SamplingParams
from slipstream.services.models import sampler
from slipstream.services.models.kernels import sampling
from slipstream.services.models.kernels.sampling import sample
from slipstream.services.models.sampler import SamplingRows, gumbel, words_of
from tests.harness.sampling import examples, is_sampled
from tests.harness.sampling_cases import KINDS, TIED, TIES
from tests.services.models.kernels.noise_case import gumbel_by_kernel, words_by_kernel

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.sampled_module(8)]
"""Triton's interpreter is numpy, which warns of the infinities that the kernels mean."""

SIZES = [1, 272, 1100, *([128_256] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Several blocks of the vocabulary in few tokens, as the interpreter is slow."""
    if device.type == "cpu":
        monkeypatch.setattr(sampling, "_BLOCK", 512)


def draw(
    logits: torch.Tensor, params: list[SamplingParams], positions: torch.Tensor, device: torch.device, **options: Any
) -> list[int]:
    rows = SamplingRows.of(params, device=device)
    tokens = sample(logits.to(device), rows, positions.to(device), **options)
    assert tokens.dtype == torch.int64
    return tokens.tolist()


@pytest.mark.parametrize(
    ("seed", "position", "first"), [(0, 0, 0), (-1, 2**32 - 1, 128_192), (-(2**63) + 5, 2**31, 4096), (77, 3, 64)]
)
def test_words(seed: int, position: int, first: int, device: torch.device) -> None:
    ids = torch.arange(first, first + 64)[None]
    expected = words_of(ids, torch.tensor([seed]), torch.tensor([position]))[0]
    for words in words_by_kernel(seed, position, first, device):
        assert words.tolist() == expected.tolist()


def test_noise_of_words(device: torch.device) -> None:
    """Exact noise is what the CPU has, but for the last bit of a logarithm; rough noise leads to the same token."""
    print("numpy seed 4")
    edges = [0, 1, 2, 3, 2**32 - 1, 2**32 - 2, 2**31 - 1, 2**31, 2**28 - 1, 2**28, 2**28 + 1]
    near_one = (2**32 * (1 - np.exp(-1.0))) + np.arange(-500, 500)  # where the noise is about 0
    random = np.random.default_rng(4).integers(0, 2**32, 1 << (20 if device.type == "cuda" else 14))
    words = torch.from_numpy(np.concatenate((edges, near_one.astype(np.int64), random)))
    exact, rough = (noise.cpu() for noise in gumbel_by_kernel(words.to(device)))
    expected = torch.from_numpy(gumbel(words.double().numpy()).astype(np.float32))
    ulps = (exact.view(torch.int32).to(torch.int64) - expected.view(torch.int32).to(torch.int64)).abs()
    print(f"{int((ulps > 0).sum())} of {len(words)} differ, by {int(ulps.max())} units in the last place at most")
    assert ulps.max() <= 1
    assert (rough - expected).abs().max() < 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "whole"])
def test_equals_the_sampler(vocab_size: int, kind: str, device: torch.device) -> None:
    """`bfloat16` and `whole` numbers: many tokens with the same logit."""
    print("torch seed 9")
    generator = torch.Generator().manual_seed(9)
    params = list(KINDS) * (2 if vocab_size < 100_000 else 4)
    logits = 3 * torch.randn(len(params), vocab_size, generator=generator)
    if kind == "whole":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = logits.to(torch.bfloat16)
    positions = torch.randint(0, 2**32, (len(params),), generator=generator)
    expected = sampler.sample(logits.to(torch.float32), SamplingRows.of(params), positions)
    assert draw(logits, params, positions, device) == expected.tolist()


def test_without_filters(device: torch.device) -> None:
    print("torch seed 10")
    generator = torch.Generator().manual_seed(10)
    params = [KINDS[0], KINDS[1]] * 10
    logits = torch.randn(20, 1300, generator=generator)
    positions = torch.randint(0, 1000, (20,), generator=generator)
    expected = sampler.sample(logits, SamplingRows.of(params), positions)
    assert draw(logits, params, positions, device, has_filters=False) == expected.tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("changes", "expected"), TIES)
def test_ties_go_to_the_lower_id(changes: dict[str, Any], expected: set[int], device: torch.device) -> None:
    num_draws = 10 if device.type == "cpu" else 600
    logits = torch.tensor([TIED]).repeat(num_draws, 1)
    params = replace(SamplingParams(temperature=1.0, seed=1), **changes)
    tokens = draw(logits, [params] * num_draws, torch.arange(num_draws), device)
    assert tokens == sampler.sample(logits, SamplingRows.of([params] * num_draws), torch.arange(num_draws)).tolist()
    assert set(tokens) == expected or (num_draws == 10 and set(tokens) <= expected)


def test_ties_across_blocks(device: torch.device) -> None:
    """The kept ones of equal tokens are counted over three blocks."""
    block = 512 if device.type == "cpu" else 4096
    size = 2 * block + block // 5
    num_rows = examples(6, sampled=2)
    logits = torch.zeros(2 * num_rows, size)
    params = [SamplingParams(temperature=1.0, seed=3, top_k=block + 2)] * num_rows
    params += [SamplingParams(temperature=1.0, seed=3, top_p=(2 * block + 3) / size)] * num_rows
    positions = torch.arange(2 * num_rows)
    tokens = draw(logits, params, positions, device)
    assert tokens == sampler.sample(logits, SamplingRows.of(params), positions).tolist()
    assert max(tokens[:num_rows]) < block + 2
    assert max(tokens[num_rows:]) < 2 * block + 4
    assert is_sampled or block < max(tokens[num_rows:])


def test_little_of_a_flat_distribution(device: torch.device) -> None:
    """Top-p that keeps almost nothing takes many looks."""
    print("torch seed 12")
    seeds = range(examples(4, sampled=1))
    params = [SamplingParams(temperature=2.0, seed=seed, top_p=0.01) for seed in seeds]
    params += [SamplingParams(temperature=2.0, seed=seed, top_p=0.02, top_k=300, min_p=0.05) for seed in seeds]
    logits = torch.randn(len(params), 700, generator=torch.Generator().manual_seed(12))
    positions = torch.arange(len(params))
    expected = sampler.sample(logits, SamplingRows.of(params), positions)
    assert draw(logits, params, positions, device) == expected.tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("params", [*KINDS, SamplingParams(temperature=LEAST_TEMPERATURE)])
def test_extreme_logits_choose_a_token_of_the_vocabulary(params: SamplingParams, device: torch.device) -> None:
    infinite = float("inf")
    logits = torch.zeros(5, 10)
    logits[0, :9] = -infinite
    logits[1, 4] = 3e38
    logits[1, 5] = -3e38
    logits[2] = float("nan")
    logits[3, 3] = infinite
    logits[4] = -infinite
    tokens = draw(logits, [params] * 5, torch.arange(5), device)
    assert tokens[:2] == [9, 4]
    assert tokens[3] == 3
    assert all(0 <= token < 10 for token in tokens)


def test_a_draft_vocabulary(device: torch.device) -> None:
    """The noise, and the token, are those of the target's ids."""
    print("torch seed 11")
    generator = torch.Generator().manual_seed(11)
    token_ids = torch.randperm(3000, generator=generator)[:900].sort()[0]
    own = torch.randn(len(KINDS), 900, generator=generator)
    positions = torch.arange(len(KINDS))
    logits = torch.full((len(KINDS), 3000), float("-inf"))
    logits[:, token_ids] = own
    expected = sampler.sample(logits, SamplingRows.of(KINDS), positions)
    assert draw(own, list(KINDS), positions, device, token_ids=token_ids.to(device)) == expected.tolist()


def test_no_rows(device: torch.device) -> None:
    rows = SamplingRows.of([SamplingParams()], device=device)
    none = SamplingRows(**{field.name: getattr(rows, field.name)[:0] for field in fields(rows)})
    positions = torch.empty(0, dtype=torch.int64, device=device)
    assert sample(torch.empty(0, 10, device=device), none, positions).shape == (0,)
