"""Products with FP8 weights against float64, and every number of the format."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from slipstream.services.models.kernels import products
from slipstream.services.models.kernels.fp8 import fp8_linear, from_fp8
from slipstream.services.models.kernels.products import MOST_QUANTISED_ROWS, linear, product
from slipstream.services.models.linear import FP8, PackedFp8
from slipstream.services.models.packed_ints import CHUNK
from slipstream.services.models.quantization import BLOCK
from tests.services.models.kernels.product_case import BY_ROW, FP8_ROUNDING, Case


@triton.jit
def convert_kernel(bits: tl.tensor, output: tl.tensor) -> None:
    """Converts a block of a packed weight."""
    i = tl.arange(0, 8192)
    tl.store(output + i, from_fp8(tl.load(bits + i), output.dtype.element_ty))


@pytest.fixture
def case(device: torch.device, dtype: torch.dtype) -> Case:
    """Numbers where the kernels run."""
    return Case(device, dtype, FP8_ROUNDING)


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "columns", "behind", "group"),
    [
        (1, 640, 128, 256, BLOCK),
        (5, 384, 128, 64, BY_ROW),
        (16, 1152, 256, 128, BLOCK),
        (17, 128, 256, 64, BY_ROW),
        (64, 256, 128, 128, BLOCK),
        (128, 256, 128, 128, BLOCK),
    ],
)
def test_a_sum_its_norm_and_the_product_behind_it(
    case: Case, num_rows: int, size: int, columns: int, behind: int, group: int, is_gated: bool
) -> None:
    case.check_sum_norm_and_product(num_rows, size, columns, behind, group, is_gated=is_gated)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "columns", "group"), [(1, 128, 64, BY_ROW), (70, 384, 256, BLOCK), (130, 256, 192, BY_ROW)]
)
def test_many_rows(case: Case, num_rows: int, size: int, columns: int, group: int, has_bias: bool) -> None:
    x, layer = case.some(num_rows, size), case.layer(size, columns, group, has_bias=has_bias)
    case.close(fp8_linear(x, layer), case.exact(x, layer))


def test_the_way_is_chosen_by_the_number_of_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_DTYPES", (torch.float32,))
    case = Case(device, torch.float32, FP8_ROUNDING)
    layer = case.layer(256, 128, BLOCK, has_bias=True)
    for num_rows in (0, 3, MOST_QUANTISED_ROWS, MOST_QUANTISED_ROWS + 1):
        x = case.some(num_rows, 256)
        case.close(linear(x[:, None], layer)[:, 0], case.exact(x, layer))


def test_a_row_has_the_same_bits_again_whatever_the_rows_beside(case: Case) -> None:
    layer = case.layer(1152, 128, BLOCK, has_bias=False)
    x = case.some(7, 1152)
    expected = product(x, layer)
    others = torch.cat([x[:1], 3 * x[1:].flip(0)])
    assert torch.equal(product(x, layer), expected)
    assert torch.equal(product(others, layer)[0], expected[0])
