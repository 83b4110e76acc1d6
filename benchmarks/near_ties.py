"""Measures how often two ways of serving part in bfloat16, how near a tie that is, and the price of avoiding it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from slipstream.benchmarks.models import ALGORITHMS, NONE, NUM_DRAFT_TOKENS, draft_of, draft_options
from slipstream.benchmarks.runner import DevicePlan, Row, benchmark, host, told, write_json
from slipstream.benchmarks.stack import Served, Stack
from slipstream.benchmarks.streams import answers, stream_window
from slipstream.bundled import prompts, target_dir
from slipstream.cli.load_requests import request
from slipstream.client import AsyncClient
from slipstream.common.settings import setting
from slipstream.common.wire.sequence import SamplingParams
from slipstream.services.models.sampler import gumbel_noise

SAMPLINGS = {
    "greedy": SamplingParams(),
    "T = 0.8, seed 1": SamplingParams(temperature=0.8, seed=1),
    "T = 0.8, seed 2": SamplingParams(temperature=0.8, seed=2),
}
BOUND = 0.25
"""The largest gap of a near tie, in units of the noise: bfloat16 logits are off by 0.1, and the temperature is 0.8."""
TOGETHER = 8
KV_MIB = 256
NUM_DETERMINISTIC_PROMPTS = 16
"""Prompts for the ways in which no output may part."""
CONTEXT_TOKENS = 1024
WINDOW_TOKENS, WARM_UP_TOKENS = 800, 16
"""Tokens of each request of a window, a quarter of a second on a fast GPU, and those before the window begins."""
WINDOW_S = 0.5
"""The longest window; a slow machine makes fewer tokens."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    device: str = setting("cuda", help="Device of the workers.", choices=("cpu", "cuda"))
    prompts: int = setting(40, help="Held-out prompts.", low=1, high=64)
    max_new_tokens: int = 200
    rounds: int = 7
    """Windows of either mode, in turns, for the price."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference between two outputs."""

    index: int
    """Index in the output of the first token that differs."""
    gap: float
    """From the best score to the worse score of both tokens, in units of the noise."""

    @property
    def is_near_tie(self) -> bool:
        """True if rounding explains it."""
        return self.gap < BOUND


