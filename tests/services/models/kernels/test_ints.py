"""Products with weights of 4 and 8 bits against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from slipstream.services.models.kernels import products
from slipstream.services.models.kernels.ints import int_linear
from slipstream.services.models.kernels.products import MOST_QUANTISED_ROWS, linear, product
from slipstream.services.models.quantization import PackedWeights, Packing
from tests.services.models.kernels.product_case import FP8_ROUNDING, Case

layout = partial(PackedWeights, packing=Packing.GPTQ)
LAYOUTS = {
    "groups of 128": layout(group_size=128),
    "groups of 64": layout(group_size=64),
    "groups of 32": layout(group_size=32),
    "groups of 256, symmetric": layout(group_size=256, has_zero_points=False),
    "rows": layout(group_size=None),
    "symmetric, in another order": layout(group_size=128, has_zero_points=False, has_order=True),
    "8 bits": layout(group_size=128, num_bits=8),
    "8 bits, groups of 32": layout(group_size=32, num_bits=8),
    "8 bits, rows, symmetric": layout(group_size=None, num_bits=8, has_zero_points=False),
}


@pytest.fixture
def case(device: torch.device, dtype: torch.dtype) -> Case:
    """Numbers where the kernels run."""
    return Case(device, dtype, FP8_ROUNDING)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "columns", "behind"), [(5, 768, 256, 128), (64, 256, 256, 256), (100, 256, 256, 128)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sum_its_norm_and_the_product_behind_it(
    case: Case, name: str, num_rows: int, size: int, columns: int, behind: int, is_gated: bool
) -> None:
    case.check_sum_norm_and_product(num_rows, size, columns, behind, LAYOUTS[name], is_gated=is_gated)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_rows(case: Case, name: str) -> None:
    x, layer = case.some(70, 512), case.layer(512, 128, LAYOUTS[name], has_bias=True)
    assert layer.ints is not None
    case.close(int_linear(x, layer.ints, layer.bias), case.exact(x, layer))


def test_the_way_is_chosen_by_the_number_of_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_DTYPES", (torch.float32,))
    case = Case(device, torch.float32, FP8_ROUNDING)
    layer = case.layer(256, 128, LAYOUTS["groups of 128"], has_bias=True)
    for num_rows in (0, 3, MOST_QUANTISED_ROWS, MOST_QUANTISED_ROWS + 1):
        x = case.some(num_rows, 256)
        case.close(linear(x[:, None], layer)[:, 0], case.exact(x, layer))


def test_a_row_has_the_same_bits_again_whatever_the_rows_beside(case: Case) -> None:
    layer, x = case.layer(1152, 128, LAYOUTS["groups of 128"]), case.some(7, 1152)
    expected = product(x, layer)
    others = torch.cat([x[:1], 3 * x[1:].flip(0)])
    assert torch.equal(product(x, layer), expected)
    assert torch.equal(product(others, layer)[0], expected[0])
