"""Products of experts against each expert by itself, whatever the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.services.models.experts import Experts
from slipstream.services.models.experts_config import ExpertsConfig
from slipstream.services.models.families import Mixture, Scoring
from slipstream.services.models.kernels.grouped import run_experts

ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative: sums are rounded between the products, at their end, and where a token's are added up."""
HIDDEN = 72
PLAIN = ExpertsConfig(
    mixture=Mixture(scoring=Scoring.SOFTMAX),
    num_experts=7,
    num_chosen=3,
    width=40,
    layers=(True,),
    is_normalised=True,
)
BOUNDED = replace(PLAIN, mixture=replace(PLAIN.mixture, is_stacked=True), limit=1.5, num_chosen=2)
LARGE = replace(PLAIN, num_experts=2, num_chosen=1)


def experts_of(config: ExpertsConfig, device: torch.device, dtype: torch.dtype) -> Experts:
    """Experts with random weights, whose outputs are of the size of their inputs."""
    experts = Experts(config, HIDDEN, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in experts.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 2 else 1.0
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return experts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [PLAIN, BOUNDED, LARGE], ids=["plain", "bounded", "large tiles"])
@pytest.mark.parametrize("num_rows", [1, 5, 40, 130])
def test_rows_get_what_their_experts_make(
    num_rows: int, config: ExpertsConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """In float64, also where an expert has no rows, or all."""
    experts = experts_of(config, device, dtype)
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows)).to(device, dtype)
    chosen, shares = experts.route(x)
    exact = experts_of(config, torch.device("cpu"), torch.float64)
    for theirs, own in zip(exact.parameters(), experts.parameters(), strict=True):
        theirs.data = own.data.cpu().to(torch.float64)
    for choice in (chosen, torch.zeros_like(chosen) + torch.arange(config.num_chosen, device=device)):
        found = run_experts(experts, x, choice, shares).cpu()
        made = exact._by_expert(x.cpu().to(torch.float64), choice.cpu()).view(*choice.shape, -1)
        expected = (made * shares.cpu()[..., None]).sum(dim=1)
        error = (found - expected).norm() / expected.norm()
        assert error < ERRORS[dtype], f"{error:.6f}"


def test_a_row_has_the_same_bits_beside_any_others(device: torch.device, dtype: torch.dtype) -> None:
    """In steps of one size."""
    experts = experts_of(BOUNDED, device, dtype)
    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    chosen, shares = experts.route(x)
    expected = run_experts(experts, x, chosen, shares)
    others = torch.cat((x[:1], 3 * x[1:].flip(0)))
    choices = torch.cat((chosen[:1], (chosen[1:] + 1) % BOUNDED.num_experts))
    assert torch.equal(run_experts(experts, others, choices, shares)[0], expected[0])
