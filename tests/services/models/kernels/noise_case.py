"""Kernels that write the random words and the noise of the sampler's kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.services.models.kernels.token_scores import gumbel, noise_words, noise_words_of, rough_gumbel


@triton.jit
def _noise_kernel(
    seed: tl.tensor,
    position: tl.tensor,
    ids: tl.tensor,
    words: tl.tensor,
    words_of: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(words + at, noise_words(tl.load(seed), tl.load(position), first, BLOCK).to(tl.int64))
    tl.store(words_of + at, noise_words_of(tl.load(seed), tl.load(position), tl.load(ids + at)).to(tl.int64))


@triton.jit
def _gumbel_kernel(words: tl.tensor, exact: tl.tensor, rough: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < size, other=0)
    tl.store(exact + at, gumbel(word), mask=at < size)
    tl.store(rough + at, rough_gumbel(word.to(tl.uint32)), mask=at < size)


def words_by_kernel(seed: int, position: int, first: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of the token ids `first` .. `first` + 63, made as a run of ids and one by one: twice [64] int64."""
    seeds, positions = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    ids = torch.arange(first, first + 64, dtype=torch.int32, device=device)
    words, words_of = torch.empty((2, 64), dtype=torch.int64, device=device)
    _noise_kernel[(1,)](seeds, positions, ids, words, words_of, first, BLOCK=64)
    return words, words_of


def gumbel_by_kernel(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The noise of [N] int64 words, exact and rough: twice [N] float32."""
    exact, rough = torch.empty((2, len(words)), dtype=torch.float32, device=words.device)
    _gumbel_kernel[(-(-len(words) // 1024),)](words, exact, rough, len(words), BLOCK=1024)
    return exact, rough
