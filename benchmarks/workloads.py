"""Workloads from fixed seeds: texts with lengths like ShareGPT's, and the workloads of `load.py`.

Those of `load.py` are greedy, with prompts of token ids. The first token of a prompt names its workload, so that none
finds prompts of another workload in the prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from tokenizers import Tokenizer

from slipstream.bundled import prompts, target_dir
from slipstream.cli.load_requests import PROMPT_SLACK, Arrival, Lengths, Request, Session, poisson_times, request

TEMPERATURE = 0.8
NUM_DRAWS = 20_000
"""Enough for an exact mean."""
LONGEST_CHAT = (2000, 1000)
SHORTEST_CHAT = 4
"""Bounds of the prompts and outputs of chats, in tokens."""
ARRIVALS_SEED, OPEN_SEED, SYSTEM_SEED, TURNS_SEED = 7, 11, 5, 100


class TextWorkload:
    """Texts cut from the bundled held-out prompts: the same seed gives the same requests at the same times."""

    def __init__(self, lengths: Lengths) -> None:
        """The bundled target's tokenizer measures the prompts."""
        self.lengths = lengths
        tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
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

    def largest(self, number: int) -> list[Request]:
        """Requests with the longest prompts and outputs."""
        rng, most = random.Random("largest"), self.lengths.context_tokens // 2
        return [request(self.prompt(most - PROMPT_SLACK, rng), most, TEMPERATURE, seed) for seed in range(number)]

    def requests(self, seed: str) -> Iterator[Request]:
        """An endless sequence of requests."""
        rng = random.Random(f"requests {seed}")
        for number in count():
            prompt_tokens, output_tokens = self.lengths.draw(rng)
            yield request(self.prompt(prompt_tokens, rng), output_tokens, TEMPERATURE, number)

    def arrivals(self, rate: float, seconds: float, seed: str) -> list[Arrival]:
        """A Poisson process: requests that come independently of each other, `rate` per second on average."""
        times = takewhile(lambda at: at < seconds, poisson_times(rate, random.Random(f"arrivals {seed}")))
        return list(map(Arrival, times, self.requests(seed)))

    def prompt(self, num_tokens: int, rng: random.Random) -> str:
        """A text of about so many tokens; no longer than the text of all bundled prompts."""
        num_tokens = min(num_tokens, self._num_starts)
        first = rng.randrange(self._num_starts)
        return self._text[self._offsets[first][0] : self._offsets[first + num_tokens - 1][1]]


