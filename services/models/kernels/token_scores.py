"""Triton functions of the sampler: a row's deficits, the tokens that its filters keep, noise, and scores.

A *deficit* is how far a logit is below its row's greatest, over the temperature; its bits, of a float that is at least
+0, sort as it does. Filters keep a prefix of the tokens in the order (deficit, index). Nothing is sorted, and nothing
leaves the GPU.

Top-k's cut is found by a radix search: a pass counts the tokens that share the bits found so far by their next five
bits; the bin in which the count reaches k is the next five bits of the cut. Top-p is not searched for: a token
that was drawn without it is checked by the mass of the tokens before it (`sampling.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.launching import wait_for_previous

NUM_BINS = tl.constexpr(32)
BITS = tl.constexpr(5)
LEVELS = tl.constexpr(7)
"""Passes over the 31 bits of a deficit."""
NO_CUT = tl.constexpr(0x7FFFFFFF)
"""More than the bits of any deficit."""


@triton.jit
def deficits_of(logits: tl.tensor, greatest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """float32, at least +0; that of the greatest logit is 0, also where it is infinite."""
    difference = tl.where(logits == greatest, 0.0, greatest - logits)
    return tl.abs(tl.div_rn(difference, tl.zeros_like(difference) + temperature))


@triton.jit
def load_logits(logits: tl.tensor, row: tl.tensor, index: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """float32; a NaN, and what lies past the vocabulary, is -inf."""
    value = tl.load(logits + row * vocab_size + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def greatest_of(block_best: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, BLOCK_G: tl.constexpr) -> tl.tensor:
    """The greatest logit of a row from those of its blocks."""
    g = tl.arange(0, BLOCK_G)
    return tl.max(tl.load(block_best + row * num_blocks + g, mask=g < num_blocks, other=float("-inf")), axis=0)


@triton.jit
def weights_of(deficits: tl.tensor) -> tl.tensor:
    """exp(-deficit), to about 2e-7 of itself: what is left of the nearest power of two is exact before it is used."""
    power = tl.minimum(tl.floor(deficits * 1.4426950408889634 + 0.5), 200.0)
    rest = (deficits - power * 0.693359375) + power * 2.12194440e-4
    return tl.where(deficits < 100.0, tl.exp2(-power) * tl.exp2(-rest * 1.4426950408889634), 0.0)


@triton.jit
def descend(
    counts: tl.tensor,  # [N, num_blocks, NUM_BINS] int32 of the level
    bits: tl.tensor, count_before: tl.tensor, wanted: tl.tensor, row: tl.tensor, num_blocks: tl.tensor,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns the cut's bits with one more level, and the number of tokens before all that have these bits."""
    g = tl.arange(0, BLOCK_G)
    b = tl.arange(0, NUM_BINS)
    at = (row * num_blocks + g)[:, None] * NUM_BINS + b[None, :]
    count = tl.sum(tl.load(counts + at, mask=(g < num_blocks)[:, None], other=0), axis=0)
    is_reached = count_before + tl.cumsum(count, axis=0) >= wanted
    chosen = tl.min(tl.where(is_reached, b, NUM_BINS - 1), axis=0)
    return (bits << BITS) | chosen, count_before + tl.sum(tl.where(b < chosen, count, 0), axis=0)


