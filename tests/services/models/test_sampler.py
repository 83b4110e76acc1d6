"""The sampler and logprobs against naive ones in float64, frequencies against softmax, and the acceptance of chains."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.common.wire.sequence import LEAST_TEMPERATURE, SamplingParams
from slipstream.services.models.sampler import (
    SamplingRows,
    SimulatedAcceptance,
    _random_bits,
    accept,
    acceptance_rate,
    gumbel_noise,
    logprobs_of,
    row_parts,
    sample,
)
from tests.harness.sampling import examples
from tests.harness.sampling_cases import KINDS, TIED, TIES

Logits = npt.NDArray[np.float32]

GREEDY = SamplingParams()
CHI_SQUARE_11 = 31.26
"""Exceeded once in a thousand times with 11 degrees of freedom."""


def draw(logits: Logits, params: list[SamplingParams], positions: list[int]) -> list[int]:
    tokens = sample(torch.from_numpy(logits), SamplingRows.of(params), torch.tensor(positions))
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def naive_probabilities(logits: Logits, params: SamplingParams) -> tuple[dict[int, float], float]:
    """The probabilities, relative to the greatest, of the tokens that pass the filters; and how close a call it was."""
    margin = 1.0
    temperature, top_p, min_p = (float(np.float32(value)) for value in (params.temperature, params.top_p, params.min_p))
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if params.top_k:
        kept = kept[: params.top_k]
    if top_p < 1:
        total, before, shortest = sum(weights[kept]), 0.0, []
        for token in kept:
            margin = min(margin, abs(before / total - top_p))
            if before >= top_p * total:
                break
            shortest.append(token)
            before += weights[token]
        kept = shortest
    if min_p > 0:
        margin = min(margin, *(abs(weights[token] - min_p) for token in kept[1:]), 1.0)
        kept = [token for token in kept if weights[token] >= min_p]
    return {token: float(weights[token]) for token in kept}, margin


def naive_sample(logits: Logits, params: SamplingParams, position: int) -> int:
    if params.is_greedy:
        return int(logits.argmax())
    noise = gumbel_noise(SamplingRows.of([params]).seed, torch.tensor([position]), len(logits))[0].tolist()
    weights, margin = naive_probabilities(logits, params)
    assume(margin > 1e-5)
    with np.errstate(divide="ignore"):
        scores = {token: np.log(weight) + noise[token] for token, weight in weights.items()}
    best, *others = sorted(scores.values(), reverse=True)
    assume(not others or best - others[0] > 1e-4)
    return max(scores, key=lambda token: scores[token])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_a_row_that_is_not_finite_is_known_by_its_token(bad: float, filters: dict[str, Any]) -> None:
    """Whoever looks at the logit of what was chosen sees it. Other rows have their tokens."""
    logits = np.random.default_rng(1).normal(0, 2, (4, 50)).astype(np.float32)
    params = [GREEDY, *(SamplingParams(temperature=1.0, seed=seed, **filters) for seed in (1, 2, 3))]
    expected = draw(logits, params, [1, 2, 3, 4])
    logits[:3, 30] = bad
    assert draw(logits, params, [1, 2, 3, 4]) == [30, 30, 30, expected[3]]


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.5, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 30, 1000, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.4, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=examples(400), deadline=None, derandomize=True, database=None)
@given(
    numpy_seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 70),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    is_coarse=st.booleans(),
    rows=st.lists(st.tuples(some_params, st.integers(0, 2**32 - 1)), min_size=1, max_size=6),
)
def test_equals_the_naive_sampler(
    numpy_seed: int,
    vocab_size: int,
    scale: float,
    is_coarse: bool,
    rows: list[tuple[SamplingParams, int]],
) -> None:
    logits = np.random.default_rng(numpy_seed).normal(0, scale, (len(rows), vocab_size)).astype(np.float32)
    if is_coarse:
        logits = logits.round()  # many tokens with the same logit
    expected = [naive_sample(row, *place) for row, place in zip(logits, rows, strict=True)]
    assert draw(logits, [params for params, _ in rows], [position for _, position in rows]) == expected


@pytest.mark.parametrize("vocab_size", [97, 4096, 40_000])
def test_a_row_is_the_same_alone_and_among_others(vocab_size: int) -> None:
    print("numpy seed 11")
    rng = np.random.default_rng(11)
    params = [KINDS[index % len(KINDS)] for index in range(24)]
    logits = rng.normal(0, 3, (24, vocab_size)).astype(np.float32)
    positions = rng.integers(0, 5000, 24).tolist()
    together = draw(logits, params, positions)
    assert len(set(together)) > 12
    for row in range(24):
        assert draw(logits[row : row + 1], params[row : row + 1], positions[row : row + 1]) == [together[row]]
    order = rng.permutation(24).tolist()
    shuffled = draw(logits[order], [params[row] for row in order], [positions[row] for row in order])
    assert shuffled == [together[row] for row in order]


@pytest.mark.parametrize(("changes", "expected"), TIES)
def test_ties_go_to_the_lower_id(changes: dict[str, Any], expected: set[int]) -> None:
    logits = np.repeat(np.array([TIED], np.float32), 600, axis=0)
    params = replace(SamplingParams(temperature=1.0, seed=1), **changes)
    assert set(draw(logits, [params] * 600, list(range(600)))) == expected


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.999}])
def test_ties_of_scores_go_to_the_lower_id(changes: dict[str, Any]) -> None:
    """Of two tokens, the one with less noise has as much more in its logit."""
    params, num_ties = replace(SamplingParams(temperature=1.0, seed=4), **changes), 0
    for position in range(100):
        low, high = gumbel_noise(SamplingRows.of([params]).seed, torch.tensor([position]), 10)[0, [2, 7]].numpy()
        deficits = np.array([low, high]) - min(low, high)
        if deficits.max() < 3 and len(set(np.array([low, high]) - deficits)) == 1:
            logits = np.full((1, 10), -50, np.float32)
            logits[0, [2, 7]] = -deficits
            assert draw(logits, [params], [position]) == [2]
            num_ties += 1
    assert num_ties > 20


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 6},
        {"top_p": 0.85},
        {"min_p": 0.08},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_frequencies_are_those_of_softmax(changes: dict[str, Any], varied: str) -> None:
    print("numpy seed 5")
    num_draws = 20_000
    logits = np.random.default_rng(5).normal(0, 1.2, 12).astype(np.float32)
    params = replace(SamplingParams(temperature=1.0, seed=77), **changes)
    rows = SamplingRows.of([params] * num_draws)
    positions = torch.arange(num_draws)
    if varied == "seed":
        rows, positions = replace(rows, seed=positions * 2654435761), torch.full((num_draws,), 9)
    tokens = sample(torch.from_numpy(logits).repeat(num_draws, 1), rows, positions)
    counts = np.bincount(tokens.numpy(), minlength=12)
    weights, _ = naive_probabilities(logits, params)
    assert 2 < len(weights) <= 12
    assert set(np.flatnonzero(counts)) <= set(weights)
    expected = {token: num_draws * weight / sum(weights.values()) for token, weight in weights.items()}
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    assert statistic < CHI_SQUARE_11


def test_the_same_noise_couples_draft_and_target() -> None:
    """Daliri et al. (2024): tokens are equal with probability sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    print("numpy seed 8")
    num_draws = 20_000
    rng = np.random.default_rng(8)
    target = rng.normal(0, 1.5, 30).astype(np.float32)
    draft = target + rng.normal(0, 0.5, 30).astype(np.float32)
    rows = SamplingRows.of([SamplingParams(temperature=1.0, seed=4)] * num_draws)
    tokens = [
        sample(torch.from_numpy(logits).repeat(num_draws, 1), rows, torch.arange(num_draws))
        for logits in (draft, target)
    ]
    num_equal = accept(tokens[0][:, None], torch.stack((tokens[1], tokens[1]), dim=1))
    p, q = (np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum() for logits in (target, draft))
    expected = sum(1 / np.maximum(p / p[token], q / q[token]).sum() for token in range(30))
    assert 0.6 < expected < 0.9
    assert num_equal.to(torch.float64).mean().item() == pytest.approx(expected, abs=0.012)


