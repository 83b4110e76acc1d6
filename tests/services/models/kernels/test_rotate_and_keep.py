"""The rotation, and the kernel that normalises, rotates and keeps, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.services.models.config import RopeConfig
from slipstream.services.models.decoder import RMSNorm, rotation_table
from slipstream.services.models.kernels.block_ops import rotation_of
from slipstream.services.models.kernels.paged_attention import PagedAttention
from tests.services.models.kernels.attention_case import TOLERANCES, AttentionCase, some_config

pytestmark = pytest.mark.sampled_module(3)

FAR = 2**62


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (16, {}),
        (24, {"partial_rotary_factor": 0.75}),
        (128, {}),
        (128, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.14}),
    ],
)
def test_rotation(head_dim: int, changes: dict[str, Any], device: torch.device) -> None:
    table = rotation_table(RopeConfig(theta=500_000.0, **changes), head_dim).to(device)
    positions = torch.tensor([[0, 1, 17, 4095], [131_071, 131_072, FAR, -FAR]], device=device)
    rotation = rotation_of(positions, table, 131_072)
    places = torch.tensor([0, 1, 17, 4095, 131_071, 131_071, 131_071, 0], device=device)
    # Angles are float32, as they are in the models' own code; of these, sines and cosines are exact.
    angles = (places[:, None].to(torch.float32) * table[0]).to(torch.float64)
    expected = torch.stack((angles.cos(), angles.sin()), dim=1) * table[1].to(torch.float64)
    assert rotation.shape == (8, 2, head_dim // 2)
    torch.testing.assert_close(rotation.to(torch.float64), expected, atol=3e-7, rtol=0)


def rotated(x: torch.Tensor, rotation: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """[N, heads, head_dim] in float64."""
    x = x.to(torch.float64)
    if weight is not None:
        x = x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight.to(torch.float64)
    cosine, sine = rotation.to(torch.float64)[:, None].unbind(dim=2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("has_norms", "head_dim", "width"), [(False, 16, 5), (True, 16, 5), (False, 24, 3), (True, 24, 3), (True, 16, 260)]
)
def test_rotate_and_keep(has_norms: bool, head_dim: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    config = some_config(num_heads=2, num_kv_heads=1, head_dim=head_dim)
    case = AttentionCase.random(config, (12,), width, device=device, dtype=dtype, seed=1, page_size=16)
    generator = torch.Generator().manual_seed(2)
    weights = [(1 + 0.3 * torch.randn(head_dim, generator=generator)).to(device, dtype) for _ in range(2)]
    norms = [RMSNorm(torch.nn.Parameter(weight, requires_grad=False), 1e-5) for weight in weights]
    table = rotation_table(config.rope, head_dim).to(device)
    rotation = rotation_of(case.batch.positions, table, config.max_position_embeddings)

    heads = case.qkv.view(width, 4, head_dim)
    expected_queries = rotated(heads[:, :2], rotation, weights[0] if has_norms else None)
    expected_keys = rotated(heads[:, 2:3], rotation, weights[1] if has_norms else None)
    qkv = case.qkv.clone()
    attend = PagedAttention(config, case.batch, case.cache)
    output = attend(0, qkv, rotation, (norms[0], norms[1]) if has_norms else None)

    tolerance = 2 * TOLERANCES[dtype]
    queries = qkv.view(width, 4, head_dim)[:, :2].to(torch.float64)
    torch.testing.assert_close(queries, expected_queries, atol=tolerance, rtol=tolerance)
    place = case.batch.positions[0]
    at = (case.batch.page_table[0, place // 16], place % 16)
    keys, values = case.pages(0)[at].unbind(dim=1)
    torch.testing.assert_close(keys.to(torch.float64), expected_keys, atol=tolerance, rtol=tolerance)
    assert torch.equal(values, heads[:, 3:])
    case.assert_close(output, case.expected(qkv=qkv))