@triton.jit
def cut_of(
    top_ks: tl.tensor,
    counts: tl.tensor,  # [LEVELS, N, num_blocks, NUM_BINS] int32
    bits: tl.tensor,  # [LEVELS, N] int32
    count_before: tl.tensor,  # [LEVELS, N] int32
    row: tl.tensor, vocab_size: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns top-k's cut: the bits of the last deficit that is kept, and the number of kept tokens with it."""
    cut = NO_CUT
    ties = 0
    top_k = tl.load(top_ks + row)
    if top_k > 0:
        wanted = tl.minimum(top_k, vocab_size).to(tl.int32)
        last = (LEVELS - 1) * num_rows + row
        at = (LEVELS - 1) * num_rows.to(tl.int64) * num_blocks * NUM_BINS
        found, number = descend(
            counts + at, tl.load(bits + last), tl.load(count_before + last), wanted, row, num_blocks, BLOCK_G
        )
        cut = found
        ties = wanted - number
    return cut, ties


@triton.jit
def is_before_cut(
    keys: tl.tensor, cut: tl.tensor, ties: tl.tensor, counts: tl.tensor, row: tl.tensor, block: tl.tensor,
    num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """True for a block's tokens that top-k keeps: [BLOCK] bool. Of tokens with the cut's deficit it keeps the first."""
    g = tl.arange(0, BLOCK_G)
    last = (LEVELS - 1) * num_rows.to(tl.int64) * num_blocks * NUM_BINS
    at = last + (row * num_blocks + g) * NUM_BINS + (cut & (NUM_BINS - 1))
    earlier = tl.sum(tl.load(counts + at, mask=g < block, other=0), axis=0)  # of no meaning without a cut
    is_tie = keys == cut
    return (keys < cut) | (is_tie & (earlier + tl.cumsum(is_tie.to(tl.int32), axis=0) <= ties))


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows", "level"])
def count_kernel(
    logits: tl.tensor,  # [N, vocab_size]
    block_best: tl.tensor,  # [N, num_blocks] float32
    temperatures: tl.tensor,  # [N] float32
    top_ks: tl.tensor,  # [N] int64
    counts: tl.tensor,  # [LEVELS, N, num_blocks, NUM_BINS] int32, written at `level`
    bits: tl.tensor,  # [LEVELS, N] int32: those of the cut that are known before a level, written at `level`
    count_before: tl.tensor,  # [LEVELS, N] int32: how many tokens lie before all that have these bits
    vocab_size: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, level: tl.tensor, BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Counts the tokens that have the bits found so far, block by block. Grid: (N, any number).

    All programs of a row find the same bits from the level before; the first one writes them for the next.
    """
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    if (top_k <= 0) | (tl.load(temperatures + row) <= 0.0):
        return
    found = 0
    number = 0
    size = num_rows.to(tl.int64) * num_blocks * NUM_BINS
    if level > 0:
        before = (level - 1) * num_rows + row
        wanted = tl.minimum(top_k, vocab_size).to(tl.int32)
        found, number = descend(
            counts + (level - 1) * size,
            tl.load(bits + before),
            tl.load(count_before + before),
            wanted,
            row,
            num_blocks,
            BLOCK_G,
        )
    if tl.program_id(1) == 0:
        tl.store(bits + level * num_rows + row, found)
        tl.store(count_before + level * num_rows + row, number)
    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    temperature = tl.load(temperatures + row)
    shift = BITS * (LEVELS - 1 - level)
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        keys = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature).to(
            tl.int32, bitcast=True
        )
        is_candidate = (index < vocab_size) & (((keys >> shift) >> BITS) == found)
        own_bin = tl.where(is_candidate, (keys >> shift) & (NUM_BINS - 1), NUM_BINS)
        # Tokens that are no candidates fill bins of their own, as a histogram counts all its input.
        count = tl.histogram(own_bin, 2 * NUM_BINS)
        b = tl.arange(0, 2 * NUM_BINS)
        at = level * size + (row * num_blocks + block) * NUM_BINS + b
        tl.store(counts + at, count, mask=b < NUM_BINS)


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
    logits: tl.tensor, token_ids: tl.tensor, row: tl.tensor, block: tl.tensor, greatest: tl.tensor,
    temperature: tl.tensor, seed: tl.tensor, position: tl.tensor,
    least_min_p: tl.tensor,  # float64: the greatest deficit that min-p keeps, read if HAS_FILTERS, and so on
    cut: tl.tensor, ties: tl.tensor, counts: tl.tensor,
    bound: tl.tensor,  # int32: the bits of the deficit before which tokens count
    bound_index: tl.tensor,  # int32: tokens with this very deficit count before this index
    vocab_size: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_FILTERS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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
    logits: tl.tensor, row: tl.tensor, block: tl.tensor, greatest: tl.tensor, temperature: tl.tensor, cut: tl.tensor,
    ties: tl.tensor, counts: tl.tensor, bound: tl.tensor, bound_index: tl.tensor, vocab_size: tl.tensor,
    num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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
    top_ps: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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
    row: tl.tensor, num_blocks: tl.tensor, BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The index of a row's greatest value, the first of equal ones."""
    g = tl.arange(0, BLOCK_G)
    value = tl.load(values + row * num_blocks + g, mask=g < num_blocks, other=float("-inf"))
    index = tl.load(indices + row * num_blocks + g, mask=g < num_blocks, other=0x7FFFFFFF)
    return tl.min(tl.where(value == tl.max(value, axis=0), index, 0x7FFFFFFF), axis=0)


@triton.jit
def bits_of_deficit(
    logits: tl.tensor, row: tl.tensor, index: tl.tensor, greatest: tl.tensor, temperature: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The bits of one token's deficit: int32."""
    deficit = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature)
    return deficit.to(tl.int32, bitcast=True)
