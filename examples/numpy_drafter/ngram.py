"""Guesses the next token from n-gram counts over the sequence's own tokens (prompt lookup).

The longest match of the last tokens counts most. Shorter matches, down to the frequency of each token, give the other
tokens their probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

LONGEST_MATCH_TOKENS = 4
_SHORTER_MATCHES = 0.1
"""Weight of the shorter matches, in occurrences of the longer one."""


class History:
    """The tokens of a sequence from a position on, without a gap."""

    def __init__(self) -> None:
        self._start = 0
        self._tokens: list[int] = []

    def put(self, position: int, tokens: Iterable[int]) -> None:
        """Replaces all tokens from `position` on by `tokens`. Forgets the tokens before a gap."""
        if not self._start <= position <= self._start + len(self._tokens):
            self._start, self._tokens = position, []
        del self._tokens[position - self._start :]
        self._tokens.extend(tokens)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self._start + len(self._tokens)

    def tokens(self) -> npt.NDArray[np.int64]:
        """Returns all tokens: [N]."""
        return np.array(self._tokens, np.int64)


class Continuation:
    """Guesses what follows a sequence, one token after the other."""

    def __init__(self, tokens: npt.NDArray[np.int64]) -> None:
        """`tokens`: at least one."""
        self.token_ids, self._codes = np.unique(tokens, return_inverse=True)
        """[N] ids, ascending: the tokens of the sequence, which are the ones that can be guessed."""
        self._last = self._codes[-LONGEST_MATCH_TOKENS:].tolist()

    def probabilities(self) -> npt.NDArray[np.float64]:
        """Returns the probability of each of `token_ids` to be next: [N], above 0."""
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
        """Appends number `index` of `token_ids` to the sequence."""
        self._last = [*self._last, index][-LONGEST_MATCH_TOKENS:]
