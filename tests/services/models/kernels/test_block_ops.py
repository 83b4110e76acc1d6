"""Norms, the gate of the MLP and the entry of a head against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.services.models.kernels.block_ops import add_rms_norm, embed_and_norm, rms_norm, swiglu

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative: a little more than one rounding."""


def some(*shape: int, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    print(f"torch seed {seed}")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 100), (3, 4096), (0, 64)])
def test_rms_norm(num_rows: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
    x = some(num_rows, size, device=device, dtype=dtype, seed=1)
    weight = 1 + 0.2 * some(size, device=device, dtype=dtype, seed=2)
    expected = F.rms_norm(x.to(torch.float64), (size,), weight.to(torch.float64), 1e-5)
    normed = rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.to(torch.float64), expected, atol=1e-6, rtol=ROUNDING[dtype])


@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 100), (3, 4096), (0, 64)])
def test_add_rms_norm(num_rows: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
    x = some(num_rows, size, device=device, dtype=dtype, seed=1)
    delta = some(num_rows, size, device=device, dtype=dtype, seed=2)
    weight = 1 + 0.2 * some(size, device=device, dtype=dtype, seed=3)
    kept = x.clone()
    summed, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, kept), "what a draft head reads of the layer before stays"
    assert torch.equal(summed, x + delta)
    expected = F.rms_norm(summed.to(torch.float64), (size,), weight.to(torch.float64), 1e-5)
    torch.testing.assert_close(normed.to(torch.float64), expected, atol=1e-6, rtol=ROUNDING[dtype])


@pytest.mark.parametrize(("num_rows", "size"), [(1, 8), (5, 1500), (0, 64)])
def test_swiglu(num_rows: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
    gate_up = 5 * some(num_rows, 2 * size, device=device, dtype=dtype, seed=1)
    gate, up = gate_up.to(torch.float64).chunk(2, dim=1)
    output = swiglu(gate_up)
    assert output.dtype == dtype
    torch.testing.assert_close(output.to(torch.float64), F.silu(gate) * up, atol=1e-6, rtol=ROUNDING[dtype])


def test_swiglu_of_large_gates(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -90.0, 2.0, 3.0, 4.0]], device=device)
    torch.testing.assert_close(swiglu(gate_up), torch.tensor([[0.0, 600.0, 0.0]], device=device), atol=1e-30, rtol=0)


def test_an_entry_of_a_head(device: torch.device) -> None:
    size, vocab_size, eps = 40, 50, 1e-5
    generator = torch.Generator().manual_seed(1)
    embedding, states = torch.randn(vocab_size, size, generator=generator), torch.randn(5, size, generator=generator)
    weights = [1 + 0.2 * torch.randn(size, generator=generator) for _ in range(2)]
    tokens = torch.tensor([3, 0, 49, 77, -5])
    embedded = embedding[tokens.clamp(0, vocab_size - 1)]
    normed = [F.rms_norm(x, (size,), weight, eps) for x, weight in zip((embedded, states), weights, strict=True)]
    arguments = [tensor.to(device) for tensor in (tokens, embedding, states, *weights)]
    both = embed_and_norm(*arguments, eps).cpu()
    torch.testing.assert_close(both, torch.cat(normed, dim=1))
