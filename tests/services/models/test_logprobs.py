"""Logprobs against a naive log-softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.services.models.sampler import logprobs_of


@pytest.mark.parametrize("vocab_size", [1, 7, 300])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_equals_the_naive_one(vocab_size: int, num_top: int) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 6, (3, 4, vocab_size)).astype(np.float32)
    logits[1] = logits[1].round()  # many tokens with the same logit
    tokens = rng.integers(0, vocab_size, (3, 4))
    found = logprobs_of(torch.from_numpy(logits), torch.from_numpy(tokens), num_top)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=2, keepdims=True)).sum(axis=2, keepdims=True)) + exact.max(
        axis=2, keepdims=True
    )
    np.testing.assert_allclose(found.output, np.take_along_axis(exact, tokens[..., None], 2)[..., 0], atol=1e-5)
    order = np.argsort(-logits, axis=2, kind="stable")[..., :num_top]
    assert found.top_tokens.dtype == torch.int32
    np.testing.assert_array_equal(found.top_tokens, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(exact, order, 2), atol=1e-5)
    # What is told twice is told the same.
    is_chosen = found.top_tokens == torch.from_numpy(tokens)[..., None]
    assert torch.equal(found.top[is_chosen], found.output[..., None].expand_as(is_chosen)[is_chosen])


def test_nothing_is_read_back_off_the_cpu() -> None:
    logits = torch.empty((2, 3, 50), device="meta")
    found = logprobs_of(logits, torch.empty((2, 3), dtype=torch.int64, device="meta"), 20)
    assert found.top.shape == (2, 3, 20)
