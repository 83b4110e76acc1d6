"""Products of experts against each expert by itself, whatever the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.services.models.decoder import RMSNorm
from slipstream.services.models.experts import Experts
from slipstream.services.models.experts_config import ExpertsConfig
from slipstream.services.models.families import Mixture, Scoring
from slipstream.services.models.kernels.grouped import outputs_of_choices
from slipstream.services.models.kernels.routing import Routed, by_expert, route
from slipstream.services.models.packed import Quantised
from slipstream.services.models.quantization import MXFP4_GROUP, PackedWeights, Packing
from tests.harness.packed_checkpoints import FP4

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
LAYOUTS = {
    "mxfp4": PackedWeights(packing=Packing.MXFP4, group_size=MXFP4_GROUP),
    "4 bits": PackedWeights(packing=Packing.GPTQ, group_size=128),
    "8 bits, groups of 32": PackedWeights(packing=Packing.GPTQ, group_size=32, num_bits=8),
}
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
        found = outputs_of_choices(experts, Routed(x, choice, shares)).sum(dim=1).cpu()
        made = exact._by_expert(x.cpu().to(torch.float64), choice.cpu()).view(*choice.shape, -1)
        expected = (made * shares.cpu()[..., None]).sum(dim=1)
        error = (found - expected).norm() / expected.norm()
        assert error < ERRORS[dtype], f"{error:.6f}"


def fill_packed(packed: Experts, exact: Experts, layout: PackedWeights) -> None:
    """Fills experts with random numbers, and others with what they are worth."""
    generator, own = torch.Generator().manual_seed(3), dict(packed.named_parameters())
    for name, parameter in exact.named_parameters():
        if name in own:
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            own[name].copy_(scale * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(own[name])
            continue
        ints = packed.gate_up_ints if name == "gate_up" else packed.down_ints
        assert ints is not None
        rows, columns = parameter.shape[1:]
        groups = torch.arange(columns) // (layout.group_size or columns)
        shape, most = (rows, layout.num_groups(columns)), 1 << layout.num_bits
        for expert, weight in enumerate(parameter):
            numbers = torch.randint(0, most, (rows, columns), generator=generator)
            if layout.is_of_ints:
                zeros = torch.randint(0, most, shape, generator=generator)
                scales = (torch.rand(shape, generator=generator) * 3 / most * columns**-0.5).half().float()
                part = Quantised(numbers, zeros, scales, groups)
                worth = part.worth()
            else:
                exponents = torch.randint(119, 125, shape, generator=generator).byte()
                part = Quantised(numbers, exponents, exponents, groups)
                worth = torch.tensor(FP4)[numbers] * 2.0 ** (exponents.float() - 127)[:, groups]
            weight.copy_(worth)
            ints.fill(expert * rows, Quantised(*(each.to(ints.bits.device) for each in part)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [PLAIN, BOUNDED, LARGE], ids=["plain", "bounded", "large tiles"])
@pytest.mark.parametrize("num_rows", [1, 40, 130])
def test_packed_experts(
    num_rows: int, config: ExpertsConfig, layout: str, device: torch.device, dtype: torch.dtype
) -> None:
    config, hidden, packing = replace(config, width=128), 256, LAYOUTS[layout]
    packed = Experts(config, hidden, device=device, dtype=dtype, packed=packing)
    exact = Experts(config, hidden, device=torch.device("cpu"), dtype=torch.float64)
    fill_packed(packed, exact, packing)
    x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(num_rows)).to(device, dtype)
    chosen, shares = packed.route(x)
    made = exact._by_expert(x.cpu().to(torch.float64), chosen.cpu()).view(*chosen.shape, -1)
    expected = (made * shares.cpu()[..., None]).sum(dim=1)
    found = outputs_of_choices(packed, Routed(x, chosen, shares)).sum(dim=1).cpu()
    error = (found - expected).norm() / expected.norm()
    assert error < ERRORS[dtype], f"{error:.6f}"


def test_a_row_has_the_same_bits_beside_any_others(device: torch.device, dtype: torch.dtype) -> None:
    """In steps of one size."""
    experts = experts_of(BOUNDED, device, dtype)
    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    chosen, shares = experts.route(x)
    expected = outputs_of_choices(experts, Routed(x, chosen, shares))
    others = torch.cat((x[:1], 3 * x[1:].flip(0)))
    choices = torch.cat((chosen[:1], (chosen[1:] + 1) % BOUNDED.num_experts))
    assert torch.equal(outputs_of_choices(experts, Routed(others, choices, shares))[0], expected[0])


ROUTINGS = {
    "softmax": PLAIN,
    "softmax, not normalised": replace(PLAIN, is_normalised=False),
    "softmax of the chosen, biases": BOUNDED,
    "sigmoid, a bias of the choice": replace(
        PLAIN, mixture=Mixture(scoring=Scoring.SIGMOID, choice_bias="bias"), scaling=2.5, num_experts=40, num_chosen=6
    ),
    "groups": replace(
        PLAIN, mixture=Mixture(scoring=Scoring.SIGMOID), num_experts=8, num_groups=4, num_chosen_groups=2
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_rows", [1, 70, 530])
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_chooses_as_pytorch(
    name: str, has_norm: bool, num_rows: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Also where experts have equal scores."""
    config = ROUTINGS[name]
    if config.mixture.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        config = replace(config, mixture=replace(config.mixture, scoring=Scoring.SOFTMAX_OF_CHOSEN))
    experts = experts_of(config, device, dtype)
    assert experts.router.weight is not None
    experts.router.weight[3] = experts.router.weight[1]
    if experts.router.bias is not None:
        experts.router.bias[3] = experts.router.bias[1]
    norm = RMSNorm(torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN, device=device, dtype=dtype)), 1e-5)
    x = 3 * torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(7)).to(device, dtype)
    found = route(experts, x, norm if has_norm else None)
    expected = norm(x) if has_norm else x
    torch.testing.assert_close(found.x, expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    chosen, shares = experts.route(found.x)
    assert torch.equal(found.chosen, chosen)
    torch.testing.assert_close(found.shares, shares, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_numbers_that_are_not_finite_choose_experts_that_exist(device: torch.device) -> None:
    experts = experts_of(PLAIN, device, torch.float32)
    x = torch.full((2, HIDDEN), torch.nan, device=device)
    found = route(experts, x)
    assert bool(((found.chosen >= 0) & (found.chosen < PLAIN.num_experts)).all())
    assert bool(found.shares.isnan().all())
    assert bool(outputs_of_choices(experts, found).isnan().all())


@pytest.mark.parametrize("num_choices", [1, 63, 200, 5000])
def test_choices_in_the_order_of_their_experts(num_choices: int, device: torch.device) -> None:
    """Choices of one expert keep their order, also where there are more experts than choices."""
    generator = torch.Generator().manual_seed(num_choices)
    chosen = torch.randint(0, 70, (num_choices, 1), generator=generator).to(device)
    order, ends = by_expert(chosen, 100)
    assert torch.equal(order, chosen.flatten().sort(stable=True).indices)
    assert torch.equal(ends.cpu(), torch.bincount(chosen.flatten().cpu(), minlength=100).cumsum(0).to(torch.int32))