class Sizes(NamedTuple):
    """Sizes of a server; workloads with the same sizes share it."""

    slots: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of workloads, which are defined for a GPU."""

    divisor: int
    """Divides lengths, numbers of requests, clients and slots, and the context."""
    rate_divisor: int
    """Divides the rates of open workloads."""
    token_ids: range
    """The ids that prompts are made of."""
    longest_context: int
    """Tokens that the model allows."""

    def length(self, num_tokens: int) -> int:
        """A length; at least 2, since a time per token takes two."""
        return max(2, num_tokens // self.divisor)

    def number(self, number: int) -> int:
        """A number of requests, clients or slots."""
        return max(1, number // self.divisor)

    def sizes(self, slots: int, context_tokens: int) -> Sizes:
        """The sizes of a server."""
        return Sizes(self.number(slots), min(context_tokens // self.divisor, self.longest_context))

    def tokens(self, num_tokens: int, rng: random.Random) -> list[int]:
        """As many ids, scaled."""
        ids = self.token_ids
        return [rng.randrange(ids.start, ids.stop) for _ in range(self.length(num_tokens))]

    def requests(self, number: int, seed: int, mark: int, lengths: _Lengths = None) -> tuple[Request, ...]:
        """Requests whose first token is the `mark`."""
        rng, made = random.Random(seed), []
        for index in range(number):
            prompt_tokens, output_tokens = lengths or _chat_lengths(rng)
            prompt = self.tokens(prompt_tokens, rng)
            prompt[0] = self.token_ids[mark]
            made.append(request(tuple(prompt), self.length(output_tokens), 0.0, index))
        return tuple(made)


_Lengths = tuple[int, int] | None
"""Tokens of a prompt and of its output; None: those of chats."""
GPU_SCALE = Scale(divisor=1, rate_divisor=1, token_ids=range(1000, 30_000), longest_context=131_072)
CPU_SCALE = Scale(divisor=8, rate_divisor=2, token_ids=range(256, 4096), longest_context=1024)
"""For the bundled model on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, and how they come: from clients in a closed loop, or at their times."""

    name: str
    sizes: Sizes
    sessions: tuple[Session, ...] = ()
    num_clients: int = 0
    """Sessions in flight."""
    arrivals: tuple[Arrival, ...] = ()

    @property
    def num_requests(self) -> int:
        """All of its requests."""
        return len(self.arrivals) + sum(map(len, self.sessions))


NAMES = ("chat", "long", "prefill", "open16", "open32", "chat256", "turns", "ctx8k", "open48")
"""The workloads, in the order in which they run; each is marked by its place here."""


def workloads(scale: Scale) -> tuple[Workload, ...]:
    """Makes all workloads, in the order of NAMES."""
    small, large = scale.sizes(64, 4096), scale.sizes(256, 10_240)

    def closed(name: str, sizes: Sizes, clients: int, number: int, seed: int, fixed: _Lengths = None) -> Workload:
        made = scale.requests(scale.number(number), seed, NAMES.index(name), fixed)
        sessions = tuple((one,) for one in made)
        return Workload(name=name, sizes=sizes, sessions=sessions, num_clients=scale.number(clients))

    def opened(rate: int, seconds: int, sizes: Sizes) -> Workload:
        name, number = f"open{rate}", scale.number(rate * seconds)
        arrivals = poisson(scale, rate / scale.rate_divisor, number, NAMES.index(name))
        return Workload(name=name, sizes=sizes, arrivals=arrivals)

    conversations = tuple(_conversation(scale, number, 6) for number in range(scale.number(32)))
    return (
        closed("chat", small, 64, 256, seed=1),
        closed("long", small, 64, 128, seed=2, fixed=(1024, 128)),
        closed("prefill", small, 16, 64, seed=3, fixed=(2000, 2)),
        opened(16, 15, small),
        opened(32, 12, small),
        closed("chat256", large, 256, 512, seed=21),
        Workload(name="turns", sizes=large, sessions=conversations, num_clients=len(conversations)),
        closed("ctx8k", large, 8, 24, seed=22, fixed=(8000, 64)),
        opened(48, 10, large),
    )


def warm_up(scale: Scale, sizes: Sizes) -> Workload:
    """Makes a request for every slot of a server, and a few with long prompts."""
    mark = len(NAMES)
    requests = scale.requests(sizes.slots, 99, mark, (300, 40)) + scale.requests(8, 98, mark, (1500, 8))
    sessions = tuple((one,) for one in requests)
    return Workload(name="warm-up", sizes=sizes, sessions=sessions, num_clients=sizes.slots)


def poisson(scale: Scale, rate: float, number: int, mark: int) -> tuple[Arrival, ...]:
    """Chats that come independently of each other, `rate` per second on average.

    At every rate the chats are the same but for the first token, which says the `mark`.
    """
    times = poisson_times(rate, random.Random(ARRIVALS_SEED))
    return tuple(map(Arrival, times, scale.requests(number, OPEN_SEED, mark)))


def _chat_lengths(rng: random.Random) -> tuple[int, int]:
    """Lognormal lengths: medians of 134 tokens, means of 220 and 200, but for the bounds."""
    prompt, output = (
        min(longest, max(SHORTEST_CHAT, int(rng.lognormvariate(4.9, sigma))))
        for longest, sigma in zip(LONGEST_CHAT, (1.0, 0.9), strict=True)
    )
    return prompt, output


def _conversation(scale: Scale, number: int, num_turns: int) -> Session:
    """Turns of 100 to 200 tokens in and out after a system prompt of 1,000 tokens, which all conversations share.

    The replies in the history are drawn, too: what a request costs does not depend on the outputs.
    """
    rng, turns = random.Random(TURNS_SEED + number), []
    history = scale.tokens(1000, random.Random(SYSTEM_SEED))
    history[0] = scale.token_ids[NAMES.index("turns")]
    for turn in range(num_turns):
        history += scale.tokens(rng.randrange(100, 200), rng)
        output_tokens = rng.randrange(100, 200)
        turns.append(request(tuple(history), scale.length(output_tokens), 0.0, turn))
        history += scale.tokens(output_tokens, rng)
    return tuple(turns)
