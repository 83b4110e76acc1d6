"""Chooses tokens: greedy, or with filters and noise that depends only on seed, position and token id.

A token is the argmax of `logits / temperature + noise` over the tokens that the filters keep; the logits are
the model's as `adjustments.py` leaves them. All filters keep a prefix of the tokens in the order (most likely
first, then lower id first), so they come down to one number a row. No row's result depends on the other rows
of its batch.

The noise is Gumbel noise, the same in every process and framework: Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011) with the request's 64-bit seed as key and the counter (token id >> 2, position, 0,
0); the word `token id & 3` of the block is the token's random number. Draft and verify draw the same noise for the same
token at the same place, so they agree whenever their distributions are close (Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding", 2024). `docs/noise.md` has test vectors.

Draft tokens are accepted that equal the target's choices, up to the first mismatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from slipstream.common.wire.sequence import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRows:
    """A table of requests' parameters on the model's device; all fields of a subclass are tensors of the same rows."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Applies a function to each field."""
        return type(self)(**{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def put(self, slots: Tensor, rows: Self) -> None:
        """Replaces the rows numbered `slots`: [M] int64, without repetition."""
        for field in fields(self):
            getattr(self, field.name).index_copy_(0, slots, getattr(rows, field.name))

    def take(self, slots: Tensor) -> Self:
        """The rows numbered `slots`: [M] int64."""
        return self.map(lambda column: column[slots])


_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_BLOCKS_AT_ONCE = 1 << 13
"""Blocks of four words that are computed together: at about 100 bytes each, they stay in a core's cache."""

_Array = npt.NDArray[Any]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary, on a CPU.

    `seeds`: [N] int64, the bits of the unsigned 64-bit seed. `positions`: [N] int64, the absolute position of the token
    to be chosen, of which the low 32 bits count. Returns [N, vocab_size] float32, always finite.
    """
    # By numpy, whose integer operations take a third of the time of PyTorch's.
    num_blocks = (vocab_size + 3) // 4
    noise = np.empty((len(seeds), vocab_size), np.float32)
    blocks = np.arange(num_blocks, dtype=np.uint64)[None]
    num_rows = max(1, min(len(seeds), _BLOCKS_AT_ONCE // num_blocks))
    buffer = np.empty((num_rows, num_blocks, 4), np.float64)
    for start in range(0, len(seeds), num_rows):
        rows = slice(start, start + num_rows)
        values = buffer[: len(noise[rows])]
        for index, words in enumerate(_philox(_on_host(seeds[rows, None]), _on_host(positions[rows, None]), blocks)):
            values[..., index] = words
        noise[rows] = gumbel(values).reshape(len(values), -1)[:, :vocab_size]
    return torch.from_numpy(noise)


def gumbel_noise_of(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The values that `gumbel_noise` has for a few tokens of each row: [N, M] int64 to [N, M] float32."""
    return torch.from_numpy(gumbel(words_of(token_ids, seeds, positions).astype(np.float64)).astype(np.float32))


def words_of(token_ids: Tensor, seeds: Tensor, positions: Tensor) -> npt.NDArray[np.uint64]:
    """The random 32-bit words of a few tokens of each row, as for `gumbel_noise_of`: [N, M]."""
    ids = _on_host(token_ids)
    words = _philox(_on_host(seeds[:, None]), _on_host(positions[:, None]), ids >> 2)
    return np.choose((ids & 3).view(np.int64), words)


def _philox(seeds: _Array, positions: _Array, blocks: _Array) -> tuple[_Array, _Array, _Array, _Array]:
    # Integers have 64 bits. Rows and blocks are broadcast only where they meet, so the first two rounds cost little.
    counter_0, counter_1 = blocks, positions & _WORD
    counter_2 = counter_3 = positions & 0
    key_0, key_1 = seeds & _WORD, seeds >> 32
    for _ in range(_ROUNDS):
        product_0, product_1 = counter_0 * _MULTIPLIER_0, counter_2 * _MULTIPLIER_1
        counter_0 = (product_1 >> 32) ^ (counter_1 ^ key_0)
        counter_2 = (product_0 >> 32) ^ (counter_3 ^ key_1)
        counter_1, counter_3 = product_1 & _WORD, product_0 & _WORD
        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    return counter_0, counter_1, counter_2, counter_3


def gumbel(words: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The noise of random words, in place."""
    # 1 - (r + 0.5) / 2^32 is exact in float64, so log of it is log1p(-(r + 0.5) / 2^32), and cheaper.
    np.subtract(_WORD + 0.5, words, out=words)
    words *= 2.0**-32
    for _ in range(2):
        np.log(words, out=words)
        np.negative(words, out=words)
    return words


def _on_host(integers: Tensor) -> _Array:
    return integers.numpy().view(np.uint64)


_ID_BITS = 32


def keys_of(deficits: Tensor) -> Tensor:
    """Numbers that sort as the tokens do, the most likely first and of equals the lowest id first: [..., V] int64.

    No two of a row are equal. `deficits`: [..., V] float32, the distance of each logit below its row's greatest.
    """
    # The bits of a float that is at least +0 sort as it does. `abs` is for the -0 that is the difference of -0 and 0.
    keys = deficits.abs().view(torch.int32).to(torch.int64) << _ID_BITS
    keys |= torch.arange(deficits.shape[-1], device=deficits.device)
    return keys


def token_ids_of(keys: Tensor) -> Tensor:
    """The tokens of keys: int64, of the same shape."""
    return keys & ((1 << _ID_BITS) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows(ParameterRows):
    """Sampling parameters of N rows, as tensors on the model's device."""

    temperature: Tensor
    """[N] float32; 0 is greedy."""
    top_k: Tensor
    """[N] int64; 0 is off."""
    top_p: Tensor
    """[N] float32; 1 is off."""
    min_p: Tensor
    """[N] float32; 0 is off."""
    seed: Tensor
    """[N] int64, the bits of the unsigned 64-bit seed."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], *, device: torch.device | None = None) -> SamplingRows:
        """Makes a row for each of `params`."""
        seeds = [row.seed - 2**64 if row.seed >= 2**63 else row.seed for row in params]
        return cls(
            temperature=torch.tensor([row.temperature for row in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([row.top_k for row in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([row.top_p for row in params], dtype=torch.float32, device=device),
            min_p=torch.tensor([row.min_p for row in params], dtype=torch.float32, device=device),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
        )

    @classmethod
    def greedy(cls, num_rows: int, *, device: torch.device | None = None) -> SamplingRows:
        """Makes a table of rows to `put` into, such as one for each slot."""
        return cls.of([SamplingParams()] * num_rows, device=device)


_LOGITS_AT_ONCE = 1 << 15
"""Logits that are filtered together: at about 50 bytes each, they stay in a CPU's cache."""


@torch.inference_mode()
def sample(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """Chooses a token for each row, on a CPU; `kernels.sampling` does so on a GPU.

    `logits`: [N, V] float32. `positions`: [N] int64, the absolute position of the token to be chosen. Returns [N]
    int64. Only the rows that need noise or filters pay for them. Of a row with NaN or infinity it chooses such a token,
    by which the row is known.
    """
    tokens = logits.argmax(dim=1)
    is_sampled = (rows.temperature > 0) & logits.gather(1, tokens[:, None])[:, 0].isfinite()
    if not is_sampled.any():
        return tokens
    has_filter = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    indices = (is_sampled & ~has_filter).nonzero()[:, 0]
    if len(indices):
        own = rows.take(indices)
        noise = gumbel_noise(own.seed, positions[indices], logits.shape[1])
        tokens[indices] = noise.sub_(_deficits(logits[indices], own)).argmax(dim=1)
    filtered = (is_sampled & has_filter).nonzero()[:, 0]
    num_rows = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, len(filtered), num_rows):
        indices = filtered[start : start + num_rows]
        tokens[indices] = _choose_filtered(logits[indices], rows.take(indices), positions[indices])
    return tokens


def _choose_filtered(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    vocab_size, keys = logits.shape[1], keys_of(_deficits(logits, rows))
    keys.numpy().sort(axis=1)  # by vector instructions, several times as fast as PyTorch's
    token_ids, deficits = token_ids_of(keys), (keys >> _ID_BITS).to(torch.int32).view(torch.float32)
    num_kept = _num_kept(deficits, rows)[:, None]
    width = int(num_kept.max())
    token_ids, deficits = token_ids[:, :width], deficits[:, :width]
    if width < vocab_size // 4:  # noise of single tokens costs four times as much for each
        noise = gumbel_noise_of(token_ids, rows.seed, positions)
    else:
        noise = gumbel_noise(rows.seed, positions, vocab_size).gather(1, token_ids)
    scores = torch.where(torch.arange(width) < num_kept, noise - deficits, float("-inf"))
    is_best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(is_best, token_ids, vocab_size - 1).amin(dim=1)


def _num_kept(deficits: Tensor, rows: SamplingRows) -> Tensor:
    """Counts the tokens that pass each row's filters: [N] int64, at least 1. `deficits`: [N, V], ascending."""
    vocab_size = deficits.shape[1]
    weights = torch.exp(-deficits.to(torch.float64))  # probabilities, relative to the most likely token's
    up_to = weights.cumsum(dim=1)
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab_size).clamp_max(vocab_size)[:, None]
    top_p = rows.top_p[:, None]
    mass = torch.where(top_p < 1, top_p * up_to.gather(1, top_k - 1), float("inf"))
    is_kept = up_to - weights < mass
    is_kept &= weights >= rows.min_p[:, None]
    return torch.minimum(is_kept.sum(dim=1), top_k[:, 0]).clamp_min(1)  # not even 1 where logits are no numbers


def _deficits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distance of each logit below its row's greatest, over the temperature: [N, V] float32, at least 0."""
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    return (logits.amax(dim=1, keepdim=True) - logits).div_(temperature[:, None])


_MOST_LOGITS = 1 << 24
"""Logits that are computed with at a time, where that takes many times their memory."""


def row_parts(logits: Tensor) -> list[slice]:
    """Parts of the rows of `logits` ([B, W, V]) that are small enough to compute with."""
    num_rows, *of_row = logits.shape
    size = max(1, _MOST_LOGITS // max(1, math.prod(of_row)))
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, for W places in B slots."""

    output: Tensor
    """[B, W] float32: of the sampled tokens."""
    top_tokens: Tensor
    """[B, W, N] int32: the N most likely tokens, likeliest first, of equals the lowest first."""
    top: Tensor
    """[B, W, N] float32: their logprobs."""


@torch.inference_mode()
def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log probabilities of `tokens` ([B, W] int64) and of the `num_top` most likely ones, or all if there are fewer.

    `logits`: [B, W, V] float32, as the model gave them. Nothing is read back.
    """
    totals = logits.logsumexp(dim=2, keepdim=True)
    keys = keys_of(logits.amax(dim=2, keepdim=True) - logits)
    likeliest = keys.topk(min(num_top, logits.shape[2]), dim=2, largest=False, sorted=True)[0]
    top_tokens = token_ids_of(likeliest)
    return Logprobs(
        output=(logits.gather(2, tokens[:, :, None]) - totals)[:, :, 0],
        top_tokens=top_tokens.to(torch.int32),
        top=logits.gather(2, top_tokens) - totals,
    )


def accept(draft_tokens: Tensor, target_tokens: Tensor) -> Tensor:
    """Counts the leading draft tokens of each chain that equal the target's choice at their place.

    `draft_tokens`: [B, K] int64. `target_tokens`: [B, K + 1] int64, where [b, i] is what the target chose
    after the first i draft tokens. Returns [B] int64 in 0 .. K; `target_tokens[b, num_accepted[b]]` is the
    bonus token.
    """
    return _num_leading(draft_tokens == target_tokens[:, : draft_tokens.shape[1]])


def _num_leading(is_accepted: Tensor) -> Tensor:
    return is_accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


_BITS = 32
_BISECTIONS = 60
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_ODD = 0xD1342543DE82EF95 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


class SimulatedAcceptance:
    """Accepts by chance instead of by the target's tokens. For measurements.

    A draft token is accepted after those before it with the probability of its place in the chain, by a number that
    depends on seed and position only. `kernels.step_ops` does the same on a GPU.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares`: the probabilities by place, of K places."""
        self._thresholds = torch.tensor([round(share * 2**_BITS) for share in shares], dtype=torch.int64)

    @classmethod
    def with_mean(cls, accept_length: float, num_draft_tokens: int) -> SimulatedAcceptance:
        """Makes one with an equal probability at all places.

        `accept_length`: mean tokens of a step, the bonus token included, from 1 to `num_draft_tokens` + 1.
        """
        assert 1 <= accept_length <= num_draft_tokens + 1, "a step yields 1 to K + 1 tokens"
        return cls([acceptance_rate(accept_length, num_draft_tokens)] * num_draft_tokens)

    def thresholds(self, device: torch.device) -> Tensor:
        """[K] int64: a token is accepted where its random bits are below that of its place.

        The first call, before a graph is captured, brings them to the device.
        """
        if self._thresholds.device != device:
            self._thresholds = self._thresholds.to(device)
        return self._thresholds

    def __call__(self, seeds: Tensor, seq_lens: Tensor) -> Tensor:
        """Counts the accepted draft tokens of each chain: [B] int64 in 0 .. K.

        `seeds`: [B] int64. `seq_lens`: [B] int64, the position of the bonus token that the chain is after.
        """
        thresholds = self.thresholds(seq_lens.device)
        ahead = torch.arange(1, len(thresholds) + 1, device=seq_lens.device)
        return _num_leading(_random_bits(seeds[:, None], seq_lens[:, None] + ahead) < thresholds)


def acceptance_rate(accept_length: float, num_draft_tokens: int) -> float:
    """The probability p for each token of a chain such that 1 + p + ... + p ** num_draft_tokens is `accept_length`."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_low = sum(middle**power for power in range(num_draft_tokens + 1)) < accept_length
        low, high = (middle, high) if is_low else (low, middle)
    return high


def _random_bits(seeds: Tensor, positions: Tensor) -> Tensor:
    """`_BITS` random bits for each (seed, position): SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    # Signed products wrap to the right bits; the shifts are masked, as the sign would else be shifted in.
    bits = seeds * _ODD + positions * _GOLDEN
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * _MIX_1
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * _MIX_2
    kept: Tensor = (bits >> (64 - _BITS)) & (2**_BITS - 1)
    return kept
