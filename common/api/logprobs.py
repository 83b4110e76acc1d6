"""How likely the model found an output token, and what it found likelier."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.protos import generation_pb2

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

    def to_pb(self) -> generation_pb2.TokenLogprobs:
        """As it travels."""
        return generation_pb2.TokenLogprobs(
            logprob=self.logprob,
            top_token_ids=[token for token, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
        )

    @classmethod
    def from_pb(cls, message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
        """What `to_pb` was made of, in float32."""
        return cls(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))
