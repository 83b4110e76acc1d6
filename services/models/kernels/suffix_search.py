"""Searches the ring of `SuffixCache` for the ends of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024
"""Entries that a program compares: of 65,536 each sequence has 64 programs."""


@triton.jit(do_not_specialize=["size"])
def search_kernel(
    before: tl.tensor,  # [LONGEST, size + 1] int32
    suffixes: tl.tensor,  # [B, LONGEST] int32
    count: tl.tensor,  # [1] int64
    best: tl.tensor,  # [B] int32, 0 at first
    size: tl.tensor,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compares BLOCK entries with one suffix. Grid: (cdiv(size, BLOCK), B).

    Only of entries that match so far is the next token read.
    """
    b = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_match = place < size
    score = tl.zeros((BLOCK,), tl.int32)
    for back in range(LONGEST):
        wanted = tl.load(suffixes + b * LONGEST + back)
        token = tl.load(before + back * (size + 1).to(tl.int64) + place, mask=is_match, other=-1)
        is_match = is_match & (token == wanted)
        score += (is_match & (back >= SHORTEST - 1)).to(tl.int32)
    oldest = (tl.load(count) % size).to(tl.int32)
    age = tl.where(place < oldest, place - oldest + size, place - oldest)
    found = tl.max(tl.where(score > 0, score * size + age, 0), axis=0)
    if found > 0:
        tl.atomic_max(best + b, found, sem="relaxed")


def search(before: Tensor, suffixes: Tensor, count: Tensor, shortest: int) -> Tensor:
    """Finds the best match of each of B suffixes, as `search` of `suffix_cache.py` does. Returns [B] int64."""
    num_rows, longest = suffixes.shape
    size = before.shape[1] - 1
    best = torch.zeros(num_rows, dtype=torch.int32, device=before.device)
    search_kernel[triton.cdiv(size, _BLOCK), num_rows](
        before,
        suffixes.contiguous(),
        count,
        best,
        size,
        SHORTEST=shortest,
        LONGEST=longest,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return best.to(torch.int64)
