"""Products with FP8 weights against float64, and every number of the format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from slipstream.services.models.config import BLOCK
from slipstream.services.models.decoder import RMSNorm
from slipstream.services.models.kernels import products
from slipstream.services.models.kernels.fp8 import fp8_linear, from_fp8
from slipstream.services.models.kernels.products import MOST_ROWS, add_product, linear, product
from slipstream.services.models.linear import CHUNK, FP8, Linear, PackedFp8, dequantised

ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Exact sums, rounded where the kernels round, differ by 0.0032 and 0.022 in 16 bits, behind a norm and a gate."""
EPS = 1e-5
BY_ROW = 1


@triton.jit
def convert_kernel(bits: tl.tensor, output: tl.tensor) -> None:
    """Converts a block of a packed weight."""
    i = tl.arange(0, 8192)
    tl.store(output + i, from_fp8(tl.load(bits + i), output.dtype.element_ty))


class Case:
    """Numbers of one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(9)
        self._device, self.dtype = device, dtype
        self._worth: dict[Linear, torch.Tensor] = {}

    def some(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random numbers around zero."""
        return (scale * torch.randn(*shape, generator=self._generator)).to(self._device, self.dtype)

    def layer(self, size: int, columns: int, rows_per_scale: int, *, has_bias: bool) -> Linear:
        """Its outputs are of the size of its inputs. `rows_per_scale`: BY_ROW for scales that have no columns."""
        weight = (100 * torch.randn(columns, size, generator=self._generator)).clamp(-448, 448).to(FP8)
        blocks = 1 if rows_per_scale == BY_ROW else -(-size // BLOCK)
        scales = (1 + torch.rand(columns // rows_per_scale, blocks, generator=self._generator)) * size**-0.5 / 100
        bias = nn.Parameter(self.some(columns), requires_grad=False) if has_bias else None
        weight, scales = weight.to(self._device), scales.to(self._device)
        layer = Linear(nn.Parameter(weight, requires_grad=False), bias, nn.Parameter(scales, requires_grad=False))
        self._worth[layer] = dequantised(weight, scales).to(torch.float64)
        layer.pack_fp8(self.dtype)
        return layer

    def exact(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """`layer(x)` in float64."""
        bias = layer.bias.to(torch.float64) if layer.bias is not None else None
        return F.linear(x.to(torch.float64), self._worth[layer], bias)

    def close(self, values: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares up to rounding."""
        assert values.dtype == self.dtype
        rounding = ROUNDING[self.dtype]
        torch.testing.assert_close(values.to(torch.float64), expected, atol=rounding, rtol=rounding)


@pytest.fixture
def case(device: torch.device, dtype: torch.dtype) -> Case:
    """Numbers where the kernels run."""
    return Case(device, dtype)


def test_every_number_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """In every place of a word, beside others."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (CHUNK, BLOCK), generator=generator, dtype=torch.uint8).to(device).view(FP8)
    lanes = PackedFp8.of(numbers, torch.float32).bits.flatten().view(FP8)
    found = torch.empty(CHUNK * BLOCK, dtype=dtype, device=device)
    convert_kernel[1,](PackedFp8.of(numbers, dtype).bits, found)
    is_number = ~lanes.to(torch.float32).isnan()
    for place in range(4):
        assert len(set(lanes.view(torch.uint8)[place::4].tolist())) == 256
    assert torch.equal(found[is_number], lanes.to(dtype)[is_number])


SHAPES = (
    # rows, size, columns, columns behind, rows per scale
    (1, 640, 128, 256, BLOCK),
    (5, 384, 128, 64, BY_ROW),
    (16, 1152, 256, 128, BLOCK),
    (17, 128, 256, 64, BY_ROW),
    (64, 256, 128, 128, BLOCK),
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_rows", "size", "columns", "behind", "group"), SHAPES)
def test_a_sum_its_norm_and_the_product_behind_it(
    case: Case, num_rows: int, size: int, columns: int, behind: int, group: int, is_gated: bool
) -> None:
    x, residual = case.some(num_rows, size), case.some(num_rows, columns)
    norm = RMSNorm(nn.Parameter(1 + case.some(columns, scale=0.2), requires_grad=False), EPS)
    first = case.layer(size, columns, group, has_bias=is_gated)
    second = case.layer(columns, 2 * behind if is_gated else behind, group, has_bias=is_gated)
    summed, scaled = add_product(residual, x, first, norm)
    case.close(summed, residual.to(torch.float64) + case.exact(x, first))
    expected = case.exact(F.rms_norm(summed.to(torch.float64), (columns,), norm.weight.to(torch.float64), EPS), second)
    if is_gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    case.close(product(scaled, second, is_gated=is_gated), expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "columns", "group"), [(1, 128, 64, BY_ROW), (70, 384, 256, BLOCK), (130, 256, 192, BY_ROW)]
)
def test_many_rows(case: Case, num_rows: int, size: int, columns: int, group: int, has_bias: bool) -> None:
    x, layer = case.some(num_rows, size), case.layer(size, columns, group, has_bias=has_bias)
    case.close(fp8_linear(x, layer), case.exact(x, layer))


def test_the_way_is_chosen_by_the_number_of_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_DTYPES", (torch.float32,))
    case = Case(device, torch.float32)
    layer = case.layer(256, 128, BLOCK, has_bias=True)
    for num_rows in (0, 3, MOST_ROWS + 1):
        x = case.some(num_rows, 256)
        case.close(linear(x[:, None], layer)[:, 0], case.exact(x, layer))


def test_a_row_has_the_same_bits_again_whatever_the_rows_beside(case: Case) -> None:
    layer = case.layer(1152, 128, BLOCK, has_bias=False)
    x = case.some(7, 1152)
    expected = product(x, layer)
    others = torch.cat([x[:1], 3 * x[1:].flip(0)])
    assert torch.equal(product(x, layer), expected)
    assert torch.equal(product(others, layer)[0], expected[0])
