"""The sampling parameters of a request, checked, as every process uses them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.messages import decode, encode
from slipstream.protos import worker_pb2

MAX_SEED = 2**64 - 1
LEAST_TEMPERATURE = 2.0**-16
"""Below it, dividing the logits would overflow float32."""
MAX_TEMPERATURE = 100.0
LEAST_REPETITION_PENALTY = 2.0**-16
"""Below it, dividing the logits would overflow float32."""
MAX_REPETITION_PENALTY = 2.0
MAX_COUNT_PENALTY = 2.0
"""Largest frequency or presence penalty, of either sign."""
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each place."""
MAX_LISTED_IDS = 256
"""Most token ids with a bias, and most masked ones: they are a row of a table of this width."""
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request.

    Logit bias, penalties and the mask come first, then temperature, top-k, top-p and min-p. The former count for
    greedy requests too. The order is vLLM's: the repetition penalty is the first of the penalties,
    and the mask overrides all before it.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token, and the filters then change nothing."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the most likely one."""
    seed: int = 0
    """Key of the noise: the same seed, prompt and parameters give the same tokens."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt or output where they are positive, multiplies them elsewhere; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, ascending, and what is added to their logits. -100 is added like any other: it bans nothing."""
    masked_before: int = 0
    """No token at an absolute position below it is one of `masked_token_ids`; 0 is off.

    For min_new_tokens: the length of the prompt plus that number, with the ids of all tokens that would end the output.
    """
    masked_token_ids: tuple[int, ...] = ()
    """Ascending."""

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not LEAST_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            accepted = f"0 (greedy), or from {LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise InvalidArgumentError("sampling_params.temperature", self.temperature, accepted)
        _in_range("sampling_params.top_p", self.top_p, 0.0, 1.0, above_low=True)
        _in_range("sampling_params.min_p", self.min_p, 0.0, 1.0)
        if not 0 <= self.top_k < 2**31:
            raise InvalidArgumentError("sampling_params.top_k", self.top_k, "0 (off) to 2147483647")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidArgumentError("sampling_params.seed", self.seed, f"0 to {MAX_SEED}")
        least, most = LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _in_range("sampling_params.repetition_penalty", self.repetition_penalty, least, most)
        for name in ("frequency_penalty", "presence_penalty"):
            _in_range(f"sampling_params.{name}", getattr(self, name), -MAX_COUNT_PENALTY, MAX_COUNT_PENALTY)
        for token, bias in self.logit_bias:
            _in_range(f"sampling_params.logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        _check_ids("sampling_params.logit_bias", tuple(token for token, _ in self.logit_bias))
        _check_ids("sampling_params.masked_token_ids", self.masked_token_ids)
        if not 0 <= self.masked_before <= _MAX_TOKEN_ID:
            raise InvalidArgumentError("sampling_params.masked_before", self.masked_before, f"0 to {_MAX_TOKEN_ID}")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidArgumentError for an id that is no token, or a mask that leaves none to be sampled."""
        for field, ids in (
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
            ("masked_token_ids", self.masked_token_ids),
        ):
            if ids and ids[-1] >= vocab_size:
                raise InvalidArgumentError(f"sampling_params.{field}", ids[-1], f"token ids of 0 to {vocab_size - 1}")
        if len(self.masked_token_ids) >= vocab_size:
            raise InvalidArgumentError("sampling_params.masked_token_ids", "every token", "fewer than there are")

    def to_pb(self) -> worker_pb2.SlotSampling:
        bias = [worker_pb2.TokenBias(token_id=token, bias=bias) for token, bias in self.logit_bias]
        return encode(worker_pb2.SlotSampling, self, logit_bias=bias)

    @classmethod
    def from_pb(cls, message: worker_pb2.SlotSampling) -> SamplingParams:
        """Decodes and checks it. Raises InvalidArgumentError."""
        return decode(cls, message, {"logit_bias": lambda bias: (bias.token_id, bias.bias)})

    @property
    def has_penalty(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def adjusts_logits(self) -> bool:
        """True if the logits are changed before temperature and filters."""
        return self.has_penalty or bool(self.logit_bias) or (self.masked_before > 0 and bool(self.masked_token_ids))

    @property
    def is_plain(self) -> bool:
        """True if neither filters (top-k, top-p, min-p) nor adjustments apply."""
        has_filter = not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        return not has_filter and not self.adjusts_logits

    @property
    def is_greedy(self) -> bool:
        """True if no noise is drawn."""
        return self.temperature == 0.0


def _in_range(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    too_low = value <= low if above_low else value < low
    if math.isnan(value) or too_low or value > high:
        raise InvalidArgumentError(name, value, f"{'above' if above_low else 'from'} {low:g} to {high:g}")


def _check_ids(name: str, ids: tuple[int, ...]) -> None:
    if len(ids) > MAX_LISTED_IDS:
        raise InvalidArgumentError(name, f"{len(ids)} token ids", f"at most {MAX_LISTED_IDS}")
    if any(low >= high for low, high in pairwise(ids)):
        raise InvalidArgumentError(name, ids, "token ids in ascending order, each once")
    if ids and not 0 <= ids[0] <= ids[-1] <= _MAX_TOKEN_ID:
        raise InvalidArgumentError(name, ids, f"token ids of 0 to {_MAX_TOKEN_ID}")
