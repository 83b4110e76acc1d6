"""Where a row's filters cut the order of its tokens: a radix search over the bits of the deficits, on the GPU alone.

A *deficit* is how far a logit is below its row's greatest, over the temperature. The bits of a deficit, a float that
is at least +0, sort as it does. A pass sorts the tokens that share the bits found so far into bins by the next five
bits; the bin in which the count reaches k, or the mass reaches its target, is the next five bits of the cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.waiting_kernels import wait_for_previous

NUM_BINS = tl.constexpr(32)
BITS = tl.constexpr(5)


@triton.jit
def deficits_of(logits: tl.tensor, greatest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """[BLOCK] float32, at least +0; that of the greatest logit is 0, also where it is infinite."""
    difference = tl.where(logits == greatest, 0.0, greatest - logits)
    return tl.abs(tl.div_rn(difference, tl.zeros_like(difference) + temperature))


@triton.jit
def load_logits(logits: tl.tensor, row: tl.tensor, index: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """[BLOCK] float32; a NaN, and what lies past the vocabulary, is -inf."""
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
    power = tl.floor(deficits * 1.4426950408889634 + 0.5)
    power = tl.minimum(power, 200.0)
    rest = (deficits - power * 0.693359375) + power * 2.12194440e-4
    return tl.where(deficits < 100.0, tl.exp2(-power) * tl.exp2(-rest * 1.4426950408889634), 0.0)


@triton.jit
def descend(
    counts: tl.tensor,  # [N, num_blocks, NUM_BINS] int32 of the level
    masses: tl.tensor,  # the same in float32
    bits: tl.tensor,
    count_before: tl.tensor,
    mass_before: tl.tensor,
    wanted: tl.tensor,
    row: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_G: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """The bits of the cut with those of one more level, and the count and mass of what lies before them."""
    g = tl.arange(0, BLOCK_G)
    b = tl.arange(0, NUM_BINS)
    at = (row * num_blocks + g)[:, None] * NUM_BINS + b[None, :]
    is_block = (g < num_blocks)[:, None]
    count = tl.sum(tl.load(counts + at, mask=is_block, other=0), axis=0)
    mass = tl.sum(tl.load(masses + at, mask=is_block, other=0.0).to(tl.float64), axis=0)
    if BY_MASS:
        is_reached = mass_before + tl.cumsum(mass, axis=0) >= wanted
    else:
        is_reached = count_before + tl.cumsum(count, axis=0) >= wanted
    # Rounding may leave the mass short of what the level before had: then it is the last bin that holds anything.
    last = tl.max(tl.where(count > 0, b, 0), axis=0)
    chosen = tl.minimum(tl.min(tl.where(is_reached, b, NUM_BINS), axis=0), last)
    count_before += tl.sum(tl.where(b < chosen, count, 0), axis=0)
    mass_before += tl.sum(tl.where(b < chosen, mass, 0.0), axis=0)
    return (bits << BITS) | chosen, count_before, mass_before


@triton.jit
def wanted_of(
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    kept_mass: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_G: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """What a row's search stops at: a count, int32, or a mass, float64 (of what top-k kept, or of all)."""
    if BY_MASS:
        g = tl.arange(0, BLOCK_G)
        b = tl.arange(0, NUM_BINS)
        at = (row * num_blocks + g)[:, None] * NUM_BINS + b[None, :]
        all_mass = tl.sum(tl.load(masses + at, mask=(g < num_blocks)[:, None], other=0.0).to(tl.float64), axis=0)
        mass = tl.where(tl.load(top_ks + row) > 0, tl.load(kept_mass + row), tl.sum(all_mass, axis=0))
        wanted = tl.load(top_ps + row).to(tl.float64) * mass
    else:
        wanted = tl.minimum(tl.load(top_ks + row), vocab_size).to(tl.int32)
    return wanted


