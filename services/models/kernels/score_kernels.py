"""Triton functions of the sampler: Gumbel noise, and what is found in a block of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.filter_kernels import deficits_of, is_before_cut, load_logits, weights_of


@triton.jit
def noise_words(seed: tl.tensor, position: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The random words of token ids `first` .. `first` + BLOCK - 1, `first` a multiple of four: [BLOCK] uint32."""
    block = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(seed, block, zero + (position & 0xFFFFFFFF).to(tl.uint32), zero, zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def noise_words_of(seed: tl.tensor, position: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """The random words of any token ids, a tensor of int32: uint32 of the same shape."""
    block = (token_ids >> 2).to(tl.uint32)
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(seed, block, zero + (position & 0xFFFFFFFF).to(tl.uint32), zero, zero)
    word = token_ids & 3
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def gumbel(word: tl.tensor) -> tl.tensor:
    """The noise of a random word, computed in float64 and rounded to float32."""
    complement = (4294967295.5 - word.to(tl.float64)) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(complement))).to(tl.float32)


@triton.jit
def rough_gumbel(words: tl.tensor) -> tl.tensor:
    """`gumbel` to within 1e-4, at a hundredth of its cost: float32."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = ((0xFFFFFFFF - words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # log loses the small u that 1 - u rounds away: its series there.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(complement)))


ROUGH_ERROR = tl.constexpr(4e-4)
"""Twice the greatest error of a rough score that may win, and some room."""


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
    """Returns a block's best score (noise less deficit) and the index of its token, the first of equal ones.

    Rough scores leave one or two candidates, and only their scores are computed in float64.
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
    """Returns the mass of a block's tokens that top-k keeps, and the part of it before a bound."""
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
    """True if the mass before a token is less than top-p's share."""
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
    """The index of a row's greatest value, the first of equal ones."""
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
    """The bits of one token's deficit: int32."""
    deficit = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature)
    return deficit.to(tl.int32, bitcast=True)
