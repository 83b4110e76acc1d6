"""The tokens of the running sequences, in arrays over slots: what a draft that comes later has to take in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.scheduler.core.accounts import Ints


class CommittedTokens:
    """One row for each slot: the prompt of its sequence, and the output as far as results have come."""

    def __init__(self, num_slots: int) -> None:
        # Pages that were never written to take no memory.
        self._tokens: NDArray[np.int32] = np.zeros((num_slots, 0), np.int32)
        self._lengths = np.zeros(num_slots, np.int64)

    def begin(self, slot: int, tokens: tuple[int, ...], most: int) -> None:
        """A sequence has the slot that comes with `tokens` and has up to `most` tokens at its end."""
        num_columns = self._tokens.shape[1]
        if most > num_columns:
            wider = np.zeros((len(self._lengths), max(most, 2 * num_columns)), np.int32)
            for row in self._lengths.nonzero()[0]:
                length = self._lengths[row]
                wider[row, :length] = self._tokens[row, :length]
            self._tokens = wider
        self._tokens[slot, : len(tokens)] = tokens
        self._lengths[slot] = len(tokens)

    def append(self, rows: Ints, tokens: Ints, num_tokens: Ints) -> None:
        """Adds the first `num_tokens` ([rows]) of `tokens` ([rows, K + 1]) to these slots."""
        columns = np.arange(tokens.shape[1])
        is_new = columns < num_tokens[:, None]
        lengths = self._lengths[rows]
        self._tokens[rows.repeat(num_tokens), (lengths[:, None] + columns)[is_new]] = tokens[is_new]
        self._lengths[rows] = lengths + num_tokens

    def num_tokens(self, slot: int) -> int:
        """How many tokens of the slot's sequence are known."""
        return int(self._lengths[slot])

    def read(self, slot: int, start: int, end: int) -> tuple[int, ...]:
        """The tokens at positions `start` to `end - 1`."""
        return tuple(self._tokens[slot, start:end].tolist())
