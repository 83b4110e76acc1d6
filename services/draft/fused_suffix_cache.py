"""A `SuffixCache` on a GPU: a few kernels for each step, which depend on shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from slipstream.services.draft.suffix_cache import NO_TOKEN, NOTHING_TO_FIND, SuffixCache
from slipstream.services.models.kernels.launching import power_of_two
from slipstream.services.models.kernels.suffix_ring import follow_kernel, plan_kernel, record_kernel, search_kernel

if TYPE_CHECKING:
    from slipstream.services.draft.suffix_cache import Guesses, NewTokens

_SEARCH_BLOCK = 1024
"""Entries that a program compares: of 65,536 each sequence has 64 programs."""


class FusedSuffixCache(SuffixCache):
    """Compares each sequence with all entries, also with those that are empty."""

    def record(self, new: NewTokens, history: torch.Tensor) -> None:
        num_rows, width = new.tokens.shape
        numbers, taken, linked = torch.empty((3, num_rows), dtype=torch.int64, device=self._device)
        plan_kernel[(1,)](
            new.rows,
            new.ends,
            new.num_new,
            new.limits,
            new.are_shared,
            self._count,
            self._last,
            self._expected,
            numbers,
            taken,
            linked,
            num_rows,
            self._size,
            BLOCK_B=power_of_two(num_rows),
            num_warps=4,
        )
        record_kernel[(num_rows,)](
            new.tokens.contiguous(),
            new.ends,
            new.num_new,
            numbers,
            taken,
            linked,
            history,
            self._tokens,
            self._before,
            self._next,
            self._size,
            history.shape[1],
            WIDTH=width,
            BLOCK_W=power_of_two(width),
            LONGEST=self._longest,
            NO_TOKEN=NO_TOKEN,
            num_warps=1,
        )

    def improve(self, own: Guesses, new: NewTokens, history: torch.Tensor) -> torch.Tensor:
        num_rows, num_tokens = own.tokens.shape
        best = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        search_kernel[triton.cdiv(self._size, _SEARCH_BLOCK), num_rows](
            self._before,
            history,
            new.ends,
            self._count,
            best,
            self._size,
            history.shape[1],
            SHORTEST=self._shortest,
            LONGEST=self._longest,
            NOTHING=NOTHING_TO_FIND,
            BLOCK=_SEARCH_BLOCK,
            num_warps=4,
        )
        guesses = torch.empty_like(own.tokens)
        follow_kernel[(num_rows,)](
            best,
            own.scores,
            own.tokens.contiguous(),
            new.are_shared,
            self._tokens,
            self._next,
            self._count,
            guesses,
            self._size,
            NUM_TOKENS=num_tokens,
            num_warps=1,
        )
        return guesses