def test_extreme_logits_choose_a_token_of_the_vocabulary() -> None:
    infinite = float("inf")
    logits = np.zeros((4, 10), np.float32)
    logits[0, :9] = -infinite
    logits[1, 4] = 3e38
    logits[1, 5] = -3e38
    logits[2] = np.nan
    logits[3, 3] = infinite
    for params in KINDS:
        tokens = draw(logits, [params] * 4, [1, 2, 3, 4])
        assert tokens[:2] == [9, 4]
        assert all(0 <= token < 10 for token in tokens)
        assert 0 <= draw(logits[2:3], [params], [1])[0] < 10
    tiny = SamplingParams(temperature=LEAST_TEMPERATURE)
    logits = np.array([[1.0, 1.5, 1.25, 1.5]], np.float32)
    assert draw(logits, [tiny], [0])[0] in (1, 3)


@pytest.mark.parametrize(
    ("shape", "begins", "size"),
    [((3, 1, 2**24 + 1), [0, 1, 2], 1), ((3, 2, 2**22), [0, 2], 2), ((3, 1, 9), [0], 2**24 // 9)],
)
def test_parts_of_rows_are_small_and_have_a_row_at_least(shape: tuple[int, ...], begins: list[int], size: int) -> None:
    parts = row_parts(torch.empty(shape, device="meta"))
    assert parts == [slice(begin, begin + size) for begin in begins]


def test_rows_of_a_table() -> None:
    table = SamplingRows.greedy(10)
    assert draw(np.eye(10, dtype=np.float32), [GREEDY] * 10, [0] * 10) == list(range(10))
    table.put(torch.tensor([7, 2]), SamplingRows.of([KINDS[4], KINDS[5]]))
    rows = table.take(torch.tensor([2, 2, 3, 3, 7, 7]))
    expected = SamplingRows.of([KINDS[5], KINDS[5], GREEDY, GREEDY, KINDS[4], KINDS[4]])
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        taken, wanted = getattr(rows, name), getattr(expected, name)
        assert taken.dtype == wanted.dtype
        assert torch.equal(taken, wanted), name
    assert expected.seed[-1] == -(2**63)


@pytest.mark.parametrize("vocab_size", [1, 7, 300])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_equal_the_naive_ones(vocab_size: int, num_top: int) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 6, (3, 4, vocab_size)).astype(np.float32)
    logits[1] = logits[1].round()  # many tokens with the same logit
    tokens = rng.integers(0, vocab_size, (3, 4))
    found = logprobs_of(torch.from_numpy(logits), torch.from_numpy(tokens), num_top)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=2, keepdims=True)).sum(axis=2, keepdims=True)) + exact.max(
        axis=2, keepdims=True
    )
    np.testing.assert_allclose(found.output, np.take_along_axis(exact, tokens[..., None], 2)[..., 0], atol=1e-5)
    order = np.argsort(-logits, axis=2, kind="stable")[..., :num_top]
    assert found.top_tokens.dtype == torch.int32
    np.testing.assert_array_equal(found.top_tokens, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(exact, order, 2), atol=1e-5)
    # What is told twice is told the same.
    is_chosen = found.top_tokens == torch.from_numpy(tokens)[..., None]
    assert torch.equal(found.top[is_chosen], found.output[..., None].expand_as(is_chosen)[is_chosen])


