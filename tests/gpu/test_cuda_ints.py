"""Weights of 4 and 8 bits on a GPU: every number is exact, products of all sizes are right, and models keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.kernels.fused import FusedDecoder
from slipstream.services.models.kernels.products import linear, product
from slipstream.services.models.linear import Linear
from slipstream.services.models.packed import Quantised
from slipstream.services.models.packed_ints import PackedInts
from tests.gpu.test_cuda_fp8 import CPU, MOST_ERROR, SIZES, logits_of
from tests.harness.checkpoints import write_checkpoint
from tests.harness.packed_checkpoints import pack
from tests.services.models.kernels.product_case import gated
from tests.services.models.kernels.test_ints import LAYOUTS

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.services.models.quantization import PackedWeights

ROWS = (1, 5, 16, 17, 40, 64, 65, 128, 320, 4096)
SHAPES = {"qkv": (4096, 6144), "gate and up": (4096, 28672), "down": (14336, 4096)}
MOST_PRODUCT_ERROR = 4e-3
"""Relative: that of bfloat16 in the rows and the result is 0.0017, of a wrong scale or number far more."""


def random_layer(layout: PackedWeights, size: int, columns: int, where: torch.device) -> tuple[Linear, torch.Tensor]:
    """A layer, and what its weight is worth in float32: columns of numbers in turns, so that each is everywhere."""
    generator, most, num_groups = torch.Generator(where).manual_seed(1), 1 << layout.num_bits, layout.num_groups(size)
    values = torch.randint(0, most, (columns, size), generator=generator, device=where)
    zeros = torch.full((columns, num_groups), most // 2, device=where)
    if layout.has_zero_points:
        zeros.random_(0, most, generator=generator)
    scales = torch.rand(columns, num_groups, generator=generator, device=where).half().float() / most
    groups = torch.arange(size, device=where) // (size // num_groups)
    if layout.has_order:
        groups = groups[torch.randperm(size, generator=generator, device=where)]
    numbers = Quantised(values, zeros, scales, groups)
    ints = PackedInts(layout, columns, size, device=where, dtype=torch.bfloat16)
    ints.fill(0, numbers)
    layer = Linear(None, ints=ints)
    layer.pack_fp8(torch.bfloat16)
    return layer, numbers.worth()


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_number_is_what_its_formula_says_rounded_once(device: CudaDevice, name: str) -> None:
    """By rows with a single one, a few at a time and all at once."""
    layer, worth = random_layer(LAYOUTS[name], 512, 256, device.torch_device)
    ones = torch.eye(512, device=device.torch_device, dtype=torch.bfloat16)
    expected = worth.T.to(torch.bfloat16)
    for first in range(0, 512, 64):
        assert torch.equal(product(ones[first : first + 64], layer), expected[first : first + 64])
    assert torch.equal(linear(ones, layer), expected)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["groups of 128", "groups of 32", "8 bits"])
def test_products_of_all_sizes(device: CudaDevice, name: str, shape: str) -> None:
    where, (size, columns) = device.torch_device, SHAPES[shape]
    layer, worth = random_layer(LAYOUTS[name], size, columns, where)
    for num_rows in ROWS:
        generator = torch.Generator(where).manual_seed(num_rows)
        x = torch.randn(num_rows, size, generator=generator, device=where).to(torch.bfloat16)
        expected = x.float() @ worth.T
        found = linear(x, layer)
        error = (found.float() - expected).norm() / expected.norm()
        assert error < MOST_PRODUCT_ERROR, f"{num_rows} rows: {error:.5f}"
        if shape == "gate and up" and num_rows <= 64:
            expected = gated(expected)
            error = (product(x, layer, is_gated=True).float() - expected).norm() / expected.norm()
            assert error < MOST_PRODUCT_ERROR, f"{num_rows} rows, gated: {error:.5f}"


@pytest.mark.parametrize("layout", ["gptq-order", "awq", "packed", "packed-8-bits", "packed-rows"])
def test_models_keep_them_and_a_graph_gives_the_same_bits(device: CudaDevice, tmp_path: Path, layout: str) -> None:
    path, where = write_checkpoint(tmp_path, **SIZES), device.torch_device
    pack(path, layout)
    expected = load_decoder(path, device=CPU, dtype=torch.float32)
    decoder = load_decoder(path, device=where, dtype=torch.bfloat16, decoder_class=FusedDecoder)
    assert all(layer.down.ints is not None for layer in decoder.layers)
    for num_rows in (1, 5):  # many tokens of a prompt, then few
        by_cpu = logits_of(expected, num_rows, CPU, torch.float32)
        found = logits_of(decoder, num_rows, where, torch.bfloat16)
        error = (found - by_cpu).norm() / by_cpu.norm()
        assert error < MOST_ERROR, f"{num_rows} rows: {error:.4f}"
    x, layer = torch.randn(5, 512, device=where).to(torch.bfloat16), decoder.layers[0].output
    expected_product, captured_for = linear(x, layer), torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(captured_for, layer)
    captured_for.copy_(x)
    graph.replay()
    assert torch.equal(captured, expected_product)
