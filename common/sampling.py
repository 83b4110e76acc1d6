"""How a request's tokens are chosen: the checked parameters that every process agrees on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.common.errors import InvalidArgumentError

MAX_SEED = 2**64 - 1
LEAST_TEMPERATURE = 2.0**-16
"""Below it, dividing the logits would overflow float32."""
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Filters apply in the order temperature, top-k, top-p, min-p; temperature 0 is greedy."""

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

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is drawn."""
        return self.temperature == 0.0


def _in_range(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    too_low = value <= low if above_low else value < low
    if math.isnan(value) or too_low or value > high:
        raise InvalidArgumentError(name, value, f"{'above' if above_low else 'from'} {low:g} to {high:g}")
