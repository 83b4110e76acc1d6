"""Products of few rows, with the norms, gates and sums around them, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.decoder import RMSNorm
from slipstream.services.models.kernels.products import MOST_ROWS, add_product, has_few_rows, linear, product
from slipstream.services.models.linear import Linear

ROUNDING = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: that of the input of the second product, and of its output."""
EPS = 1e-5
SHAPES = ((1, 64, 48, 80), (5, 600, 100, 33), (16, 1100, 256, 64), (17, 96, 32, 64), (64, 48, 300, 16))


class Case:
    """Numbers of one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(7)
        self._device = device
        self._dtype = dtype

    def some(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random numbers around zero."""
        return (scale * torch.randn(*shape, generator=self._generator)).to(self._device, self._dtype)

    def layer(self, size: int, columns: int, *, has_bias: bool) -> Linear:
        """Its outputs are of the size of its inputs."""
        weight = nn.Parameter(self.some(columns, size, scale=size**-0.5), requires_grad=False)
        return Linear(weight, nn.Parameter(self.some(columns), requires_grad=False) if has_bias else None)

    def norm(self, size: int) -> RMSNorm:
        """Makes a norm with weights around one."""
        return RMSNorm(nn.Parameter(1 + self.some(size, scale=0.2), requires_grad=False), EPS)


def exact(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """`layer(x)` in float64."""
    assert layer.weight is not None
    bias = layer.bias.to(torch.float64) if layer.bias is not None else None
    return F.linear(x.to(torch.float64), layer.weight.to(torch.float64), bias)


# On a GPU the products are of bfloat16 alone, see `has_few_rows`: tiles of float32 would not fit.
@pytest.fixture(params=["bfloat16"] if torch.cuda.is_available() else ["float32", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The rows' dtype."""
    value = getattr(torch, request.param)
    assert isinstance(value, torch.dtype)
    return value


@pytest.fixture
def case(device: torch.device, dtype: torch.dtype) -> Case:
    """Numbers where the kernels run."""
    return Case(device, dtype)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_rows", "size", "columns", "behind"), SHAPES)
def test_a_sum_its_norm_and_the_product_behind_it(
    case: Case, dtype: torch.dtype, num_rows: int, size: int, columns: int, behind: int, is_gated: bool
) -> None:
    x, residual, norm = case.some(num_rows, size), case.some(num_rows, columns), case.norm(columns)
    first = case.layer(size, columns, has_bias=is_gated)
    second = case.layer(columns, 2 * behind if is_gated else behind, has_bias=is_gated)
    summed, scaled = add_product(residual, x, first, norm)
    assert summed.dtype == dtype
    close(summed, residual.to(torch.float64) + exact(x, first))
    normed = F.rms_norm(summed.to(torch.float64), (columns,), norm.weight.to(torch.float64), EPS)
    expected = exact(normed, second)
    if is_gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    close(product(scaled, second, is_gated=is_gated), expected)


@pytest.mark.parametrize(("num_rows", "size", "columns"), [(1, 64, 48), (5, 600, 5000), (40, 2048, 32)])
def test_a_product(case: Case, num_rows: int, size: int, columns: int) -> None:
    x, layer = case.some(num_rows, size), case.layer(size, columns, has_bias=False)
    close(product(x, layer), exact(x, layer))
    close(linear(x[:, None], layer), exact(x[:, None], layer))


def test_larger_batches_and_float32_are_left_to_pytorch() -> None:
    few = torch.zeros(MOST_ROWS, 8, dtype=torch.bfloat16)
    assert has_few_rows(few)
    assert not has_few_rows(few.float())
    assert not has_few_rows(few.half())
    assert not has_few_rows(torch.zeros(MOST_ROWS + 1, 8, dtype=torch.bfloat16))
    assert not has_few_rows(few[:0])


def close(values: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares up to rounding."""
    rounding = ROUNDING[values.dtype]
    torch.testing.assert_close(values.to(torch.float64), expected, atol=rounding, rtol=rounding)
