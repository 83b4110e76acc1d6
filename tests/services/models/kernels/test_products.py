"""Products with the norms, gates and sums around them against float64: of few rows, and of many by tiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.services.models.kernels.products import (
    MOST_ROWS,
    has_few_rows,
    linear,
    product,
    suits_tiles,
    tiled_product,
)
from slipstream.services.models.linear import Linear
from tests.services.models.kernels.product_case import HAS_CUDA, Case, gated

pytestmark = pytest.mark.sampled_module(10)

ROUNDING = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: that of the input of the second product, and of its output."""
TILES_ROUNDING = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative: a little more than one rounding."""
SHAPES = ((1, 64, 48, 80), (5, 600, 100, 33), (16, 1100, 256, 64), (17, 96, 32, 64), (64, 48, 300, 16))
"""Rows, size, columns, columns of the product behind."""
TILED_SHAPES = ((1, 64, 40), (130, 136, 296), (257, 64, 128), (2200, 8, 8))
"""Rows, size and columns: less than a tile, tiles that are not full, more tiles than run side by side."""
# On a GPU tiles of float32 would not fit, see `has_few_rows` and `suits_tiles`.
FEW = pytest.mark.parametrize("dtype", ["bfloat16"] if HAS_CUDA else ["float32", "float16"], indirect=True)
TILED = pytest.mark.parametrize("dtype", ["float16", "bfloat16" if HAS_CUDA else "float32"], indirect=True)


def plain(weight: torch.Tensor) -> Linear:
    return Linear(nn.Parameter(weight, requires_grad=False))


@FEW
@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_its_norm_and_the_product_behind_it(
    shape: tuple[int, int, int, int], is_gated: bool, device: torch.device, dtype: torch.dtype
) -> None:
    Case(device, dtype, ROUNDING).check_sum_norm_and_product(*shape, None, is_gated=is_gated)


@FEW
@pytest.mark.parametrize(("num_rows", "size", "columns"), [(1, 64, 48), (5, 600, 5000), (40, 2048, 32)])
def test_a_product(num_rows: int, size: int, columns: int, device: torch.device, dtype: torch.dtype) -> None:
    case = Case(device, dtype, ROUNDING)
    x, layer = case.some(num_rows, size), case.layer(size, columns)
    case.close(product(x, layer), case.exact(x, layer))
    case.close(linear(x[:, None], layer), case.exact(x[:, None], layer))


def test_larger_batches_and_float32_are_left_to_pytorch() -> None:
    few = torch.zeros(MOST_ROWS, 8, dtype=torch.bfloat16)
    assert has_few_rows(few)
    assert not has_few_rows(few.float())
    assert not has_few_rows(few.half())
    assert not has_few_rows(torch.zeros(MOST_ROWS + 1, 8, dtype=torch.bfloat16))
    assert not has_few_rows(few[:0])


@TILED
@pytest.mark.parametrize(("num_rows", "size", "columns"), TILED_SHAPES)
def test_a_product_by_tiles(num_rows: int, size: int, columns: int, device: torch.device, dtype: torch.dtype) -> None:
    """Of gates, and one that is added: what a draft head reads of the layer before stays."""
    case = Case(device, dtype, TILES_ROUNDING)
    x, gates, layer = case.some(num_rows, size), case.layer(size, 2 * columns), case.layer(size, columns)
    case.close(tiled_product(x, gates), gated(case.exact(x, gates)))
    residual = case.some(num_rows, columns)
    kept = residual.clone()
    case.close(tiled_product(x, layer, residual), kept.to(torch.float64) + case.exact(x, layer))
    assert torch.equal(residual, kept)


@TILED
def test_large_gates(device: torch.device, dtype: torch.dtype) -> None:
    """They are 0 or as they are, not NaN."""
    weight = torch.zeros(16, 8, device=device, dtype=dtype)
    weight[:3, 0] = torch.tensor([-200.0, 200.0, -90.0])
    weight[8:11, 0] = torch.tensor([2.0, 3.0, 4.0])
    output = tiled_product(torch.eye(1, 8, device=device, dtype=dtype), plain(weight))
    expected = torch.tensor([0.0, 600.0, 0.0], device=device)
    torch.testing.assert_close(output[0, :3].float(), expected, atol=1e-30, rtol=0)


def test_what_tiles_do_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "slipstream.services.models.kernels.products"
    monkeypatch.setattr(f"{module}.is_hopper", lambda device: True)
    monkeypatch.setattr(f"{module}.num_multiprocessors", lambda device: 132)
    rows, weight = torch.zeros(1024, 64, dtype=torch.bfloat16), torch.zeros(2 * 14336, 64, dtype=torch.bfloat16)
    layer = plain(weight)
    assert suits_tiles(rows, layer, is_gated=True), "896 tiles fill seven times all multiprocessors but 28"
    assert not suits_tiles(rows[:768], layer, is_gated=True), "672 tiles fill them five times and 12 more"
    assert suits_tiles(rows[:80], layer, is_gated=True), "112 tiles that read the weight once"
    assert not suits_tiles(rows[:79], layer, is_gated=True), "cuBLAS reads it as fast"
    assert not suits_tiles(rows[:80], plain(weight[: 2 * 13440]), is_gated=True), "105 tiles, 0.795 of all"
    assert not suits_tiles(rows[:0], layer, is_gated=True)
    assert not suits_tiles(rows.float(), layer, is_gated=True)
    assert not suits_tiles(rows[:, :60], plain(weight[:, :60]), is_gated=True)
    assert not suits_tiles(rows, Linear(layer.weight, nn.Parameter(weight[:, 0], requires_grad=False)), is_gated=True)
    assert not suits_tiles(rows, Linear(layer.weight, None, nn.Parameter(weight[:1])), is_gated=True)
    monkeypatch.setattr(f"{module}.is_hopper", lambda device: False)
    assert not suits_tiles(rows, layer, is_gated=True), "on a GPU that they were not measured on"
