"""The sampler on a GPU: `sampler.sample` without a vocabulary of noise, without sorting, and without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slipstream.services.models.kernels.filter_kernels import LEVELS, NUM_BINS, count_kernel
from slipstream.services.models.kernels.launching import num_multiprocessors, overlapping
from slipstream.services.models.kernels.sampling_kernels import (
    choose_kernel,
    greatest_kernel,
    mass_kernel,
    score_kernel,
    settle_kernel,
)

if TYPE_CHECKING:
    from slipstream.services.models.sampler import SamplingRows

_BLOCK = 4096
"""Logits of one block, which a program reads together."""
_PROGRAMS_PER_MULTIPROCESSOR = 8
_LOOKS = 2
"""Candidates of a row that all multiprocessors check for top-p; one row in a hundred with p = 0.9 needs more."""


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
    row has top-k, top-p or min-p, and saves what looks for them. `token_ids`: [V] int64, ascending, what the columns
    stand for where that is not 0 .. V-1, as with a draft's smaller vocabulary. Returns [N] int64 of the same ids.
    Nothing is read back, and what is launched depends on shapes and `has_filters` alone.

    The probabilities that top-p adds up are good to about 1e-6 of their sum.
    """
    tokens = positions.new_empty(len(logits))
    if len(logits):
        assert logits.is_contiguous(), "a kernel reads rows side by side"
        _Sampling(logits, rows, positions.contiguous(), token_ids, tokens, has_filters).run()
    return tokens


class _Sampling:
    """One call of `sample`: the buffers that its kernels share."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        positions: torch.Tensor,
        token_ids: torch.Tensor | None,
        tokens: torch.Tensor,
        has_filters: bool,
    ) -> None:
        num_rows, vocab_size = logits.shape
        num_blocks = -(-vocab_size // _BLOCK)
        device = logits.device
        programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
        self._grid = (num_rows, max(1, min(num_blocks, programs // num_rows)))
        self._sizes = (vocab_size, num_blocks, num_rows)
        self._logits = logits
        self._rows = rows
        self._draws = (rows.seed, positions, token_ids if token_ids is not None else positions)
        self._tokens = tokens
        self._has_filters = has_filters
        self._options: dict[str, Any] = {"BLOCK_G": 1 << (num_blocks - 1).bit_length(), **overlapping(device)}
        self._has_ids = token_ids is not None
        levels = int(LEVELS) if has_filters else 0
        self._best, self._score = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
        self._masses = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
        self._index, self._chosen = torch.empty((2, num_rows, num_blocks), dtype=torch.int32, device=device)
        counts = torch.empty((levels, num_rows, num_blocks, int(NUM_BINS)), dtype=torch.int32, device=device)
        bits, count_before = torch.empty((2, levels, num_rows), dtype=torch.int32, device=device)
        self._looked_at = torch.empty(num_rows, dtype=torch.int32, device=device)
        self._is_done = torch.empty(num_rows, dtype=torch.int8, device=device)
        # As the kernels that filter, and those that score what passes, take them first.
        by_row, found = (logits, self._best, rows.temperature, rows.top_k), (counts, bits, count_before)
        self._filtered = (*by_row, *found)
        self._scored = (*by_row, rows.top_p, rows.min_p, *self._draws, *found)

    def run(self) -> None:
        """Launches all there is."""
        vocab_size, num_blocks, _ = self._sizes
        overlaps = {name: value for name, value in self._options.items() if name != "BLOCK_G"}
        greatest_kernel[self._grid](
            self._logits, self._best, self._index, vocab_size, num_blocks, BLOCK=_BLOCK, num_warps=8, **overlaps
        )
        if self._has_filters:
            for level in range(int(LEVELS)):
                count_kernel[self._grid](
                    *self._filtered, *self._sizes, level, BLOCK=_BLOCK, num_warps=8, **self._options
                )
        self._draw(is_second=False)
        if self._has_filters:
            for _ in range(_LOOKS):
                self._look()
                self._draw(is_second=True)
            self._settle()

    def _draw(self, *, is_second: bool) -> None:
        rows = self._rows
        variant = {"HAS_IDS": self._has_ids, "HAS_FILTERS": self._has_filters, "IS_SECOND": is_second}
        score_kernel[self._grid](
            *self._scored,
            self._masses,
            self._is_done,
            self._looked_at,
            self._score,
            self._chosen,
            *self._sizes,
            BLOCK=_BLOCK,
            num_warps=8,
            **variant,
            **self._options,
        )
        choose_kernel[(self._sizes[2],)](
            self._best,
            self._index,
            self._score,
            self._chosen,
            rows.temperature,
            rows.top_p,
            self._draws[2],
            self._masses,
            self._is_done,
            self._looked_at,
            self._tokens,
            *self._sizes[1:],
            num_warps=1,
            **variant,
            **self._options,
        )

    def _look(self) -> None:
        mass_kernel[self._grid](
            *self._filtered,
            self._masses,
            self._is_done,
            self._looked_at,
            *self._sizes,
            BLOCK=_BLOCK,
            num_warps=8,
            **self._options,
        )

    def _settle(self) -> None:
        settle_kernel[(self._sizes[2],)](
            *self._scored,
            self._is_done,
            self._looked_at,
            self._tokens,
            *self._sizes,
            BLOCK=_BLOCK,
            HAS_IDS=self._has_ids,
            num_warps=16,
            **self._options,
        )
