"""Mean accept length of the bundled drafts and of prompt lookup, through the real services.

K = 4, for the heads K = 3 as well: at T = 0.8 with three seeds over the first 128 tokens behind each held-out prompt,
and greedy over the first 16. Small models repeat themselves, which makes drafting easy: the share of tokens in a
repeated 5-gram is beside it.

Edits of a given text, greedy over 48 tokens: the prompt is a held-out one, the same with another name in it, and the
first third of one with a third name. Prompt lookup has them asked again as well: three requests for each, one after the
other and with other names, so that it can draft from the answers before where it remembers outputs.

Each setting has an attachment of its own, since a draft that remembers would know more in the next one.

    python benchmarks/accept_length.py --device cuda --json benchmarks/results/accept_length_h200.json

measures tokens per second on a GPU, in bfloat16, with the first seed.
"""

from __future__ import annotations

import asyncio
import keyword
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.models import (
    EAGLE,
    EAGLE3,
    MTP,
    NGRAM,
    NGRAM_SUFFIX,
    NUM_DRAFT_TOKENS,
    STANDALONE,
    DeviceOption,
    JsonOption,
    Models,
    known_names,
)
from slipstream.benchmarks.result_files import host, read_rows, write_rows
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import prompts
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.api.output_chunk import OutputChunk

HELD_OUT, EDITS, AGAIN = "held-out", "edits", "edits again"
CONCURRENCY = 8
GRAM = 5
NAME = re.compile(r"\b[a-z_]{5,}\b")
NEW_NAMES = {HELD_OUT: (None,), EDITS: ("second",), AGAIN: ("second", "third", "fourth")}
"""The names that the edits of a workload ask for, each in a request of its own; None is the prompt as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A way of sampling."""

    temperature: float
    max_new_tokens: int
    seeds: tuple[int, ...]
    workload: str = HELD_OUT


SETTINGS = (
    Setting(temperature=0.8, max_new_tokens=128, seeds=(1, 2, 3)),
    Setting(temperature=0.0, max_new_tokens=16, seeds=(0,)),
    Setting(temperature=0.0, max_new_tokens=48, seeds=(0,), workload=EDITS),
)
LOOKUP_SETTINGS = (*SETTINGS, Setting(temperature=0.0, max_new_tokens=48, seeds=(0,), workload=AGAIN))

WARM_UP = "import this\n"
"""A prompt that is none of those measured."""

