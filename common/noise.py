"""Gumbel noise keyed by (seed, position, token id): the same bits in every process and framework.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the request's
64-bit seed as key and the counter (token id >> 2, position, 0, 0); the word `token id & 3` of the
block is the token's random number. Draft and verify draw the same noise for the same token at the
same place, so they agree whenever their distributions are close (Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding", 2024). `docs/noise.md` has test vectors.
"""

from __future__ import annotations

import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox_words(seeds: torch.Tensor, positions: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Random 32-bit words for token ids `0 .. 4 * num_blocks - 1`.

    `seeds`: [N] int64, the bits of the unsigned 64-bit seed. `positions`: [N] int64, below 2^32.
    Returns [N, 4 * num_blocks] int64, each in [0, 2^32).
    """
    counter_0 = torch.arange(num_blocks, dtype=torch.int64, device=seeds.device).expand(len(seeds), -1)
    counter_1 = (positions & _WORD)[:, None].expand(-1, num_blocks)
    counter_2 = torch.zeros_like(counter_0)
    counter_3 = counter_2
    key_0 = (seeds & _WORD)[:, None]
    key_1 = ((seeds >> 32) & _WORD)[:, None]
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(counter_0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(counter_2, _MULTIPLIER_1)
        counter_0, counter_1, counter_2, counter_3 = (
            high_1 ^ counter_1 ^ key_0,
            low_1,
            high_0 ^ counter_3 ^ key_1,
            low_0,
        )
        key_0 = (key_0 + _WEYL_0) & _WORD
        key_1 = (key_1 + _WEYL_1) & _WORD
    return torch.stack((counter_0, counter_1, counter_2, counter_3), dim=-1).reshape(len(seeds), -1)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    `seeds`: [N] int64, the bits of the unsigned 64-bit seed. `positions`: [N] int64, the absolute
    position of the token to be chosen. Returns [N, vocab_size] float32, always finite.
    """
    words = philox_words(seeds, positions, (vocab_size + 3) // 4)[:, :vocab_size]
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform)).to(torch.float32)


def _multiply(counter: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A 32 x 32-bit product overflows int64, but wraps to the right 64 bits; the shift keeps the sign, the mask drops it.
    product = counter * multiplier
    return (product >> 32) & _WORD, product & _WORD