def test_logprobs_are_not_read_back_off_the_cpu() -> None:
    logits = torch.empty((2, 3, 50), device="meta")
    found = logprobs_of(logits, torch.empty((2, 3), dtype=torch.int64, device="meta"), 20)
    assert found.top.shape == (2, 3, 20)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data(), st.integers(0, 5), st.integers(0, 4))
def test_counts_leading_matches(data: st.DataObject, num_draft_tokens: int, num_rows: int) -> None:
    tokens = st.integers(0, 1)
    draft = [data.draw(st.lists(tokens, min_size=num_draft_tokens, max_size=num_draft_tokens)) for _ in range(num_rows)]
    target = [[*row, 0] for row in draft]
    for row in target:
        for index in data.draw(st.sets(st.integers(0, num_draft_tokens))):
            row[index] = 9
    expected = []
    for draft_row, target_row in zip(draft, target, strict=True):
        matches = 0
        while matches < num_draft_tokens and draft_row[matches] == target_row[matches]:
            matches += 1
        expected.append(matches)
    num_accepted = accept(
        torch.tensor(draft, dtype=torch.int64).view(num_rows, num_draft_tokens),
        torch.tensor(target, dtype=torch.int64).view(num_rows, num_draft_tokens + 1),
    )
    assert num_accepted.dtype == torch.int64
    assert num_accepted.tolist() == expected