class Scores:
    """The target's scores in float32."""

    def __init__(self, target: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._model = model.eval()

    def at_end(self, tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        """[vocab_size]: the score of each token after these; the greatest is chosen. Without filters."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([[*tokens]])).logits[0, -1]
        if sampling.is_greedy:
            return logits
        seed = torch.tensor([sampling.seed - 2**64 if sampling.seed >= 2**63 else sampling.seed])
        return logits / sampling.temperature + gumbel_noise(seed, torch.tensor([len(tokens)]), len(logits))[0]

    def parting(
        self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], sampling: SamplingParams
    ) -> Parting | None:
        """Returns the first difference between two outputs; None if they are equal."""
        for index, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                scores = self.at_end([*prompt, *one[:index]], sampling)
                return Parting(index, float(scores.max() - scores[list(pair)].min()))
        return None


class NearTies:
    """The measurement, and its results so far."""

    def __init__(self, plan: Plan, path: Path | None) -> None:
        """Writes the report to `path` after each part."""
        self._plan = plan
        self._path = path
        self._scores = Scores(target_dir())
        tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
        texts = [tokenizer.encode(prompt.text).ids for prompt in prompts()]
        self._requests = [(text, sampling) for text in texts for sampling in SAMPLINGS.values()]
        self.references: dict[bool, list[Sequence[int]]] = {}
        """Outputs of plain decoding, alone; those with a deterministic width by True."""
        self._started = time.monotonic()
        self.report: Row = {
            "host": host(plan.device),
            "dtype": "float32" if plan.device == "cpu" else "bfloat16",
            "bound": BOUND,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "num_prompts": plan.prompts,
            "num_deterministic_prompts": min(plan.prompts, NUM_DETERMINISTIC_PROMPTS),
            "samplings": list(SAMPLINGS),
            "max_new_tokens": plan.max_new_tokens,
            "rows": [],
            "prices": [],
            "problems": [],
        }

    async def measure(self, draft: str) -> None:
        """Compares a draft's outputs with those of NONE, which is measured first, and finds its price."""
        async with (
            Stack(device=self._plan.device) as stack,
            _serving(stack, draft, is_deterministic=False) as usual,
            _serving(stack, draft, is_deterministic=True) as deterministic,
        ):
            servers = {False: usual, True: deterministic}
            for is_deterministic, served in servers.items():
                for at_once in (1, TOGETHER):
                    await self._compare(served, draft, at_once, is_deterministic)
            for at_once in (1, TOGETHER):
                await self._price(servers, draft, at_once)

    async def _compare(self, served: Served, draft: str, at_once: int, is_deterministic: bool) -> None:
        started, plan = time.monotonic(), self._plan
        num_prompts = self.report["num_deterministic_prompts"] if is_deterministic else plan.prompts
        requests = self._requests[: len(SAMPLINGS) * num_prompts]
        made = [request(prompt, plan.max_new_tokens, one.temperature, one.seed) for prompt, one in requests]
        async with AsyncClient(served.address) as client:
            outputs = [answer.token_ids for answer in await answers(client, made, at_once)]
        seconds = time.monotonic() - started
        if (draft, at_once) == (NONE, 1):
            self.references[is_deterministic] = [*outputs]
        found = [
            self._scores.parting(prompt, reference, output, sampling)
            for (prompt, sampling), reference, output in zip(
                requests, self.references[is_deterministic], outputs, strict=True
            )
        ]
        about = {"deterministic": is_deterministic, "draft": draft, "at_once": at_once}
        row = {**about, **row_of(outputs, found), "seconds": seconds}
        self.report["problems"] += problems_of(row, self.report["dtype"])
        self._keep("rows", row)

    async def _price(self, servers: dict[bool, Served], draft: str, at_once: int) -> None:
        """Times windows of both modes in turns; the price is the median of the rounds' ratios."""
        requests = [
            request(prompt, WINDOW_TOKENS, one.temperature, one.seed) for prompt, one in self._requests[:at_once]
        ]
        times_us: dict[bool, list[float]] = {mode: [] for mode in servers}
        for _ in range(self._plan.rounds):
            for mode, served in servers.items():
                window = await stream_window(served, requests, warm_up_tokens=WARM_UP_TOKENS, seconds=WINDOW_S)
                times_us[mode].append(1e3 * window.mean_ms(window.step_s))
        price = {
            "draft": draft,
            "at_once": at_once,
            "step_us": median(times_us[False]),
            "deterministic_step_us": median(times_us[True]),
            "ratio": median(with_it / without for without, with_it in zip(*times_us.values(), strict=True)),
        }
        self._keep("prices", price)

    def _keep(self, name: str, row: Row) -> None:
        self.report[name].append(row)
        print(told(row), flush=True)
        write_json({**self.report, "seconds": time.monotonic() - self._started}, self._path)


@asynccontextmanager
async def _serving(stack: Stack, draft: str, *, is_deterministic: bool) -> AsyncIterator[Served]:
    """Serves with workers of one mode."""
    suffix = "-deterministic" if is_deterministic else ""
    width = NUM_DRAFT_TOKENS + 1 if is_deterministic else None
    verify, drafting = f"verify{suffix}", draft_of(draft) and f"{draft}{suffix}"
    await stack.worker("verify", name=verify, model=target_dir(), deterministic_width=width)
    if drafting is not None:
        await stack.worker("draft", name=drafting, **draft_options(draft))
    options: dict[str, Any] = {"slots": TOGETHER, "context_tokens": CONTEXT_TOKENS, "kv_memory_mib": KV_MIB}
    # Without a prefix cache: the same prompts are sent each time, and pages of others round otherwise.
    options |= {"queue": 4096, "no_prefix_cache": True}
    async with stack.scheduler(drafting, name=f"scheduler{suffix}", verify=verify, **options) as served:
        yield served


def row_of(outputs: Sequence[Sequence[int]], found: Sequence[Parting | None]) -> Row:
    """Sums up a way of serving; `found` has the parting of each output."""
    partings = [parting for parting in found if parting is not None]
    # Tokens up to and with the parting are compared.
    lengths = [len(o) if parting is None else parting.index + 1 for o, parting in zip(outputs, found, strict=True)]
    return {
        "outputs": len(outputs),
        "tokens": sum(lengths),
        "partings": len(partings),
        "per_1000_tokens": 1000 * len(partings) / sum(lengths),
        "largest_gap": max((parting.gap for parting in partings), default=None),
        "all_near_ties": all(parting.is_near_tie for parting in partings),
    }


def problems_of(row: Row, dtype: str) -> list[str]:
    """Returns partings that rounding does not explain, or that may not be."""
    problems = [] if row["all_near_ties"] else [f"{told(row)}: no near tie"]
    if row["partings"] and (row["deterministic"] or dtype == "float32"):
        problems.append(f"{told(row)}: none may part")
    return problems


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Compares, prices, and reports problems."""
    near_ties = NearTies(plan, file)
    for draft in ALGORITHMS:
        await near_ties.measure(draft)
    problems: list[str] = near_ties.report["problems"]
    return problems
