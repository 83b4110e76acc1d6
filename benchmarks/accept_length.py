"""Mean accept length of the bundled drafts and of prompt lookup, through the real services."""

from __future__ import annotations

import keyword
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slipstream.benchmarks.models import DFLASH, EAGLE, EAGLE3, MTP, NGRAM, NGRAM_SUFFIX, NUM_DRAFT_TOKENS, STANDALONE
from slipstream.benchmarks.runner import DevicePlan, Names, Row, Scenario, Table, benchmark, host, run
from slipstream.benchmarks.stack import Served, Stack
from slipstream.benchmarks.streams import accept_length, answers
from slipstream.bundled import prompts
from slipstream.cli.load_requests import Request
from slipstream.client import AsyncClient
from slipstream.training.accept_length import repeated_share

HELD_OUT, EDITS, AGAIN = "held-out", "edits", "edits again"
CONCURRENCY = 8
NAME = re.compile(r"\b[a-z_]{5,}\b")
NEW_NAMES = {HELD_OUT: (None,), EDITS: ("second",), AGAIN: ("second", "third", "fourth")}
"""The names that the edits of a workload ask for, each in a request of its own; None: the prompt as it is."""
SETTINGS = ((HELD_OUT, 0.8, 128, (1, 2, 3)), (HELD_OUT, 0.0, 16, (0,)), (EDITS, 0.0, 48, (0,)))
"""Workload, temperature, new tokens and seeds."""
LOOKUP_SETTINGS = (*SETTINGS, (AGAIN, 0.0, 48, (0,)))
KEY = ("algorithm", "num_draft_tokens", "workload", "temperature", "max_new_tokens", "seed")

WARM_UP = "import this\n"
"""A prompt that is none of those measured."""

DRAFTS = (
    (STANDALONE, NUM_DRAFT_TOKENS),
    (EAGLE3, NUM_DRAFT_TOKENS),
    (EAGLE3, 3),
    (EAGLE3, 7),
    (EAGLE, NUM_DRAFT_TOKENS),
    (MTP, NUM_DRAFT_TOKENS),
    (MTP, 3),
    (MTP, 7),
    (DFLASH, NUM_DRAFT_TOKENS),
    (DFLASH, 7),
    (NGRAM, NUM_DRAFT_TOKENS),
    (NGRAM_SUFFIX, NUM_DRAFT_TOKENS),
)
"""Algorithms, each with K. There are three modules for multi-token prediction, and a block has seven draft tokens."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    algorithms: Names = Names.of(tuple(dict.fromkeys(name for name, _ in DRAFTS)), help="The file keeps others.")

    def scenarios(self) -> Iterator[Scenario]:
        """Each draft with each of its settings and seeds."""
        for algorithm, num_draft_tokens in DRAFTS:
            settings = LOOKUP_SETTINGS if algorithm in (NGRAM, NGRAM_SUFFIX) else SETTINGS
            for *setting, seeds in settings if algorithm in self.algorithms else ():
                for seed in seeds[:1] if self.device == "cuda" else seeds:
                    about = dict(zip(KEY, (algorithm, num_draft_tokens, *setting, seed), strict=True))
                    yield Scenario(about=about, draft=algorithm, options={"fixed_draft_tokens": num_draft_tokens})


def edit_of(text: str, new_name: str) -> str:
    """Returns a prompt that asks for the text with a new name in it, after an example; with the start of it."""
    counts = Counter(name for name in NAME.findall(text) if not keyword.iskeyword(name))
    name = next((name for name, count in counts.most_common(1) if count > 1), None)
    lines = text.splitlines(keepends=True)
    example, begun = (
        part if name is None else re.sub(rf"\b{name}\b", other, part)
        for part, other in ((text, "first"), ("".join(lines[: max(1, len(lines) // 3)]), new_name))
    )
    return "\n\n\n".join((text, example, begun))


def make_table(file: Path | None) -> Table:
    """Results in the order of DRAFTS."""
    drafts, workloads = [*DRAFTS], [*NEW_NAMES]
    return Table(
        file,
        *KEY,
        order=lambda row: (
            drafts.index((row["algorithm"], row["num_draft_tokens"])),
            workloads.index(row["workload"]),
            -row["temperature"],
            row["seed"],
        ),
    )


async def _sample(client: AsyncClient, about: Row) -> Row:
    options: Any = {name: about[name] for name in ("max_new_tokens", "temperature", "seed")}
    await answers(client, [Request(WARM_UP, options)] * CONCURRENCY, CONCURRENCY)
    found, begun = [], time.monotonic()
    for name in NEW_NAMES[about["workload"]]:
        texts = [prompt.text if name is None else edit_of(prompt.text, name) for prompt in prompts()]
        found += await answers(client, [Request(text, options) for text in texts], CONCURRENCY)
    seconds = time.monotonic() - begun
    outputs = [answer.token_ids for answer in found]
    num_tokens, usages = sum(map(len, outputs)), [answer.usage for answer in found]
    return {
        "num_prompts": len(found),
        **{
            name: sum(getattr(usage, name) for usage in usages)
            for name in ("num_verify_steps", "total_draft_tokens", "total_accepted_tokens")
        },
        "mean_accept_length": accept_length(found),
        "accepted_per_position": [
            sum(counts) for counts in zip_longest(*(usage.accepted_per_position for usage in usages), fillvalue=0)
        ],
        "repeated_share": sum(len(output) * repeated_share(output) for output in outputs) / num_tokens,
        "tokens_per_second": num_tokens / seconds,  # of all requests, 8 at a time
    }


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures the standalone draft, the heads and prompt lookup."""
    table, where = make_table(file), host(plan.device)

    async def sample(served: Served, scenario: Scenario) -> AsyncIterator[Row]:
        async with AsyncClient(served.address) as client:
            yield {**await _sample(client, scenario.about), "host": where}

    async with Stack(device=plan.device) as stack:
        await stack.models(*plan.algorithms)
        await run(stack, plan.scenarios(), sample, table)
