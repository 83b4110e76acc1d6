"""Accepts draft tokens: those that equal the target's choices, up to the first mismatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_BITS = 32
_BISECTIONS = 60
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_ODD = 0xD1342543DE82EF95 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def accept(draft_tokens: Tensor, target_tokens: Tensor) -> Tensor:
    """Counts the leading draft tokens of each chain that equal the target's choice at their place.

    `draft_tokens`: [B, K] int64. `target_tokens`: [B, K + 1] int64, where [b, i] is what the target chose
    after the first i draft tokens. Returns [B] int64 in 0 .. K; `target_tokens[b, num_accepted[b]]` is the
    bonus token.
    """
    num_draft_tokens = draft_tokens.shape[1]
    matches = draft_tokens == target_tokens[:, :num_draft_tokens]
    return matches.to(torch.int64).cumprod(dim=1).sum(dim=1)


class SimulatedAcceptance:
    """Accepts by chance instead of by the target's tokens, with a given mean accept length. For measurements.

    A draft token at a position is accepted with a fixed probability, by a number that depends on seed and position
    alone. Runs anywhere, in a CUDA graph as well.
    """

    def __init__(self, accept_length: float, num_draft_tokens: int) -> None:
        """`accept_length`: mean tokens of a step, the bonus token included, from 1 to `num_draft_tokens` + 1."""
        assert 1 <= accept_length <= num_draft_tokens + 1, "a step yields 1 to K + 1 tokens"
        self.threshold = round(acceptance_rate(accept_length, num_draft_tokens) * 2**_BITS)
        """A token is accepted where its random bits are below this."""
        self._num_draft_tokens = num_draft_tokens

    def __call__(self, seeds: Tensor, seq_lens: Tensor) -> Tensor:
        """Counts the accepted draft tokens of each chain: [B] int64 in 0 .. K.

        `seeds`: [B] int64. `seq_lens`: [B] int64, the position of the bonus token that the chain is behind.
        """
        ahead = torch.arange(1, self._num_draft_tokens + 1, device=seq_lens.device)
        stands: Tensor = _random_bits(seeds[:, None], seq_lens[:, None] + ahead) < self.threshold
        return stands.to(torch.int64).cumprod(dim=1).sum(dim=1)


def acceptance_rate(accept_length: float, num_draft_tokens: int) -> float:
    """The probability p for each token of a chain such that 1 + p + ... + p ** num_draft_tokens is `accept_length`."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(middle**power for power in range(num_draft_tokens + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return high


def _random_bits(seeds: Tensor, positions: Tensor) -> Tensor:
    """`_BITS` random bits for each (seed, position): SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    # Signed products wrap to the right bits; the shifts are masked, as the sign would else be shifted in.
    bits = seeds * _ODD + positions * _GOLDEN
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * _MIX_1
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * _MIX_2
    kept: Tensor = (bits >> (64 - _BITS)) & (2**_BITS - 1)
    return kept