@triton.jit
def is_searched(
    temperatures: tl.tensor, top_ks: tl.tensor, top_ps: tl.tensor, row: tl.tensor, BY_MASS: tl.constexpr
) -> tl.tensor:
    """Whether the row has this filter."""
    is_on = (tl.load(top_ps + row) < 1.0) if BY_MASS else (tl.load(top_ks + row) > 0)
    return is_on & (tl.load(temperatures + row) > 0.0)


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows", "level"])
def count_kernel(
    logits: tl.tensor,  # [N, vocab_size]
    block_best: tl.tensor,  # [N, num_blocks] float32
    temperatures: tl.tensor,  # [N] float32
    top_ks: tl.tensor,  # [N] int64
    top_ps: tl.tensor,  # [N] float32
    kept_mass: tl.tensor,  # [N] float64: what top-k kept, read if BY_MASS
    counts: tl.tensor,  # [LEVELS, N, num_blocks, NUM_BINS] int32, written at `level`
    masses: tl.tensor,  # the same in float32
    bits: tl.tensor,  # [LEVELS, N] int32: those of the cut that are known before a level, written at `level`
    count_before: tl.tensor,  # [LEVELS, N] int32: how many tokens lie before all that have these bits
    mass_before: tl.tensor,  # [LEVELS, N] float64
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    level: tl.tensor,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BY_MASS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Bins the tokens of one block that have the bits found so far. Grid: (num_blocks, N).

    All programs of a row find the same bits from the level before; the first one leaves them for the next.
    """
    wait_for_previous(OVERLAPS)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if not is_searched(temperatures, top_ks, top_ps, row, BY_MASS):
        return
    found = 0
    number = 0
    mass = tl.zeros([], tl.float64)
    size = num_rows.to(tl.int64) * num_blocks * NUM_BINS
    if level > 0:
        wanted = wanted_of(top_ks, top_ps, kept_mass, masses, row, vocab_size, num_blocks, BLOCK_G, BY_MASS)
        before = (level - 1) * num_rows + row
        at = (level - 1) * size
        found, number, mass = descend(
            counts + at,
            masses + at,
            tl.load(bits + before),
            tl.load(count_before + before),
            tl.load(mass_before + before),
            wanted,
            row,
            num_blocks,
            BLOCK_G,
            BY_MASS,
        )
    if block == 0:
        tl.store(bits + level * num_rows + row, found)
        tl.store(count_before + level * num_rows + row, number)
        tl.store(mass_before + level * num_rows + row, mass)

    greatest = greatest_of(block_best, row, num_blocks, BLOCK_G)
    temperature = tl.load(temperatures + row)
    shift = BITS * (LEVELS - 1 - level)
    b = tl.arange(0, NUM_BINS)
    count_of = tl.zeros([NUM_BINS, CHUNK], tl.int32)
    mass_of = tl.zeros([NUM_BINS, CHUNK], tl.float32)
    for start in range(block * BLOCK, tl.minimum(vocab_size, block * BLOCK + BLOCK), CHUNK):
        index = start + tl.arange(0, CHUNK)
        deficits = deficits_of(load_logits(logits, row, index, vocab_size), greatest, temperature)
        keys = deficits.to(tl.int32, bitcast=True)
        is_candidate = (index < vocab_size) & (((keys >> shift) >> BITS) == found)
        if tl.max(is_candidate.to(tl.int32), axis=0) > 0:
            own_bin = tl.where(is_candidate, (keys >> shift) & (NUM_BINS - 1), -1)
            is_in = own_bin[None, :] == b[:, None]
            count_of += is_in.to(tl.int32)
            mass_of += tl.where(is_in, weights_of(deficits)[None, :], 0.0)
    at = level * size + (row * num_blocks + block) * NUM_BINS + b
    tl.store(counts + at, tl.sum(count_of, axis=1))
    tl.store(masses + at, tl.sum(mass_of, axis=1))


@triton.jit(do_not_specialize=["vocab_size", "num_blocks", "num_rows"])
def cut_kernel(
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    kept_mass: tl.tensor,  # [N] float64, written if not BY_MASS
    counts: tl.tensor,
    masses: tl.tensor,
    bits: tl.tensor,
    count_before: tl.tensor,
    mass_before: tl.tensor,
    cut_bits: tl.tensor,  # [N] int32: the deficit at which tokens are cut off; both searches write it, top-k's first
    cut_ties: tl.tensor,  # [N] int32: how many tokens with this deficit are kept
    is_cut_by_mass: tl.tensor,  # [N] int8: which search found it
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    LEVELS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BY_MASS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A row's cut, after the last level of a search. Grid: (N,). Without a filter it lies behind all tokens."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_on = is_searched(temperatures, top_ks, top_ps, row, BY_MASS)
    if not BY_MASS:
        tl.store(cut_bits + row, 0x7FFFFFFF)
        tl.store(cut_ties + row, 0)
        tl.store(is_cut_by_mass + row, 0)
    if not is_on:
        return
    last = (LEVELS - 1) * num_rows + row
    at = (LEVELS - 1) * num_rows.to(tl.int64) * num_blocks * NUM_BINS
    wanted = wanted_of(top_ks, top_ps, kept_mass, masses, row, vocab_size, num_blocks, BLOCK_G, BY_MASS)
    found, number, mass = descend(
        counts + at,
        masses + at,
        tl.load(bits + last),
        tl.load(count_before + last),
        tl.load(mass_before + last),
        wanted,
        row,
        num_blocks,
        BLOCK_G,
        BY_MASS,
    )
    deficit = (tl.zeros([1], tl.int32) + found).to(tl.float32, bitcast=True)
    weight = tl.sum(weights_of(deficit), axis=0).to(tl.float64)
    if BY_MASS:
        # Of equal tokens one stays while the mass before it is below what is wanted.
        ties = tl.where(weight > 0.0, tl.ceil((wanted - mass) / tl.where(weight > 0.0, weight, 1.0)), 2147483647.0)
        ties = tl.minimum(tl.maximum(ties, 1.0), 2147483647.0).to(tl.int32)
        of_top_k = tl.load(cut_bits + row)
        if found < of_top_k:
            tl.store(cut_bits + row, found)
            tl.store(cut_ties + row, ties)
            tl.store(is_cut_by_mass + row, 1)
        elif found == of_top_k:
            tl.store(cut_ties + row, tl.minimum(ties, tl.load(cut_ties + row)))
    else:
        tl.store(cut_bits + row, found)
        tl.store(cut_ties + row, wanted - number)
        tl.store(kept_mass + row, mass + (wanted - number).to(tl.float64) * weight)
