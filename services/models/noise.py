"""Gumbel noise keyed by (seed, position, token id): the same values in every process and framework.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the request's
64-bit seed as key and the counter (token id >> 2, position, 0, 0); the word `token id & 3` of the
block is the token's random number. Draft and verify draw the same noise for the same token at the
same place, so they agree whenever their distributions are close (Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding", 2024). `docs/noise.md` has test vectors.

On a CPU the work is done by numpy, whose integer operations take a third of the time of PyTorch's.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10

_BLOCKS_AT_ONCE = 1 << 13
"""Keeps intermediate values, about 100 bytes a block of four words, in a core's cache."""

_Array = npt.NDArray[Any]
_Integers = TypeVar("_Integers", _Array, torch.Tensor)


def philox_words(seeds: torch.Tensor, positions: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Random 32-bit words for token ids `0 .. 4 * num_blocks - 1`.

    `seeds`: [N] int64, the bits of the unsigned 64-bit seed. `positions`: [N] int64, of which the low
    32 bits count. Returns [N, 4 * num_blocks] int64, each in [0, 2^32).
    """
    blocks = torch.arange(num_blocks, dtype=torch.int64, device=seeds.device)[None]
    words = torch.stack(_philox(seeds[:, None], positions[:, None], blocks), dim=-1)
    return words.reshape(len(seeds), -1)


def gumbel_of_words(words: torch.Tensor) -> torch.Tensor:
    """The noise of random words: int64 in [0, 2^32) to float32 of the same shape."""
    # 1 - (r + 0.5) / 2^32 is exact in float64, so log of it is log1p(-(r + 0.5) / 2^32), and cheaper.
    complement = (_WORD + 0.5 - words.to(torch.float64)) * 2.0**-32
    return -torch.log(-torch.log(complement)).to(torch.float32)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    `seeds`: [N] int64, the bits of the unsigned 64-bit seed. `positions`: [N] int64, the absolute
    position of the token to be chosen. Returns [N, vocab_size] float32, always finite.
    """
    num_blocks = (vocab_size + 3) // 4
    if seeds.device.type != "cpu":
        return gumbel_of_words(philox_words(seeds, positions, num_blocks)[:, :vocab_size])
    noise = np.empty((len(seeds), vocab_size), np.float32)
    blocks = np.arange(num_blocks, dtype=np.uint64)[None]
    num_rows = max(1, min(len(seeds), _BLOCKS_AT_ONCE // num_blocks))
    buffer = np.empty((num_rows, num_blocks, 4), np.float64)
    for start in range(0, len(seeds), num_rows):
        rows = slice(start, start + num_rows)
        values = buffer[: len(noise[rows])]
        for index, words in enumerate(_philox(_on_host(seeds[rows, None]), _on_host(positions[rows, None]), blocks)):
            values[..., index] = words
        _host_gumbel(values)
        noise[rows] = values.reshape(len(values), -1)[:, :vocab_size]
    return torch.from_numpy(noise)


def gumbel_noise_of(token_ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The values that `gumbel_noise` has for a few tokens of each row.

    `token_ids`: [N, M] int64. `seeds`, `positions`: [N] int64, as for `gumbel_noise`. Returns [N, M] float32.
    """
    if token_ids.device.type != "cpu":
        candidates = torch.stack(_philox(seeds[:, None], positions[:, None], token_ids >> 2), dim=-1)
        return gumbel_of_words(candidates.gather(-1, (token_ids & 3)[..., None])[..., 0])
    ids = _on_host(token_ids)
    words = _philox(_on_host(seeds[:, None]), _on_host(positions[:, None]), ids >> 2)
    values = np.choose((ids & 3).view(np.int64), words).astype(np.float64)
    _host_gumbel(values)
    return torch.from_numpy(values.astype(np.float32))


def _philox(
    seeds: _Integers, positions: _Integers, blocks: _Integers
) -> tuple[_Integers, _Integers, _Integers, _Integers]:
    # Integers are 64 bits wide: PyTorch's signed products wrap to the right bits, and every right shift is masked.
    # Rows and blocks are broadcast only where they meet, so the first two rounds cost little.
    counter_0, counter_1 = blocks, positions & _WORD
    counter_2 = counter_3 = positions & 0
    key_0, key_1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(_ROUNDS):
        product_0, product_1 = counter_0 * _MULTIPLIER_0, counter_2 * _MULTIPLIER_1
        counter_0 = ((product_1 >> 32) & _WORD) ^ (counter_1 ^ key_0)
        counter_2 = ((product_0 >> 32) & _WORD) ^ (counter_3 ^ key_1)
        counter_1, counter_3 = product_1 & _WORD, product_0 & _WORD
        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    return counter_0, counter_1, counter_2, counter_3


def _host_gumbel(values: npt.NDArray[np.float64]) -> None:
    """`gumbel_of_words` in place, but for the rounding."""
    np.subtract(_WORD + 0.5, values, out=values)
    values *= 2.0**-32
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    np.negative(values, out=values)


def _on_host(integers: torch.Tensor) -> _Array:
    return integers.numpy().view(np.uint64)
