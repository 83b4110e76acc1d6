"""Measures how often two ways of serving part in bfloat16, how near a tie that is, and the price of avoiding it.

Held-out prompts, each greedy and at T = 0.8 with two seeds; without a draft and with the bundled ones; alone and eight
at a time. Each output is compared with that of plain decoding, alone. Where the two part, the target's scores in
float32 tell how far the worse of both tokens is behind the best: rounding explains a near tie and nothing else. Then
the same with `--deterministic-width`, where no output may part, and the time of a step with it and without, in turns.

On a CPU it computes in float32, in which no output may part either; there it takes half an hour, and a few minutes
with `--prompts 2`. Status 1 if a parting is no near tie, if there is one where none may be, or if a part failed; the
results so far are in the JSON.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from tokenizers import Tokenizer

from slipstream.benchmarks.models import (
    ALGORITHMS,
    NONE,
    NUM_DRAFT_TOKENS,
    DeviceOption,
    JsonOption,
    Models,
    draft_of,
)
from slipstream.benchmarks.near_tie_scores import BOUND, Scores
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.stream_window import stream_window
from slipstream.bundled import prompts, target_dir
from slipstream.client import AsyncClient
from slipstream.common.api.sequence import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from slipstream.benchmarks.near_tie_scores import Parting
    from slipstream.benchmarks.stack import Served
    from slipstream.client.requests import RequestOptions

    Way = tuple[bool, str, int]
    """One configuration: True if deterministic, the draft, and the number of concurrent requests."""

SAMPLINGS = {
    "greedy": SamplingParams(),
    "T = 0.8, seed 1": SamplingParams(temperature=0.8, seed=1),
    "T = 0.8, seed 2": SamplingParams(temperature=0.8, seed=2),
}
TOGETHER = 8
KV_MIB = 256
NUM_PROMPTS, MAX_NEW_TOKENS = 40, 200
NUM_DETERMINISTIC_PROMPTS = 16
"""Prompts for the ways in which no output may part."""
ROUNDS = 7
"""Windows of either mode, in turns, for the price."""
CONTEXT_TOKENS = 1024
WINDOW_TOKENS, WARM_UP_TOKENS = 800, 16
"""Tokens of each request of a window, a quarter of a second on a fast GPU, and those before the window begins."""
WINDOW_S = 0.5
"""The longest window; a slow machine makes fewer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of serving against plain decoding alone."""

    deterministic: bool
    draft: str
    at_once: int
    outputs: int
    tokens: int
    """Compared tokens: up to and with the parting."""
    partings: int
    per_1000_tokens: float
    largest_gap: float | None
    """None if no output parts."""
    all_near_ties: bool
    seconds: float
    """Time to serve the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The time of a decode step, in microseconds: medians of windows in turns."""

    draft: str
    at_once: int
    step_us: float
    deterministic_step_us: float
    ratio: float
    """The median of the rounds' ratios."""


@dataclass(slots=True)
class Report:
    """All results, written after each part."""

    host: str
    dtype: str
    bound: float
    num_draft_tokens: int
    num_prompts: int
    num_deterministic_prompts: int
    samplings: list[str]
    max_new_tokens: int
    rows: list[Row] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A held-out prompt and its sampling parameters."""

    prompt: tuple[int, ...]
    sampling: SamplingParams

    def options(self, max_new_tokens: int) -> RequestOptions:
        """Options of a call of the client."""
        return {
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
        }


class NearTies:
    """The measurement."""

    def __init__(self, device: str, report: Report, path: Path | None, *, rounds: int = ROUNDS) -> None:
        """Fills the report, which is written after each part."""
        self._device = device
        self._report = report
        self._path = path
        self._rounds = rounds
        self._scores = Scores(target_dir())
        tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
        self._requests = [
            Request(tuple(tokenizer.encode(prompt.text).ids), sampling)
            for prompt in prompts()
            for sampling in SAMPLINGS.values()
        ]
        self._references: dict[bool, list[list[int]]] = {}
        self._started = time.monotonic()

    async def measure(self, draft: str) -> None:
        """Compares a draft's outputs with those of NONE, which is measured first, and finds its price."""
        async with (
            Stack(device=self._device) as stack,
            _serving(stack, draft, is_deterministic=False) as usual,
            _serving(stack, draft, is_deterministic=True) as deterministic,
        ):
            served = {False: usual, True: deterministic}
            for is_deterministic, server in served.items():
                for at_once in (1, TOGETHER):
                    await self._compare(server, draft, at_once, is_deterministic)
            for at_once in (1, TOGETHER):
                await self._price(served, draft, at_once)

    async def _compare(self, served: Served, draft: str, at_once: int, is_deterministic: bool) -> None:
        report, started = self._report, time.monotonic()
        num_prompts = report.num_deterministic_prompts if is_deterministic else report.num_prompts
        requests = self._requests[: len(SAMPLINGS) * num_prompts]
        room = asyncio.Semaphore(at_once)
        async with AsyncClient(served.address) as client:

            async def generate(request: Request) -> list[int]:
                async with room:
                    chunks = client.generate(list(request.prompt), **request.options(report.max_new_tokens))
                    return [token async for chunk in chunks for token in chunk.token_ids]

            outputs = list(await asyncio.gather(*map(generate, requests)))
        seconds = time.monotonic() - started
        if (draft, at_once) == (NONE, 1):
            self._references[is_deterministic] = outputs
        found = [
            self._scores.parting(request.prompt, reference, output, request.sampling)
            for request, reference, output in zip(requests, self._references[is_deterministic], outputs, strict=True)
        ]
        row = row_of(outputs, found, (is_deterministic, draft, at_once), seconds)
        report.rows.append(row)
        print(_line(row), flush=True)
        report.problems += problems_of(row, report.dtype)
        self._write()

    async def _price(self, served: dict[bool, Served], draft: str, at_once: int) -> None:
        requests = self._requests[:at_once]
        times: dict[bool, list[float]] = {mode: [] for mode in served}
        for _ in range(self._rounds):
            for mode, server in served.items():
                window = await stream_window(
                    server,
                    [list(request.prompt) for request in requests],
                    [request.options(WINDOW_TOKENS) for request in requests],
                    warm_up_tokens=WARM_UP_TOKENS,
                    seconds=WINDOW_S,
                )
                times[mode].append(1e3 * window.sums.mean_ms(window.sums.step_s))
        ratio = median(with_it / without for without, with_it in zip(times[False], times[True], strict=True))
        price = Price(
            draft=draft,
            at_once=at_once,
            step_us=median(times[False]),
            deterministic_step_us=median(times[True]),
            ratio=ratio,
        )
        self._report.prices.append(price)
        print(f"draft {draft}, {at_once} at once: a deterministic step takes {ratio:.3f} of another", flush=True)
        self._write()

    def _write(self) -> None:
        self._report.seconds = time.monotonic() - self._started
        write_json(asdict(self._report), self._path)


