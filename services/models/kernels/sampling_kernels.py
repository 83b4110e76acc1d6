"""Triton kernels that choose tokens: each block of the vocabulary by itself, then the blocks together.

Top-p keeps a prefix of the order (deficit, index), and a token's score does not depend on it. So the token with the
best score of all is the one to be chosen if top-p keeps it; and if it does not, neither does it keep any token behind
it, so that the next to look at is the best of those before. A second look is needed with probability 1 - top_p at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.filter_kernels import (
    NO_CUT,
    cut_of,
    deficits_of,
    greatest_of,
    is_before_cut,
    load_logits,
    weights_of,
)
from slipstream.services.models.kernels.noise_kernels import gumbel, noise_words, noise_words_of, rough_gumbel
from slipstream.services.models.kernels.waiting_kernels import wait_for_previous

ROUGH_ERROR = tl.constexpr(4e-4)
"""Twice what a score that may win is off at most when it is rough, and room."""


@triton.jit(do_not_specialize=["vocab_size", "num_blocks"])
def greatest_kernel(
    logits: tl.tensor,  # [N, vocab_size]
    block_best: tl.tensor,  # [N, num_blocks] float32, written
    block_index: tl.tensor,  # [N, num_blocks] int32, written: of equal ones the first
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The greatest logit of each block. Grid: (any number, N)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        values = load_logits(logits, row, index, vocab_size)
        best = tl.max(values, axis=0)
        tl.store(block_best + row * num_blocks + block, best)
        first = tl.min(tl.where((values == best) & (index < vocab_size), index, vocab_size), axis=0)
        tl.store(block_index + row * num_blocks + block, tl.minimum(first, vocab_size - 1))


@triton.jit
def best_score(
    logits: tl.tensor,
    token_ids: tl.tensor,
    row: tl.tensor,
    block: tl.tensor,
    greatest: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    least_min_p: tl.tensor,  # float64: the greatest deficit that min-p keeps, read if HAS_FILTERS, and so on
    cut: tl.tensor,
    ties: tl.tensor,
    counts: tl.tensor,
    bound: tl.tensor,  # int32: the bits of the deficit before which tokens count
    bound_index: tl.tensor,  # int32: tokens with this very deficit count before this index
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
) -> tl.tensor:
    """A block's best score (noise less deficit), and the index of the token that has it: of equal ones the first.

    Rough scores leave one token or two that may be the best, and only theirs are computed in float64.
    """
    index = block * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits, row, index, vocab_size)
    if HAS_FILTERS:
        deficits = deficits_of(values, greatest, temperature)
        keys = deficits.to(tl.int32, bitcast=True)
        is_kept = (keys < bound) | ((keys == bound) & (index < bound_index))
        is_kept = is_kept & is_before_cut(keys, cut, ties, counts, row, block, num_blocks, num_rows, BLOCK_G)
        is_kept = is_kept & (deficits.to(tl.float64) <= least_min_p)
    else:
        deficits = tl.where(values == greatest, 0.0, greatest - values) * (1.0 / temperature)
        is_kept = deficits >= 0.0
    is_kept = is_kept & (index < vocab_size) & (deficits < float("inf"))
    if HAS_IDS:
        ids = tl.load(token_ids + index, mask=index < vocab_size, other=0).to(tl.int32)
        words = noise_words_of(seed, position, ids)
    else:
        words = noise_words(seed, position, block * BLOCK, BLOCK)
    rough = tl.where(is_kept, rough_gumbel(words) - deficits, float("-inf"))
    candidate = tl.where(is_kept & (rough >= tl.max(rough, axis=0) - ROUGH_ERROR), index, vocab_size)
    best = tl.full([], float("-inf"), tl.float32)
    chosen = vocab_size - 1
    first = tl.min(candidate, axis=0)
    while first < vocab_size:
        token_id = first
        if HAS_IDS:
            token_id = tl.load(token_ids + first).to(tl.int32)
        deficit = deficits_of(load_logits(logits, row, first, vocab_size), greatest, temperature)
        score = gumbel(noise_words_of(seed, position, token_id)) - deficit
        chosen = tl.where(score > best, first, chosen)
        best = tl.maximum(score, best)
        candidate = tl.where(index == first, vocab_size, candidate)
        first = tl.min(candidate, axis=0)
    return best, chosen


@triton.jit
def least_of(min_ps: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The greatest deficit that min-p keeps: float64."""
    min_p = tl.load(min_ps + row).to(tl.float64)
    return tl.where(min_p > 0.0, -tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("inf"))


