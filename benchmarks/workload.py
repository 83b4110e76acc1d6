"""What a load generator asks for: texts cut from the bundled held-out prompts, of drawn lengths."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from slipstream.benchmarks.arrivals import poisson
from slipstream.benchmarks.lengths import PROMPT_SLACK
from slipstream.bundled import prompts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from slipstream.benchmarks.lengths import Lengths

TEMPERATURE = 0.8
NUM_DRAWS = 20_000
"""For a mean that is exact enough."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that can be made at once."""

    prompt: str
    max_new_tokens: int
    """Exactly as many are generated: the end-of-sequence token is ignored."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds from the start."""

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
    def longest_prompt_tokens(self) -> int:
        """Longer prompts than this there is no text for."""
        return self._num_starts

    @property
    def mean_output_tokens(self) -> float:
        """Of the lengths as they are drawn, bounds included."""
        rng = random.Random("mean")
        return sum(self.lengths.draw(rng)[1] for _ in range(NUM_DRAWS)) / NUM_DRAWS

    def largest(self, count: int) -> list[PlannedRequest]:
        """Requests with the longest prompts and outputs."""
        rng, most = random.Random("largest"), self.lengths.context_tokens // 2
        return [
            PlannedRequest(self.prompt(most - PROMPT_SLACK, rng), most, TEMPERATURE, number) for number in range(count)
        ]

    def requests(self, seed: str) -> Iterator[PlannedRequest]:
        """Requests without an end."""
        rng = random.Random(f"requests {seed}")
        for number in itertools.count():
            prompt_tokens, output_tokens = self.lengths.draw(rng)
            yield PlannedRequest(self.prompt(prompt_tokens, rng), output_tokens, TEMPERATURE, number)

    def arrivals(self, rate: float, seconds: float, seed: str) -> list[Arrival]:
        """Requests that come independently of each other, `rate` per second on average."""
        times = poisson(rate, seconds, random.Random(f"arrivals {seed}"))
        return [Arrival(at, request) for at, request in zip(times, self.requests(seed), strict=False)]

    def prompt(self, num_tokens: int, rng: random.Random) -> str:
        """A text of about so many tokens, `longest_prompt_tokens` at most."""
        num_tokens = min(num_tokens, self._num_starts)
        first = rng.randrange(self._num_starts)
        return self._text[self._offsets[first][0] : self._offsets[first + num_tokens - 1][1]]