@asynccontextmanager
async def _serving(stack: Stack, draft: str, *, is_deterministic: bool) -> AsyncIterator[Served]:
    """Workers of one mode with a scheduler over them."""
    models, suffix = Models(), "-deterministic" if is_deterministic else ""
    width = NUM_DRAFT_TOKENS + 1 if is_deterministic else None
    verify, drafting = f"verify{suffix}", draft_of(draft) and f"{draft}{suffix}"
    await stack.worker("verify", name=verify, model=models.target, deterministic_width=width)
    if drafting is not None:
        await stack.worker("draft", name=drafting, **models.options_of(draft))
    async with stack.scheduler(
        drafting,
        name=f"scheduler{suffix}",
        verify=verify,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        slots=TOGETHER,
        context_tokens=CONTEXT_TOKENS,
        kv_memory_mib=KV_MIB,
        queue=4096,
        no_prefix_cache=True,  # the same prompts come each time, and pages of others round otherwise
    ) as served:
        yield served


def row_of(outputs: Sequence[Sequence[int]], found: Sequence[Parting | None], way: Way, seconds: float) -> Row:
    """Sums up one way of serving; `found` has the parting of each output."""
    partings = [parting for parting in found if parting is not None]
    lengths = [len(o) if parting is None else parting.index + 1 for o, parting in zip(outputs, found, strict=True)]
    is_deterministic, draft, at_once = way
    return Row(
        deterministic=is_deterministic,
        draft=draft,
        at_once=at_once,
        outputs=len(outputs),
        tokens=sum(lengths),
        partings=len(partings),
        per_1000_tokens=1000 * len(partings) / sum(lengths),
        largest_gap=max((parting.gap for parting in partings), default=None),
        all_near_ties=all(parting.is_near_tie for parting in partings),
        seconds=seconds,
    )


def problems_of(row: Row, dtype: str) -> list[str]:
    """Partings that rounding does not explain, or that may not be."""
    problems = [] if row.all_near_ties else [f"{_line(row)}: no near tie"]
    if row.partings and (row.deterministic or dtype == "float32"):
        problems.append(f"{_line(row)}: none may part")
    return problems


def _mode(is_deterministic: bool) -> str:
    return "deterministic" if is_deterministic else "usual"


def _line(row: Row) -> str:
    gap = "" if row.largest_gap is None else f", gaps up to {row.largest_gap:.3f}"
    way = f"{_mode(row.deterministic)}, draft {row.draft}, {row.at_once} at once"
    return (
        f"{way}: {row.partings} partings of {row.outputs} outputs, {row.per_1000_tokens:.2f} in 1,000 of "
        f"{row.tokens} tokens{gap} ({row.seconds:.1f} s)"
    )


async def _measure_all(near_ties: NearTies) -> None:
    for draft in ALGORITHMS:
        await near_ties.measure(draft)


def main(
    device: DeviceOption = "cuda",
    num_prompts: Annotated[int, typer.Option("--prompts", help="Held-out prompts.", min=1)] = NUM_PROMPTS,
    json_file: JsonOption = None,
) -> None:
    """Compares, prices, and reports problems."""
    is_cpu = device == "cpu"
    report = Report(
        host=host(device),
        dtype="float32" if is_cpu else "bfloat16",
        bound=BOUND,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        num_prompts=num_prompts,
        num_deterministic_prompts=min(num_prompts, NUM_DETERMINISTIC_PROMPTS),
        samplings=list(SAMPLINGS),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    asyncio.run(_measure_all(NearTies(device, report, json_file)))
    sys.exit("\n".join(report.problems) if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
