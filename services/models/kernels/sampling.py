"""The sampler on a GPU: `sampler.sample` without a vocabulary of noise, without sorting, and without waiting.

Each block of the vocabulary is computed by itself, then the blocks together. Top-p keeps a prefix of the order
(deficit, index), and a token's score does not depend on it. So the token with the best score of all is the one to be
chosen if top-p keeps it; and if it does not, neither does it keep any token after it, so that the next to look at is
the best of those before. A second look is needed with probability 1 - top_p at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from slipstream.services.models.kernels.launching import (
    num_multiprocessors,
    overlapping,
    power_of_two,
    wait_for_previous,
)
from slipstream.services.models.kernels.token_scores import (
    LEVELS,
    NO_CUT,
    NUM_BINS,
    best_score,
    bits_of_deficit,
    count_kernel,
    cut_of,
    first_best,
    greatest_of,
    is_kept_by_top_p,
    least_of,
    load_logits,
    masses_of,
)

if TYPE_CHECKING:
    from slipstream.services.models.sampler import SamplingRows


@triton.jit(do_not_specialize=["vocab_size", "num_blocks"])
def greatest_kernel(
    logits: tl.tensor,  # [N, vocab_size]
    block_best: tl.tensor,  # [N, num_blocks] float32, written
    block_index: tl.tensor,  # [N, num_blocks] int32, written: of equal ones the first
    vocab_size: tl.tensor, num_blocks: tl.tensor, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The greatest logit of each block. Grid: (N, any number)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        values = load_logits(logits, row, index, vocab_size)
        best = tl.max(values, axis=0)
        tl.store(block_best + row * num_blocks + block, best)
        first = tl.min(tl.where((values == best) & (index < vocab_size), index, vocab_size), axis=0)
        tl.store(block_index + row * num_blocks + block, tl.minimum(first, vocab_size - 1))


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows"])
def score_kernel(
    logits: tl.tensor,  # [N, vocab_size]
    block_best: tl.tensor,  # [N, num_blocks] float32
    temperatures: tl.tensor,  # [N] float32
    top_ks: tl.tensor,  # [N] int64, read if HAS_FILTERS, and so on
    top_ps: tl.tensor,  # [N] float32
    min_ps: tl.tensor,  # [N] float32
    seeds: tl.tensor,  # [N] int64
    positions: tl.tensor,  # [N] int64
    token_ids: tl.tensor,  # [vocab_size] int64, ascending, read if HAS_IDS
    counts: tl.tensor,  # [LEVELS, N, num_blocks, NUM_BINS] int32
    bits: tl.tensor,  # [LEVELS, N] int32
    count_before: tl.tensor,  # [LEVELS, N] int32
    block_masses: tl.tensor,  # [2, N, num_blocks] float32, read if IS_SECOND, and so on
    is_done: tl.tensor,  # [N] int8
    looked_at: tl.tensor,  # [N] int32: index of the token that was checked
    block_score: tl.tensor,  # [N, num_blocks] float32, written for rows that are to be sampled
    block_chosen: tl.tensor,  # [N, num_blocks] int32, written: index of the best score
    vocab_size: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_FILTERS: tl.constexpr, IS_SECOND: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Finds the best score of each block; if IS_SECOND, among the tokens before one that top-p does not keep.

    Grid: (N, any number).
    """
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature <= 0.0:
        return
    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    bound = NO_CUT
    bound_index = 0
    if IS_SECOND:
        if tl.load(is_done + row) != 0:
            return
        if is_kept_by_top_p(block_masses, top_ps, row, num_blocks, num_rows, BLOCK_G):
            return
        bound_index = tl.load(looked_at + row)
        bound = bits_of_deficit(logits, row, bound_index, greatest, temperature, vocab_size)
    cut = NO_CUT
    ties = 0
    least = tl.zeros([], tl.float64)
    if HAS_FILTERS:
        cut, ties = cut_of(top_ks, counts, bits, count_before, row, vocab_size, num_blocks, num_rows, BLOCK_G)
        least = least_of(min_ps, row)
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        best, chosen = best_score(
            logits, token_ids, row, block, greatest, temperature, tl.load(seeds + row), tl.load(positions + row),
            least, cut, ties, counts, bound, bound_index, vocab_size, num_blocks, num_rows,
            BLOCK, BLOCK_G, HAS_IDS, HAS_FILTERS,
        )  # fmt: skip
        tl.store(block_score + row * num_blocks + block, best)
        tl.store(block_chosen + row * num_blocks + block, chosen)


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows"])
def mass_kernel(
    logits: tl.tensor, block_best: tl.tensor, temperatures: tl.tensor, top_ks: tl.tensor, counts: tl.tensor,
    bits: tl.tensor, count_before: tl.tensor,
    block_masses: tl.tensor,  # [2, N, num_blocks] float32, written
    is_done: tl.tensor, looked_at: tl.tensor, vocab_size: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor,
    BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Computes each block's mass, and the mass before the token that is checked. Grid: (N, any number)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_done + row) != 0:
        return
    temperature = tl.load(temperatures + row)
    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    bound_index = tl.load(looked_at + row)
    bound = bits_of_deficit(logits, row, bound_index, greatest, temperature, vocab_size)
    cut, ties = cut_of(top_ks, counts, bits, count_before, row, vocab_size, num_blocks, num_rows, BLOCK_G)
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        total, before = masses_of(
            logits, row, block, greatest, temperature, cut, ties, counts, bound, bound_index,
            vocab_size, num_blocks, num_rows, BLOCK, BLOCK_G,
        )  # fmt: skip
        tl.store(block_masses + row * num_blocks + block, total)
        tl.store(block_masses + (num_rows + row) * num_blocks + block, before)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def choose_kernel(
    block_best: tl.tensor,  # [N, num_blocks] float32
    block_index: tl.tensor,  # [N, num_blocks] int32
    block_score: tl.tensor,  # [N, num_blocks] float32
    block_chosen: tl.tensor,  # [N, num_blocks] int32
    temperatures: tl.tensor,  # [N] float32
    top_ps: tl.tensor,  # [N] float32, read if HAS_FILTERS
    token_ids: tl.tensor,  # [vocab_size] int64, read if HAS_IDS
    block_masses: tl.tensor,  # [2, N, num_blocks] float32, read if IS_SECOND
    is_done: tl.tensor,  # [N] int8, written if HAS_FILTERS
    looked_at: tl.tensor,  # [N] int32, written if HAS_FILTERS
    tokens: tl.tensor,  # [N] int64, written
    num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK_G: tl.constexpr, HAS_IDS: tl.constexpr, HAS_FILTERS: tl.constexpr,
    IS_SECOND: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Chooses a row's token: the greatest logit or the best score, the first of equal ones. Grid: (N,)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    if IS_SECOND:
        if tl.load(is_done + row) != 0:
            return
        if is_kept_by_top_p(block_masses, top_ps, row, num_blocks, num_rows, BLOCK_G):
            tl.store(is_done + row, 1)
            return
    is_sampled = tl.load(temperatures + row) > 0.0
    if is_sampled:
        index = first_best(block_score, block_chosen, row, num_blocks, BLOCK_G)
    else:
        index = first_best(block_best, block_index, row, num_blocks, BLOCK_G)
    if HAS_FILTERS:
        tl.store(looked_at + row, index)
        if not IS_SECOND:
            tl.store(is_done + row, ((tl.load(top_ps + row) >= 1.0) | (is_sampled == 0)).to(tl.int8))
    token = index.to(tl.int64)
    if HAS_IDS:
        token = tl.load(token_ids + index)
    tl.store(tokens + row, token)


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows"])
def settle_kernel(
    logits: tl.tensor, block_best: tl.tensor, temperatures: tl.tensor, top_ks: tl.tensor, top_ps: tl.tensor,
    min_ps: tl.tensor, seeds: tl.tensor, positions: tl.tensor, token_ids: tl.tensor, counts: tl.tensor, bits: tl.tensor,
    count_before: tl.tensor, is_done: tl.tensor, looked_at: tl.tensor,
    tokens: tl.tensor,  # [N] int64, written for rows that are not done
    vocab_size: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Checks tokens until top-p keeps one, for the few rows that are not done by then. Grid: (N,).

    It ends: each token that is checked lies before the last one, and the first of all is kept.
    """
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_done + row) != 0:
        return
    temperature = tl.load(temperatures + row)
    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    cut, ties = cut_of(top_ks, counts, bits, count_before, row, vocab_size, num_blocks, num_rows, BLOCK_G)
    least = least_of(min_ps, row)
    index = tl.load(looked_at + row)
    is_looking = True
    while is_looking:
        bound = bits_of_deficit(logits, row, index, greatest, temperature, vocab_size)
        total = tl.zeros([], tl.float64)
        before = tl.zeros([], tl.float64)
        for block in range(num_blocks):
            block_total, block_before = masses_of(
                logits, row, block, greatest, temperature, cut, ties, counts, bound, index,
                vocab_size, num_blocks, num_rows, BLOCK, BLOCK_G,
            )  # fmt: skip
            total += block_total.to(tl.float64)
            before += block_before.to(tl.float64)
        is_looking = before >= top_p * total
        if is_looking:
            best = tl.full([], float("-inf"), tl.float32)
            next_index = index
            for block in range(num_blocks):
                score, chosen = best_score(
                    logits, token_ids, row, block, greatest, temperature, seed, position,
                    least, cut, ties, counts, bound, index, vocab_size, num_blocks, num_rows,
                    BLOCK, BLOCK_G, HAS_IDS, True,
                )  # fmt: skip
                next_index = tl.where(score > best, chosen, next_index)
                best = tl.maximum(score, best)
            is_looking = next_index != index
            index = next_index
    token = index.to(tl.int64)
    if HAS_IDS:
        token = tl.load(token_ids + index)
    tl.store(tokens + row, token)


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
    Nothing is read back, and what is launched depends only on shapes and `has_filters`.

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
        (num_rows, vocab_size), device = logits.shape, logits.device
        num_blocks = -(-vocab_size // _BLOCK)
        programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
        self._grid = (num_rows, max(1, min(num_blocks, programs // num_rows)))
        self._sizes = (vocab_size, num_blocks, num_rows)
        self._logits, self._rows, self._tokens = logits, rows, tokens
        self._draws = (rows.seed, positions, token_ids if token_ids is not None else positions)
        self._has_filters, self._has_ids = has_filters, token_ids is not None
        self._overlaps = overlapping(device)
        self._options: dict[str, Any] = {"BLOCK_G": power_of_two(num_blocks), **self._overlaps}
        levels = int(LEVELS) if has_filters else 0
        self._best, self._score = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
        self._masses = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
        self._index, self._chosen = torch.empty((2, num_rows, num_blocks), dtype=torch.int32, device=device)
        counts = torch.empty((levels, num_rows, num_blocks, int(NUM_BINS)), dtype=torch.int32, device=device)
        bits, count_before = torch.empty((2, levels, num_rows), dtype=torch.int32, device=device)
        looked_at = torch.empty(num_rows, dtype=torch.int32, device=device)
        self._checked = (torch.empty(num_rows, dtype=torch.int8, device=device), looked_at)
        # As the kernels that filter, and those that score what passes, take them first.
        by_row, found = (logits, self._best, rows.temperature, rows.top_k), (counts, bits, count_before)
        self._filtered = (*by_row, *found)
        self._scored = (*by_row, rows.top_p, rows.min_p, *self._draws, *found)

    def run(self) -> None:
        """Launches all there is."""
        greatest_kernel[self._grid](
            self._logits, self._best, self._index, *self._sizes[:2], BLOCK=_BLOCK, num_warps=8, **self._overlaps
        )
        if self._has_filters:
            for level in range(int(LEVELS)):
                count_kernel[self._grid](
                    *self._filtered, *self._sizes, level, BLOCK=_BLOCK, num_warps=8, **self._options
                )
        self._draw(is_second=False)
        if self._has_filters:
            for _ in range(_LOOKS):
                mass_kernel[self._grid](
                    *self._filtered, self._masses, *self._checked, *self._sizes,
                    BLOCK=_BLOCK, num_warps=8, **self._options,
                )  # fmt: skip
                self._draw(is_second=True)
            settle_kernel[(self._sizes[2],)](
                *self._scored, *self._checked, self._tokens, *self._sizes,
                BLOCK=_BLOCK, HAS_IDS=self._has_ids, num_warps=16, **self._options,
            )  # fmt: skip

    def _draw(self, *, is_second: bool) -> None:
        variant = {"HAS_IDS": self._has_ids, "HAS_FILTERS": self._has_filters, "IS_SECOND": is_second}
        score_kernel[self._grid](
            *self._scored, self._masses, *self._checked, self._score, self._chosen, *self._sizes,
            BLOCK=_BLOCK, num_warps=8, **variant, **self._options,
        )  # fmt: skip
        choose_kernel[(self._sizes[2],)](
            self._best, self._index, self._score, self._chosen, self._rows.temperature, self._rows.top_p,
            self._draws[2], self._masses, *self._checked, self._tokens, *self._sizes[1:],
            num_warps=1, **variant, **self._options,
        )  # fmt: skip
