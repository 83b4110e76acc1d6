"""The load for benchmarks: texts cut from the bundled held-out prompts, with lengths like ShareGPT's."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from slipstream.bundled import prompts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPERATURE = 0.8
NUM_DRAWS = 20_000
"""Enough for an exact mean."""
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
    Serving with PagedAttention", 2023, figure 11). The width of the distributions is not given there: the two sigmas
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


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that is ready to be made."""

    prompt: str | tuple[int, ...]
    """A text, or token ids."""
    max_new_tokens: int
    """Exactly as many are generated: the end-of-sequence token is ignored."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the time of its arrival, in seconds from the start."""

    at_s: float
    request: PlannedRequest


class Workload:
    """Requests from a seed: the same seed gives the same requests at the same times."""

    def __init__(self, target: Path, lengths: Lengths) -> None:
        """`target`: directory of the model whose tokenizer measures the prompts."""
        self.lengths = lengths
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        text = "\n".join(prompt.text for prompt in prompts())
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        # Twice over, so that a prompt may begin anywhere.
        self._text = f"{text}\n{text}\n"
        shift = len(text) + 1
        self._offsets = [*offsets, *((start + shift, end + shift) for start, end in offsets)]
        self._num_starts = len(offsets)

    @property
    def mean_output_tokens(self) -> float:
        """The mean of drawn output lengths, bounds included."""
        rng = random.Random("mean")
        return sum(self.lengths.draw(rng)[1] for _ in range(NUM_DRAWS)) / NUM_DRAWS

    def largest(self, count: int) -> list[PlannedRequest]:
        """Requests with the longest prompts and outputs."""
        rng, most = random.Random("largest"), self.lengths.context_tokens // 2
        return [
            PlannedRequest(self.prompt(most - PROMPT_SLACK, rng), most, TEMPERATURE, number) for number in range(count)
        ]

    def requests(self, seed: str) -> Iterator[PlannedRequest]:
        """An endless sequence of requests."""
        rng = random.Random(f"requests {seed}")
        for number in itertools.count():
            prompt_tokens, output_tokens = self.lengths.draw(rng)
            yield PlannedRequest(self.prompt(prompt_tokens, rng), output_tokens, TEMPERATURE, number)

    def arrivals(self, rate: float, seconds: float, seed: str) -> list[Arrival]:
        """A Poisson process: requests that come independently of each other, `rate` per second on average."""
        times = _poisson(rate, seconds, random.Random(f"arrivals {seed}"))
        return [Arrival(at, request) for at, request in zip(times, self.requests(seed), strict=False)]

    def prompt(self, num_tokens: int, rng: random.Random) -> str:
        """A text of about so many tokens; no longer than the text of all bundled prompts."""
        num_tokens = min(num_tokens, self._num_starts)
        first = rng.randrange(self._num_starts)
        return self._text[self._offsets[first][0] : self._offsets[first + num_tokens - 1][1]]


def _poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)
