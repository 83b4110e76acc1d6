"""How likely the model found an output token, and what it found likelier."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each place."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities.

    The model's: before bias, penalties, masks, temperature and filters.
    """

    logprob: float
    """Of the output token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, likeliest first, as many as were asked for: id and logprob."""
