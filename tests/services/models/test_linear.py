"""Packed weights give the products of plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.linear import Linear, padded_rows


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 41, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_weight(num_tokens: int, has_bias: bool) -> None:
    print("torch seed 2")
    generator = torch.Generator().manual_seed(2)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((96, 64), (96,), (num_tokens, 64)))
    parameters = [nn.Parameter(tensor, requires_grad=False) for tensor in (weight, bias)]
    linear = Linear(parameters[0], parameters[1] if has_bias else None)
    expected = F.linear(x, weight, bias if has_bias else None)
    assert torch.equal(linear(x), expected)
    linear.pack()
    linear.pack()
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=0)
    assert linear(x[None]).shape == (1, num_tokens, 96)


def test_few_sizes_of_a_product_are_met() -> None:
    for num_rows in range(1, 5000):
        assert num_rows <= padded_rows(num_rows) <= max(2, 1.125 * num_rows)
        assert num_rows > 16 or padded_rows(num_rows) == max(2, num_rows)
    assert len({padded_rows(num_rows) for num_rows in range(1, 513)}) == 55


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    """Of many columns, too."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(64, 2048, generator=generator), torch.randn(40, 2048, generator=generator)
    linear = Linear(nn.Parameter(weight, requires_grad=False))
    linear.pack()
    together = linear(x)
    for begin, end in ((0, 1), (39, 40), (4, 6), (8, 13), (1, 40)):
        assert torch.equal(linear(x[begin:end]), together[begin:end])


def test_other_dtypes_stay_as_they_are() -> None:
    weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16), requires_grad=False)
    linear = Linear(weight)
    linear.pack()
    assert linear.weight is weight
    assert linear(torch.ones(2, 8, dtype=torch.bfloat16)).tolist() == [[8.0] * 4] * 2