@pytest.mark.parametrize("accept_length", [1.0, 2.5, 3.5, 5.0])
def test_simulated_acceptance_keeps_the_mean(accept_length: float) -> None:
    num_draft_tokens, num_chains = 4, 20_000
    simulated = SimulatedAcceptance.with_mean(accept_length, num_draft_tokens)
    seeds = torch.arange(num_chains) % 7
    accepted = simulated(seeds, torch.arange(num_chains) * 3)
    assert int(accepted.min()) >= 0
    assert int(accepted.max()) <= num_draft_tokens
    # The standard deviation of a chain's number is below 2, that of the mean of all below 0.015.
    assert abs(1 + accepted.double().mean().item() - accept_length) < 0.05
    if accept_length == 3.5:
        assert set(accepted.tolist()) == set(range(num_draft_tokens + 1))


def test_simulated_acceptance_by_position() -> None:
    """Each share is of the chains that were accepted so far."""
    shares, num_chains = (0.9, 0.5, 0.8), 40_000
    accepted = SimulatedAcceptance(shares)(torch.arange(num_chains) % 7, torch.arange(num_chains) * 3)
    for place, share in enumerate(shares):
        reached = accepted[accepted >= place]
        assert (reached > place).double().mean().item() == pytest.approx(share, abs=0.02)


def test_the_bits_of_simulated_acceptance_are_those_of_splitmix64() -> None:
    """The upper halves of its published first outputs for seed 0, without the last shift, which changes one bit."""
    bits = _random_bits(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 3]))
    assert (bits ^ (bits >> 31)).tolist() == [0xE220A839, 0x6E789E6A, 0x06C45D18]


def test_simulated_acceptance_depends_on_seed_and_position_alone() -> None:
    simulated = SimulatedAcceptance.with_mean(2.0, 3)
    seeds, lengths = torch.tensor([3, 3, 8, -1]), torch.tensor([10, 11, 10, 500])
    together = simulated(seeds, lengths)
    alone = torch.cat([simulated(seeds[row : row + 1], lengths[row : row + 1]) for row in range(4)])
    assert together.tolist() == alone.tolist()
    # A token's fate does not depend on where the chain began.
    chances = SimulatedAcceptance.with_mean(1.5, 1)
    stands = chances(torch.zeros(100, dtype=torch.int64), torch.arange(100)).tolist()
    chains = SimulatedAcceptance.with_mean(1.75, 2)(torch.zeros(99, dtype=torch.int64), torch.arange(99)).tolist()
    assert acceptance_rate(1.75, 2) == pytest.approx(0.5, abs=1e-9)
    expected = [0 if not first else 1 + second for first, second in itertools.pairwise(stands)]
    assert chains == expected


def test_acceptance_rate_at_the_ends() -> None:
    assert acceptance_rate(1.0, 4) == pytest.approx(0.0, abs=1e-12)
    assert acceptance_rate(5.0, 4) == pytest.approx(1.0, abs=1e-12)
