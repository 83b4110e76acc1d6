"""How long prompts and outputs are: drawn from distributions with stated parameters, like those of ShareGPT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

PROMPT_SLACK = 16
"""A text cut out between two tokens may come back as a few tokens more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Token counts whose logarithm is normal."""

    mean_tokens: float
    sigma: float
    """Standard deviation of the logarithm."""

    def draw(self, rng: random.Random, *, scale: float, most: int) -> int:
        """A count of 1 to `most`; its mean, but for these bounds, is `scale` times the distribution's."""
        mu = math.log(scale * self.mean_tokens) - self.sigma**2 / 2
        return min(max(1, round(rng.lognormvariate(mu, self.sigma))), most)


# Without slots, so that command lines can read the defaults from the class.
@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of requests.

    The means are those of ShareGPT as Kwon et al. give them ("Efficient Memory Management for Large Language Model
    Serving with PagedAttention", 2023, figure 11). How wide the distributions are is not given there: the two sigmas
    are this benchmark's, for a long tail of prompts and a shorter one of outputs.
    """

    prompt: LogNormal = LogNormal(mean_tokens=161.31, sigma=1.2)
    output: LogNormal = LogNormal(mean_tokens=337.99, sigma=0.9)
    scale: float = 1.0
    """Times the means: less than 1 for a small model on a slow machine."""
    context_tokens: int = 1024
    """Half of it is for the prompt at most, and half for the output."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its output."""
        most = self.context_tokens // 2
        prompt = self.prompt.draw(rng, scale=self.scale, most=max(1, most - PROMPT_SLACK))
        return prompt, self.output.draw(rng, scale=self.scale, most=most)