@triton.jit
def masses_of(
    logits: tl.tensor,
    row: tl.tensor,
    block: tl.tensor,
    greatest: tl.tensor,
    temperature: tl.tensor,
    cut: tl.tensor,
    ties: tl.tensor,
    counts: tl.tensor,
    bound: tl.tensor,
    bound_index: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """The mass of what top-k keeps of a block, and of what of it lies before a bound."""
    index = block * BLOCK + tl.arange(0, BLOCK)
    deficits = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature)
    keys = deficits.to(tl.int32, bitcast=True)
    is_kept = (index < vocab_size) & is_before_cut(keys, cut, ties, counts, row, block, num_blocks, num_rows, BLOCK_G)
    weights = tl.where(is_kept, weights_of(deficits), 0.0)
    is_before = (keys < bound) | ((keys == bound) & (index < bound_index))
    return tl.sum(weights, axis=0), tl.sum(tl.where(is_before, weights, 0.0), axis=0)


@triton.jit
def is_kept_by_top_p(
    block_masses: tl.tensor,  # [2, N, num_blocks] float32: those of `masses_of`
    top_ps: tl.tensor,
    row: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """Whether the mass before a token is less than what top-p wants."""
    g = tl.arange(0, BLOCK_G)
    at = row * num_blocks + g
    total = tl.load(block_masses + at, mask=g < num_blocks, other=0.0).to(tl.float64)
    before = tl.load(block_masses + num_rows.to(tl.int64) * num_blocks + at, mask=g < num_blocks, other=0.0)
    wanted = tl.load(top_ps + row).to(tl.float64) * tl.sum(total, axis=0)
    return tl.sum(before.to(tl.float64), axis=0) < wanted


@triton.jit
def first_best(
    values: tl.tensor,  # [N, num_blocks] float32
    indices: tl.tensor,  # [N, num_blocks] int32
    row: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """The index that goes with the greatest value of a row, of equal ones the first."""
    g = tl.arange(0, BLOCK_G)
    value = tl.load(values + row * num_blocks + g, mask=g < num_blocks, other=float("-inf"))
    index = tl.load(indices + row * num_blocks + g, mask=g < num_blocks, other=0x7FFFFFFF)
    return tl.min(tl.where(value == tl.max(value, axis=0), index, 0x7FFFFFFF), axis=0)


@triton.jit
def bits_of_deficit(
    logits: tl.tensor,
    row: tl.tensor,
    index: tl.tensor,
    greatest: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    """Those of one token: int32."""
    deficit = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature)
    return deficit.to(tl.int32, bitcast=True)


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
    looked_at: tl.tensor,  # [N] int32: index of the token that was looked at
    block_score: tl.tensor,  # [N, num_blocks] float32, written for rows that are to be sampled
    block_chosen: tl.tensor,  # [N, num_blocks] int32, written: index of the best score
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    IS_SECOND: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The best score of each block; if IS_SECOND, of the tokens before one that top-p does not keep.

    Grid: (any number, N).
    """
    wait_for_previous(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
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
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        best, chosen = best_score(
            logits, token_ids, row, block, greatest, temperature, tl.load(seeds + row), tl.load(positions + row),
            least, cut, ties, counts, bound, bound_index, vocab_size, num_blocks, num_rows,
            BLOCK, BLOCK_G, HAS_IDS, HAS_FILTERS,
        )  # fmt: skip
        tl.store(block_score + row * num_blocks + block, best)
        tl.store(block_chosen + row * num_blocks + block, chosen)


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows"])
def mass_kernel(
    logits: tl.tensor,
    block_best: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    counts: tl.tensor,
    bits: tl.tensor,
    count_before: tl.tensor,
    block_masses: tl.tensor,  # [2, N, num_blocks] float32, written
    is_done: tl.tensor,
    looked_at: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each block's mass, and that before the token that is looked at. Grid: (any number, N)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(is_done + row) != 0:
        return
    temperature = tl.load(temperatures + row)
    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    bound_index = tl.load(looked_at + row)
    bound = bits_of_deficit(logits, row, bound_index, greatest, temperature, vocab_size)
    cut, ties = cut_of(top_ks, counts, bits, count_before, row, vocab_size, num_blocks, num_rows, BLOCK_G)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
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
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    IS_SECOND: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A row's token: the greatest logit or the best score, of equal ones the first. Grid: (N,)."""
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
    logits: tl.tensor,
    block_best: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    counts: tl.tensor,
    bits: tl.tensor,
    count_before: tl.tensor,
    is_done: tl.tensor,
    looked_at: tl.tensor,
    tokens: tl.tensor,  # [N] int64, written for rows that are not done
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Looks at tokens until top-p keeps one, for the few rows that are not done by then. Grid: (N,).

    It ends: each look is at a token before the last one, and the first of all is kept.
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
