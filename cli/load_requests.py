"""The requests of a load: prompts, lengths like ShareGPT's, and the times at which they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from slipstream.client.requests import RequestOptions

PROMPT_SLACK = 16
"""Tokens by which a prompt is shorter than its share of the context: cut out of a text, it may come back longer."""


class Request(NamedTuple):
    """A prompt, a text or token ids, and the options of its call."""

    prompt: str | Sequence[int]
    options: RequestOptions


Session = tuple[Request, ...]
"""Requests that a client makes one after the other: the turns of a conversation, or a single request."""


class Arrival(NamedTuple):
    """A request and the time of its arrival, in seconds from the start."""

    at_s: float
    request: Request


def request(prompt: str | Sequence[int], num_tokens: int, temperature: float, seed: int) -> Request:
    """Makes a request for exactly `num_tokens`: the end-of-sequence token is ignored."""
    options: RequestOptions = {"max_new_tokens": num_tokens, "temperature": temperature, "seed": seed}
    return Request(prompt, options | {"ignore_eos": True})


def poisson_times(rate: float, rng: random.Random) -> Iterator[float]:
    """Yields times of a Poisson process: independent of each other, `rate` per second on average."""
    return accumulate(rng.expovariate(rate) for _ in count())


@dataclass(frozen=True)
class LogNormal:
    """Token counts whose logarithm is normal, with this standard deviation."""

    mean_tokens: float
    sigma: float

    def draw(self, rng: random.Random, *, scale: float, most: int) -> int:
        """A count of 1 to `most`; its mean, but for these bounds, is `scale` times the distribution's."""
        mu = math.log(scale * self.mean_tokens) - self.sigma**2 / 2
        return min(max(1, round(rng.lognormvariate(mu, self.sigma))), most)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of requests.

    The means are those of ShareGPT as Kwon et al. give them ("Efficient Memory Management for Large Language Model
    Serving with PagedAttention", 2023, figure 11). The width of the distributions is not given there: the two sigmas
    are this benchmark's, for a long tail of prompts and a shorter one of outputs.
    """

    prompt: LogNormal = LogNormal(161.31, 1.2)
    output: LogNormal = LogNormal(337.99, 0.9)
    scale: float = 1.0
    """Times the means: less than 1 for a small model on a slow machine."""
    context_tokens: int = 1024
    """Half of it is for the prompt at most, and half for the output."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its output."""
        most = self.context_tokens // 2
        prompt = self.prompt.draw(rng, scale=self.scale, most=max(1, most - PROMPT_SLACK))
        return prompt, self.output.draw(rng, scale=self.scale, most=most)
