"""Gumbel noise in registers, as `docs/noise.md` defines it."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """The noise that a random word stands for, in float64 and then rounded to float32."""
    complement = (4294967295.5 - word.to(tl.float64)) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(complement))).to(tl.float32)


@triton.jit
def rough_gumbel(words: tl.tensor) -> tl.tensor:
    """`gumbel` to within 1e-4, at a hundredth of its price: float32."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = ((0xFFFFFFFF - words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # log loses the small u that 1 - u rounds away: its series there.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(complement)))
