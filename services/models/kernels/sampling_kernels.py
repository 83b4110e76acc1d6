"""Triton kernels that choose tokens: each block of the vocabulary by itself, then the blocks together."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.filter_kernels import NUM_BINS, deficits_of, greatest_of, load_logits
from slipstream.services.models.kernels.noise_kernels import gumbel, noise_words, noise_words_of, rough_gumbel
from slipstream.services.models.kernels.waiting_kernels import wait_for_previous

ROUGH_ERROR = tl.constexpr(4e-4)
"""Twice what a score is off at most when its noise is rough, and room."""


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
    """The greatest logit of a block. Grid: (num_blocks, N)."""
    wait_for_previous(OVERLAPS)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits, row, index, vocab_size)
    best = tl.max(values, axis=0)
    tl.store(block_best + row * num_blocks + block, best)
    first = tl.min(tl.where((values == best) & (index < vocab_size), index, vocab_size), axis=0)
    tl.store(block_index + row * num_blocks + block, tl.minimum(first, vocab_size - 1))


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows", "level"])
def score_kernel(
    logits: tl.tensor,  # [N, vocab_size]
    block_best: tl.tensor,  # [N, num_blocks] float32
    temperatures: tl.tensor,  # [N] float32
    min_ps: tl.tensor,  # [N] float32, read if HAS_FILTERS
    seeds: tl.tensor,  # [N] int64
    positions: tl.tensor,  # [N] int64
    token_ids: tl.tensor,  # [vocab_size] int64, ascending, read if HAS_IDS
    cut_bits: tl.tensor,  # [N] int32, read if HAS_FILTERS, and so on
    cut_ties: tl.tensor,  # [N] int32
    is_cut_by_mass: tl.tensor,  # [N] int8
    top_k_counts: tl.tensor,  # [LEVELS, N, num_blocks, NUM_BINS] int32
    top_p_counts: tl.tensor,
    block_score: tl.tensor,  # [N, num_blocks] float32, written for rows with a temperature
    block_chosen: tl.tensor,  # [N, num_blocks] int32, written: index of the best score, of equal ones the first
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The best score of a block: noise less deficit, of what the filters keep. Grid: (num_blocks, N).

    Rough noise leaves one or two tokens that may be the best, and only theirs is computed in float64.
    """
    wait_for_previous(OVERLAPS)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature <= 0.0:
        return
    index = block * BLOCK + tl.arange(0, BLOCK)
    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    deficits = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature)
    is_kept = (index < vocab_size) & (deficits < float("inf"))
    if HAS_FILTERS:
        keys = deficits.to(tl.int32, bitcast=True)
        cut = tl.load(cut_bits + row)
        g = tl.arange(0, BLOCK_G)
        at = (((LEVELS - 1) * num_rows + row) * num_blocks + g) * NUM_BINS + (cut & (NUM_BINS - 1))
        is_before = g < block
        if tl.load(is_cut_by_mass + row) != 0:
            earlier = tl.sum(tl.load(top_p_counts + at, mask=is_before, other=0), axis=0)
        else:
            earlier = tl.sum(tl.load(top_k_counts + at, mask=is_before, other=0), axis=0)
        is_tie = keys == cut
        rank = earlier + tl.cumsum(is_tie.to(tl.int32), axis=0)
        is_kept = is_kept & ((keys < cut) | (is_tie & (rank <= tl.load(cut_ties + row))))
        min_p = tl.load(min_ps + row).to(tl.float64)
        least = tl.where(min_p > 0.0, -tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("inf"))
        is_kept = is_kept & (deficits.to(tl.float64) <= least)

    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
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
        is_first = index == first
        word = tl.sum(tl.where(is_first, words.to(tl.int64), 0), axis=0)
        score = gumbel(word) - tl.sum(tl.where(is_first, deficits, 0.0), axis=0)
        chosen = tl.where(score > best, first, chosen)
        best = tl.maximum(score, best)
        candidate = tl.where(is_first, vocab_size, candidate)
        first = tl.min(candidate, axis=0)
    tl.store(block_score + row * num_blocks + block, best)
    tl.store(block_chosen + row * num_blocks + block, chosen)


@triton.jit(do_not_specialize=["num_blocks"])
def choose_kernel(
    block_best: tl.tensor,  # [N, num_blocks] float32
    block_index: tl.tensor,  # [N, num_blocks] int32
    block_score: tl.tensor,  # [N, num_blocks] float32
    block_chosen: tl.tensor,  # [N, num_blocks] int32
    temperatures: tl.tensor,  # [N] float32
    token_ids: tl.tensor,  # [vocab_size] int64, read if HAS_IDS
    tokens: tl.tensor,  # [N] int64, written
    num_blocks: tl.tensor,
    BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A row's token: the greatest logit or the best score, of equal ones the first. Grid: (N,)."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    mask = g < num_blocks
    if tl.load(temperatures + row) > 0.0:
        value = tl.load(block_score + row * num_blocks + g, mask=mask, other=float("-inf"))
        index = tl.load(block_chosen + row * num_blocks + g, mask=mask, other=0x7FFFFFFF)
    else:
        value = tl.load(block_best + row * num_blocks + g, mask=mask, other=float("-inf"))
        index = tl.load(block_index + row * num_blocks + g, mask=mask, other=0x7FFFFFFF)
    token = tl.min(tl.where(value == tl.max(value, axis=0), index, 0x7FFFFFFF), axis=0).to(tl.int64)
    if HAS_IDS:
        token = tl.load(token_ids + token)
    tl.store(tokens + row, token)
