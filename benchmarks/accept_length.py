"""Mean accept length of the bundled drafts, through the real services.

K = 4: at T = 0.8 with three seeds over the first 128 tokens behind each held-out prompt, and greedy over the first
16. Small models repeat themselves, which makes drafting easy: the share of tokens in a repeated 5-gram is beside it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from slipstream.benchmarks.models import NUM_DRAFT_TOKENS, JsonOption, Models
from slipstream.benchmarks.result_files import write_rows
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import prompts
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.api.output_chunk import OutputChunk

ALGORITHMS = ("standalone", "eagle3")
CONCURRENCY = 8
GRAM = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A way of sampling."""

    temperature: float
    max_new_tokens: int
    seeds: tuple[int, ...]


SETTINGS = (
    Setting(temperature=0.8, max_new_tokens=128, seeds=(1, 2, 3)),
    Setting(temperature=0.0, max_new_tokens=16, seeds=(0,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLength:
    """The result for one draft, setting and seed."""

    algorithm: str
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


def main(json_file: JsonOption = None) -> None:
    """Measures the standalone draft and the EAGLE-3 head."""
    results = asyncio.run(_measure_all())
    for result in results:
        print(f"{result.algorithm}, T = {result.temperature:g}: mean accept length {result.mean_accept_length:.3f}")
    write_rows(results, json_file)


async def _measure_all() -> list[AcceptLength]:
    results = []
    async with Stack() as stack:
        await stack.models(Models())
        for algorithm in ALGORITHMS:
            scheduler = stack.scheduler(algorithm, num_draft_tokens=NUM_DRAFT_TOKENS)
            async with scheduler as served, AsyncClient(served.address) as client:
                cases = [(setting, seed) for setting in SETTINGS for seed in setting.seeds]
                results += [await _measure(client, algorithm, setting, seed) for setting, seed in cases]
    return results


async def _measure(client: AsyncClient, algorithm: str, setting: Setting, seed: int) -> AcceptLength:
    room = asyncio.Semaphore(CONCURRENCY)

    async def run(text: str) -> list[OutputChunk]:
        async with room:
            chunks = client.generate(
                text, max_new_tokens=setting.max_new_tokens, temperature=setting.temperature, seed=seed
            )
            return [chunk async for chunk in chunks]

    texts = [prompt.text for prompt in prompts()]
    answers = await asyncio.gather(*map(run, texts))
    usages = [chunks[-1].usage for chunks in answers if chunks[-1].usage is not None]
    steps = sum(usage.num_verify_steps for usage in usages)
    accepted = sum(usage.total_accepted_tokens for usage in usages)
    return AcceptLength(
        algorithm=algorithm,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        temperature=setting.temperature,
        max_new_tokens=setting.max_new_tokens,
        seed=seed,
        num_prompts=len(texts),
        num_verify_steps=steps,
        total_draft_tokens=sum(usage.total_draft_tokens for usage in usages),
        total_accepted_tokens=accepted,
        mean_accept_length=1 + accepted / steps,
        repeated_share=repeated_share([[token for chunk in chunks for token in chunk.token_ids] for chunks in answers]),
    )


if __name__ == "__main__":
    typer.run(main)
