"""Products of many rows, with the gate or sum behind them, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.kernels.products import added_product, gated_product, suits_tiles
from slipstream.services.models.linear import Linear
from tests.services.models.kernels.test_products import Case, exact

ROUNDING = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative: a little more than one rounding."""
SHAPES = ((1, 64, 40), (130, 136, 296), (257, 64, 128), (2200, 8, 8))
"""Rows, size and columns: less than a tile, tiles that are not full, more tiles than run side by side."""


# On a GPU the tiles are of 16 bits, see `suits_tiles`: those of float32 would not fit.
@pytest.fixture(params=["float16", "bfloat16"] if torch.cuda.is_available() else ["float32", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The rows' dtype."""
    value = getattr(torch, request.param)
    assert isinstance(value, torch.dtype)
    return value


@pytest.fixture
def case(device: torch.device, dtype: torch.dtype) -> Case:
    """Numbers where the kernels run."""
    return Case(device, dtype)


def layer_of(weight: torch.Tensor) -> Linear:
    return Linear(nn.Parameter(weight, requires_grad=False))


def close(values: torch.Tensor, expected: torch.Tensor) -> None:
    rounding = ROUNDING[values.dtype]
    torch.testing.assert_close(values.to(torch.float64), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize(("num_rows", "size", "columns"), SHAPES)
def test_a_gated_product(num_rows: int, size: int, columns: int, case: Case, dtype: torch.dtype) -> None:
    x, layer = case.some(num_rows, size), case.layer(size, 2 * columns, has_bias=False)
    gate, up = exact(x, layer).chunk(2, dim=1)
    output = gated_product(x, layer)
    assert output.dtype == dtype
    close(output, F.silu(gate) * up)


@pytest.mark.parametrize(("num_rows", "size", "columns"), SHAPES)
def test_a_product_is_added(num_rows: int, size: int, columns: int, case: Case) -> None:
    x, layer = case.some(num_rows, size), case.layer(size, columns, has_bias=False)
    residual = case.some(num_rows, columns)
    kept = residual.clone()
    output = added_product(residual, x, layer)
    close(output, kept.to(torch.float64) + exact(x, layer))
    assert torch.equal(residual, kept), "what a draft head reads of the layer before stays"


def test_large_gates(device: torch.device, dtype: torch.dtype) -> None:
    """They are 0 or as they are, not NaN."""
    weight = torch.zeros(16, 8, device=device, dtype=dtype)
    weight[:3, 0] = torch.tensor([-200.0, 200.0, -90.0])
    weight[8:11, 0] = torch.tensor([2.0, 3.0, 4.0])
    output = gated_product(torch.eye(1, 8, device=device, dtype=dtype), layer_of(weight))
    expected = torch.tensor([0.0, 600.0, 0.0], device=device)
    torch.testing.assert_close(output[0, :3].float(), expected, atol=1e-30, rtol=0)


def test_what_tiles_do_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "slipstream.services.models.kernels.products"
    monkeypatch.setattr(f"{module}.is_hopper", lambda device: True)
    monkeypatch.setattr(f"{module}.num_multiprocessors", lambda device: 132)
    rows, weight = torch.zeros(1024, 64, dtype=torch.bfloat16), torch.zeros(2 * 14336, 64, dtype=torch.bfloat16)
    layer = layer_of(weight)
    assert suits_tiles(rows, layer, is_gated=True), "896 tiles fill seven times all multiprocessors but 28"
    assert not suits_tiles(rows[:768], layer, is_gated=True), "672 tiles fill them five times and 12 more"
    assert suits_tiles(rows[:80], layer, is_gated=True), "112 tiles that read the weight once"
    assert not suits_tiles(rows[:79], layer, is_gated=True), "cuBLAS reads it as fast"
    assert not suits_tiles(rows[:80], layer_of(weight[: 2 * 13440]), is_gated=True), "105 tiles, 0.795 of all"
    assert not suits_tiles(rows[:0], layer, is_gated=True)
    assert not suits_tiles(rows.float(), layer, is_gated=True)
    assert not suits_tiles(rows[:, :60], layer_of(weight[:, :60]), is_gated=True)
    assert not suits_tiles(rows, Linear(layer.weight, nn.Parameter(weight[:, 0], requires_grad=False)), is_gated=True)
    assert not suits_tiles(rows, Linear(layer.weight, None, nn.Parameter(weight[:1])), is_gated=True)
    monkeypatch.setattr(f"{module}.is_hopper", lambda device: False)
    assert not suits_tiles(rows, layer, is_gated=True), "on a GPU that they were not measured on"
