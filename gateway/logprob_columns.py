"""The logprobs of a sample's tokens, kept in a few bytes each."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable


class LogprobColumns:
    """4 bytes for each token, and 8 for each of the likeliest at its place, in float32."""

    def __init__(self, num_top: int) -> None:
        """`num_top`: likeliest tokens at each place."""
        self._num_top = num_top
        self._own = array("f")
        self._top_ids = array("I")
        self._top = array("f")

    def extend(self, tokens: Iterable[TokenLogprobs]) -> None:
        """Adds those of the next tokens."""
        for token in tokens:
            assert len(token.top) == self._num_top, f"{len(token.top)} logprobs where {self._num_top} were asked for"
            self._own.append(token.logprob)
            for token_id, logprob in token.top:
                self._top_ids.append(token_id)
                self._top.append(logprob)

    def truncate(self, num_tokens: int) -> None:
        """Forgets those of the tokens from there on."""
        del self._own[num_tokens:]
        del self._top_ids[num_tokens * self._num_top :]
        del self._top[num_tokens * self._num_top :]

    def read(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Those of the tokens [start, end)."""
        return tuple(self._read(index) for index in range(start, end))

    def _read(self, index: int) -> TokenLogprobs:
        row = slice(index * self._num_top, (index + 1) * self._num_top)
        return TokenLogprobs(self._own[index], tuple(zip(self._top_ids[row], self._top[row], strict=True)))
