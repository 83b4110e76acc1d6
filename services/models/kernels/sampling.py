"""The sampler on a GPU: `sampler.sample` without a vocabulary of noise, without sorting, and without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.kernels.filter_kernels import NUM_BINS, count_kernel, cut_kernel
from slipstream.services.models.kernels.launching import overlapping
from slipstream.services.models.kernels.sampling_kernels import choose_kernel, greatest_kernel, score_kernel

if TYPE_CHECKING:
    from slipstream.services.models.sampler import SamplingRows

_BLOCK = 4096
_CHUNK = 128
_LEVELS = 7
"""Passes over the 31 bits of a deficit, five at a time."""


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    positions: torch.Tensor,
    *,
    has_filters: bool = True,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chooses a token for each row, as `sampler.sample` does; rows are greedy, sampled and filtered side by side.

    `logits`: [N, V] of any floating dtype, contiguous. `positions`: [N] int64. `has_filters`: False promises that no
    row has top-k, top-p or min-p, and saves the launches that look for their cuts. `token_ids`: [V] int64, ascending,
    what the columns stand for where that is not 0 .. V-1, as with a draft's smaller vocabulary. Returns [N] int64 of
    the same ids. Nothing is read back, and what is launched depends on shapes and `has_filters` alone.

    The probabilities that top-p adds up are good to about 1e-6 of their sum.
    """
    num_rows, vocab_size = logits.shape
    tokens = positions.new_empty(num_rows)
    if not num_rows:
        return tokens
    assert logits.is_contiguous(), "a kernel reads rows side by side"
    positions = positions.contiguous()
    overlap = overlapping(logits.device)
    num_blocks = -(-vocab_size // _BLOCK)
    block_g = 1 << (num_blocks - 1).bit_length()
    shape = (2, num_rows, num_blocks)
    best, score = torch.empty(shape, dtype=torch.float32, device=logits.device)
    index, chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    greatest_kernel[num_blocks, num_rows](
        logits, best, index, vocab_size, num_blocks, BLOCK=_BLOCK, num_warps=8, **overlap
    )
    cuts = _Cuts(num_rows, num_blocks, logits.device) if has_filters else None
    if cuts is not None:
        cuts.find(logits, best, rows)
    score_kernel[num_blocks, num_rows](
        logits,
        best,
        rows.temperature,
        rows.min_p,
        rows.seed,
        positions,
        token_ids if token_ids is not None else positions,
        *(cuts.tensors() if cuts is not None else [index] * 5),
        score,
        chosen,
        vocab_size,
        num_blocks,
        num_rows,
        LEVELS=_LEVELS,
        BLOCK=_BLOCK,
        BLOCK_G=block_g,
        HAS_IDS=token_ids is not None,
        HAS_FILTERS=has_filters,
        **overlap,
        num_warps=8,
    )
    choose_kernel[(num_rows,)](
        best,
        index,
        score,
        chosen,
        rows.temperature,
        token_ids if token_ids is not None else positions,
        tokens,
        num_blocks,
        BLOCK_G=block_g,
        HAS_IDS=token_ids is not None,
        **overlap,
        num_warps=1,
    )
    return tokens


class _Search:
    """What the levels of one search leave for each other."""

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        shape = (_LEVELS, num_rows, num_blocks, int(NUM_BINS))
        self.counts = torch.empty(shape, dtype=torch.int32, device=device)
        self.masses = torch.empty(shape, dtype=torch.float32, device=device)
        self.bits, self.count_before = torch.empty((2, _LEVELS, num_rows), dtype=torch.int32, device=device)
        self.mass_before = torch.empty((_LEVELS, num_rows), dtype=torch.float64, device=device)

    def tensors(self) -> list[torch.Tensor]:
        return [self.counts, self.masses, self.bits, self.count_before, self.mass_before]


class _Cuts:
    """Where each row's order of tokens is cut off, by top-k and then by top-p."""

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._num_blocks = num_blocks
        self._top_k = _Search(num_rows, num_blocks, device)
        self._top_p = _Search(num_rows, num_blocks, device)
        self._kept_mass = torch.empty(num_rows, dtype=torch.float64, device=device)
        self._bits, self._ties = torch.empty((2, num_rows), dtype=torch.int32, device=device)
        self._is_by_mass = torch.empty(num_rows, dtype=torch.int8, device=device)

    def tensors(self) -> list[torch.Tensor]:
        """What `score_kernel` reads."""
        return [self._bits, self._ties, self._is_by_mass, self._top_k.counts, self._top_p.counts]

    def find(self, logits: torch.Tensor, best: torch.Tensor, rows: SamplingRows) -> None:
        """Launches both searches; rows without a filter leave them at once."""
        block_g = 1 << (self._num_blocks - 1).bit_length()
        vocab_size = logits.shape[1]
        parameters = [rows.temperature, rows.top_k, rows.top_p, self._kept_mass]
        sizes = [vocab_size, self._num_blocks, self._num_rows]
        for search, is_by_mass in ((self._top_k, False), (self._top_p, True)):
            for level in range(_LEVELS):
                count_kernel[self._num_blocks, self._num_rows](
                    logits,
                    best,
                    *parameters,
                    *search.tensors(),
                    *sizes,
                    level,
                    LEVELS=_LEVELS,
                    BLOCK=_BLOCK,
                    CHUNK=_CHUNK,
                    BLOCK_G=block_g,
                    BY_MASS=is_by_mass,
                    **overlapping(logits.device),
                    num_warps=4,
                )
            cut_kernel[(self._num_rows,)](
                *parameters,
                *search.tensors(),
                self._bits,
                self._ties,
                self._is_by_mass,
                *sizes,
                LEVELS=_LEVELS,
                BLOCK_G=block_g,
                BY_MASS=is_by_mass,
                **overlapping(logits.device),
                num_warps=4,
            )
