"""What comes next, by what came next before: n-gram counts over one sequence's own tokens.

The longest match of the last tokens decides (prompt lookup); shorter ones, down to how often each token occurs
at all, fill in where it says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

LONGEST_MATCH_TOKENS = 4
_SHORTER_MATCHES = 0.1
"""How many occurrences what is known from shorter matches counts for, beside those of a longer one."""


class History:
    """The tokens of a sequence from some position on, without a gap."""

    def __init__(self) -> None:
        self._start = 0
        self._tokens: list[int] = []

    def put(self, position: int, tokens: Iterable[int]) -> None:
        """Has `tokens` from `position` on, and nothing behind them. What lies before a gap is forgotten."""
        if not self._start <= position <= self._start + len(self._tokens):
            self._start, self._tokens = position, []
        del self._tokens[position - self._start :]
        self._tokens.extend(tokens)

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self._start + len(self._tokens)

    def tokens(self) -> npt.NDArray[np.int64]:
        """All of them."""
        return np.array(self._tokens, np.int64)


class Continuation:
    """Guesses what follows a sequence, one token after the other."""

    def __init__(self, tokens: npt.NDArray[np.int64]) -> None:
        """`tokens`: at least one."""
        self.token_ids, self._codes = np.unique(tokens, return_inverse=True)
        """The tokens that can be guessed: [N] ids, ascending; those of the sequence."""
        self._last = self._codes[-LONGEST_MATCH_TOKENS:].tolist()

    def probabilities(self) -> npt.NDArray[np.float64]:
        """How likely each of `token_ids` is next: [N], above 0."""
        codes, num_tokens = self._codes, len(self.token_ids)
        likely: npt.NDArray[np.float64] = np.bincount(codes, minlength=num_tokens) / len(codes)
        places = np.arange(1, len(codes))  # of tokens that follow a match
        for length, code in enumerate(reversed(self._last), start=1):
            places = places[places >= length]
            places = places[codes[places - length] == code]
            if not len(places):
                break
            counts = np.bincount(codes[places], minlength=num_tokens)
            likely = (counts + _SHORTER_MATCHES * likely) / (len(places) + _SHORTER_MATCHES)
        return likely

    def append(self, index: int) -> None:
        """The next token is taken to be number `index` of `token_ids`."""
        self._last = [*self._last, index][-LONGEST_MATCH_TOKENS:]
