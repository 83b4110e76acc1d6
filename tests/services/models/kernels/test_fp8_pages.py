"""Attention over pages of FP8 keys and values: what is kept, bit by bit, and what queries get of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.services.models.attention import RaggedRows, TorchAttention
from tests.services.models.kernels.attention_case import AttentionCase, some_config

ERRORS = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Absolute: outputs are smaller than 10, weights and outputs are rounded."""


def case_of(
    lengths: list[int],
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_kv_heads: int = 2,
    head_dim: int = 16,
) -> AttentionCase:
    config = some_config(num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return AttentionCase.random(config, lengths, width, device=device, dtype=dtype, seed=3, is_fp8=True)


def kept(case: AttentionCase) -> list[torch.Tensor]:
    """The numbers and scales of all pages but the padding page."""
    assert case.cache.scales is not None
    return [part[0][case.cache.page_size :].clone() for part in (case.cache.rows, case.cache.scales)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(
    ("lengths", "width", "num_kv_heads", "head_dim"),
    [([37, 0, 5], 3, 2, 16), ([270], 1, 1, 24), ([3, 40], 9, 4, 32)],
)
def test_pages_and_outputs_are_pytorchs(
    lengths: list[int],
    width: int,
    num_kv_heads: int,
    head_dim: int,
    is_ragged: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Keys and values of very different sizes, zeros among them; what no query sees is NaN."""
    case = case_of(lengths, width, device, dtype, num_kv_heads=num_kv_heads, head_dim=head_dim)
    vectors = case.qkv[:, case.config.q_size :].view(len(case.qkv), 2 * num_kv_heads, head_dim)
    sizes = torch.tensor([1.0, 3e-4, 0.0, 4.0], device=device)[: 2 * num_kv_heads]
    vectors.mul_(sizes.roll(1).repeat(num_kv_heads)[: 2 * num_kv_heads, None]).add_(0.0)  # no zero is negative
    if is_ragged:
        rows = torch.arange(len(lengths), device=device)
        begins = torch.arange(len(lengths) + 1, device=device) * width
        ragged = RaggedRows((width,) * len(lengths), rows.repeat_interleave(width), begins)
        flat = {name: getattr(case.batch, name).flatten() for name in ("tokens", "positions", "is_valid")}
        case = replace(case, batch=replace(case.batch, ragged=ragged, **flat))
    before = [part[0].clone() for part in (case.cache.rows, case.cache.scales or ())]
    expected = TorchAttention(case.config, case.batch, case.cache)(0, case.qkv.clone())
    pages = kept(case)
    for part, values in zip((case.cache.rows, case.cache.scales or ()), before, strict=True):
        part[0].copy_(values)
    found = case.attend()
    assert all(torch.equal(one, other) for one, other in zip(kept(case), pages, strict=True))
    torch.testing.assert_close(found, expected, atol=ERRORS[dtype], rtol=0)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_queries_that_see_it(
    part: str, value: float, device: torch.device, dtype: torch.dtype
) -> None:
    case, size = case_of([9, 4], 3, device, dtype), 2 * 16
    place = case.config.q_size + (size if part == "value" else 0) + 5
    case.qkv[1, place] = value  # of the first row's second token, in the first key head
    is_broken = case.attend().view(2, 3, 4, 16).isnan().all(dim=-1)
    assert is_broken[0, 1:, :2].all()
    assert not is_broken[0, 0].any()
    assert not is_broken[0, :, 2:].any()
    assert not is_broken[1].any()
