"""Acceptance of chains."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.services.models.sampler import SimulatedAcceptance, _random_bits, accept, acceptance_rate


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
    simulated = SimulatedAcceptance(accept_length, num_draft_tokens)
    seeds = torch.arange(num_chains) % 7
    accepted = simulated(seeds, torch.arange(num_chains) * 3)
    assert int(accepted.min()) >= 0
    assert int(accepted.max()) <= num_draft_tokens
    # The standard deviation of a chain's number is below 2, that of the mean of all below 0.015.
    assert abs(1 + accepted.double().mean().item() - accept_length) < 0.05
    if accept_length == 3.5:
        assert set(accepted.tolist()) == set(range(num_draft_tokens + 1))


def test_the_bits_of_simulated_acceptance_are_those_of_splitmix64() -> None:
    """The upper halves of its published first outputs for seed 0, without the last shift, which changes one bit."""
    bits = _random_bits(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 3]))
    assert (bits ^ (bits >> 31)).tolist() == [0xE220A839, 0x6E789E6A, 0x06C45D18]


def test_simulated_acceptance_depends_on_seed_and_position_alone() -> None:
    simulated = SimulatedAcceptance(2.0, 3)
    seeds, lengths = torch.tensor([3, 3, 8, -1]), torch.tensor([10, 11, 10, 500])
    together = simulated(seeds, lengths)
    alone = torch.cat([simulated(seeds[row : row + 1], lengths[row : row + 1]) for row in range(4)])
    assert together.tolist() == alone.tolist()
    # A token's fate does not depend on where the chain began.
    chances = SimulatedAcceptance(1.5, 1)
    stands = chances(torch.zeros(100, dtype=torch.int64), torch.arange(100)).tolist()
    chains = SimulatedAcceptance(1.75, 2)(torch.zeros(99, dtype=torch.int64), torch.arange(99)).tolist()
    assert acceptance_rate(1.75, 2) == pytest.approx(0.5, abs=1e-9)
    expected = [0 if not first else 1 + second for first, second in itertools.pairwise(stands)]
    assert chains == expected


def test_acceptance_rate_at_the_ends() -> None:
    assert acceptance_rate(1.0, 4) == pytest.approx(0.0, abs=1e-12)
    assert acceptance_rate(5.0, 4) == pytest.approx(1.0, abs=1e-12)
