"""Products of experts against each expert by itself, whatever the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.services.models.experts import Experts
from slipstream.services.models.experts_config import ExpertsConfig
from slipstream.services.models.families import Mixture, Scoring
from slipstream.services.models.kernels.grouped import run_experts
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
        found = run_experts(experts, x, choice, shares).cpu()
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
    error = (run_experts(packed, x, chosen, shares).cpu() - expected).norm() / expected.norm()
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
