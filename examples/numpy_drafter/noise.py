"""Chooses tokens with the noise and the filters of `docs/noise.md`, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from slipstream.protos.worker_pb2 import SlotSampling

_LOW = 0xFFFFFFFF


def random_words(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Returns the 32-bit random number of each token ([N]): Philox4x32-10, keyed by the seed."""
    ids = token_ids.astype(np.uint64)
    zeros = np.zeros_like(ids)
    c0, c1, c2, c3 = ids >> np.uint64(2), zeros + np.uint64(position & _LOW), zeros, zeros
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(10):
        product_0, product_1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0 = (product_1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (product_0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = product_1 & np.uint64(_LOW), product_0 & np.uint64(_LOW)
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return np.choose(token_ids & 3, [c0, c1, c2, c3])


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns standard Gumbel noise of the tokens ([N]) for a choice at `position`: [N]."""
    words = random_words(seed, position, token_ids).astype(np.float64)
    return (-np.log(-np.log1p(-(words + 0.5) * 2.0**-32))).astype(np.float32)


def can_choose(sampling: SlotSampling) -> bool:
    """Returns whether these filters leave a token for all probabilities."""
    if sampling.temperature == 0.0:
        return True
    return 2.0**-16 <= sampling.temperature <= 100 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1


def choose(
    token_ids: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64], sampling: SlotSampling, position: int
) -> int:
    """Chooses one of the tokens ([N] ids, ascending) and returns its index. `probabilities`: [N], above 0."""
    if sampling.temperature == 0.0:
        return int(probabilities.argmax())
    logits = np.log(probabilities) / sampling.temperature
    kept = _kept(logits, sampling)
    scores = logits[kept] + gumbel_noise(sampling.seed, position, token_ids[kept])
    return int(kept[scores.argmax()])


def _kept(logits: npt.NDArray[np.float64], sampling: SlotSampling) -> npt.NDArray[np.intp]:
    """Returns the indices, ascending, of the tokens that the filters keep: the most likely ones."""
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(logits[order] - logits[order[0]])
    if sampling.top_p < 1.0:
        before = weights.cumsum() - weights
        weights = weights[before < sampling.top_p * weights.sum()]
    return np.sort(order[: np.count_nonzero(weights >= sampling.min_p)])