DRAFTS = (
    (STANDALONE, NUM_DRAFT_TOKENS),
    (EAGLE3, NUM_DRAFT_TOKENS),
    (EAGLE3, 3),
    (EAGLE, NUM_DRAFT_TOKENS),
    (MTP, NUM_DRAFT_TOKENS),
    (MTP, 3),
    (NGRAM, NUM_DRAFT_TOKENS),
    (NGRAM_SUFFIX, NUM_DRAFT_TOKENS),
)
"""Algorithms, each with K. There are three modules for multi-token prediction."""
ALL = ",".join(dict.fromkeys(name for name, _ in DRAFTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLength:
    """The result for one draft, setting and seed."""

    algorithm: str
    workload: str
    num_draft_tokens: int
    temperature: float
    max_new_tokens: int
    seed: int
    num_prompts: int
    num_verify_steps: int
    total_draft_tokens: int
    total_accepted_tokens: int
    mean_accept_length: float
    """1 + accepted / verify steps, over all prompts."""
    repeated_share: float
    """The part of the output's tokens that lies in a 5-gram that occurs more than once in the same output."""
    tokens_per_second: float | None = None
    """All requests' output by the time that they took together, 8 at a time; None in older results."""
    host: str | None = None
    """The machine on which that was measured."""

    @property
    def case(self) -> tuple[str, int, str, float, int, int]:
        """Settings of the measurement, first the draft as in DRAFTS; a new result of a case replaces the old one."""
        draft = self.algorithm, self.num_draft_tokens
        return *draft, self.workload, self.temperature, self.max_new_tokens, self.seed


def repeated_share(outputs: Sequence[Sequence[int]]) -> float:
    """Share of tokens that lie in a 5-gram that occurs more than once in their output."""
    inside = 0
    for output in outputs:
        grams = [tuple(output[start : start + GRAM]) for start in range(len(output) - GRAM + 1)]
        counts = Counter(grams)
        covered: set[int] = set()
        for start, gram in enumerate(grams):
            if counts[gram] > 1:
                covered.update(range(start, start + GRAM))
        inside += len(covered)
    return inside / max(1, sum(map(len, outputs)))


def edit_of(text: str, new_name: str) -> str:
    """A prompt that asks for the text once more with a new name in it, after an example; with the start of it."""
    counts = Counter(name for name in NAME.findall(text) if not keyword.iskeyword(name))
    name = next((name for name, count in counts.most_common(1) if count > 1), None)
    lines = text.splitlines(keepends=True)
    example, begun = (
        part if name is None else re.sub(rf"\b{name}\b", other, part)
        for part, other in ((text, "first"), ("".join(lines[: max(1, len(lines) // 3)]), new_name))
    )
    return "\n\n\n".join((text, example, begun))


def main(
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas; the file keeps others.")] = ALL,
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
) -> None:
    """Measures the standalone draft, the heads and prompt lookup."""
    chosen = known_names("--algorithms", algorithms, ALL.split(","))
    results = {row.case: row for row in read_rows(json_file, AcceptLength)}

    def keep(result: AcceptLength) -> None:
        about = f"{result.algorithm}, K = {result.num_draft_tokens}, {result.workload}, T = {result.temperature:g}"
        rate = f"{result.tokens_per_second:,.0f} tokens/s"
        print(f"{about}: mean accept length {result.mean_accept_length:.3f}, {rate}", flush=True)
        results[result.case] = result
        rows = sorted(results.values(), key=lambda row: DRAFTS.index(row.case[:2]))
        write_rows(rows, json_file)

    asyncio.run(_measure_all(chosen, device, keep))


async def _measure_all(algorithms: Sequence[str], device: str, keep: Callable[[AcceptLength], None]) -> None:
    async with Stack(device=device) as stack:
        await stack.models(Models().with_drafts(*algorithms))
        for algorithm, num_draft_tokens in (draft for draft in DRAFTS if draft[0] in algorithms):
            settings = LOOKUP_SETTINGS if algorithm in (NGRAM, NGRAM_SUFFIX) else SETTINGS
            cases = [(setting, seed) for setting in settings for seed in setting.seeds]
            if device == "cuda":
                cases = [case for case in cases if case[1] == case[0].seeds[0]]
            for setting, seed in cases:
                scheduler = stack.scheduler(algorithm, num_draft_tokens=num_draft_tokens)
                async with scheduler as served, AsyncClient(served.address) as client:
                    result = await _measure(client, (algorithm, num_draft_tokens), setting, seed)
                    keep(replace(result, host=host(device)))


async def _answers(client: AsyncClient, texts: Sequence[str], setting: Setting, seed: int) -> list[list[OutputChunk]]:
    room = asyncio.Semaphore(CONCURRENCY)

    async def run(text: str) -> list[OutputChunk]:
        async with room:
            chunks = client.generate(
                text, max_new_tokens=setting.max_new_tokens, temperature=setting.temperature, seed=seed
            )
            return [chunk async for chunk in chunks]

    return await asyncio.gather(*map(run, texts))


async def _measure(client: AsyncClient, draft: tuple[str, int], setting: Setting, seed: int) -> AcceptLength:
    algorithm, num_draft_tokens = draft
    await _answers(client, (WARM_UP,) * CONCURRENCY, setting, seed)
    answers, begun = [], time.monotonic()
    for name in NEW_NAMES[setting.workload]:
        texts = [prompt.text if name is None else edit_of(prompt.text, name) for prompt in prompts()]
        answers += await _answers(client, texts, setting, seed)
    seconds = time.monotonic() - begun
    usages = [chunks[-1].usage for chunks in answers if chunks[-1].usage is not None]
    steps = sum(usage.num_verify_steps for usage in usages)
    accepted = sum(usage.total_accepted_tokens for usage in usages)
    return AcceptLength(
        algorithm=algorithm,
        workload=setting.workload,
        num_draft_tokens=num_draft_tokens,
        temperature=setting.temperature,
        max_new_tokens=setting.max_new_tokens,
        seed=seed,
        num_prompts=len(answers),
        num_verify_steps=steps,
        total_draft_tokens=sum(usage.total_draft_tokens for usage in usages),
        total_accepted_tokens=accepted,
        mean_accept_length=1 + accepted / steps,
        tokens_per_second=sum(len(chunk.token_ids) for chunks in answers for chunk in chunks) / seconds,
        repeated_share=repeated_share([[token for chunk in chunks for token in chunk.token_ids] for chunks in answers]),
    )


if __name__ == "__main__":
    typer.run(main)
