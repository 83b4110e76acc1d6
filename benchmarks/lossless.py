"""Are the tokens of a request the same, whoever drafts, whatever runs beside it, however far the hosts run ahead?

    python benchmarks/lossless.py --json benchmarks/results/lossless_cpu.json

20 held-out prompts, greedy and with three seeds at T = 0.8; with and without a draft, alone and in batches of
eight, run-ahead 0, 1 and 2. Everything is compared with plain decoding, alone, run-ahead 0. Status 1 if any differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.serving_stack import ServingStack
from slipstream.bundled import prompts
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_PROMPTS = 20
MAX_NEW_TOKENS = 64
ALGORITHMS = ("none", "standalone")
RUN_AHEADS = (0, 1, 2)
CONCURRENCIES = (1, 8)
LOG_DIR = Path("build/benchmarks")


@dataclass(frozen=True, slots=True)
class Case:
    """A request: a prompt and how it is sampled."""

    prompt: int
    """Number of the held-out prompt."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are served."""

    algorithm: str
    run_ahead: int
    concurrency: int


CASES = tuple(
    Case(prompt, temperature, seed)
    for prompt in range(NUM_PROMPTS)
    for temperature, seed in ((0.0, 0), (0.8, 1), (0.8, 2), (0.8, 3))
)
REFERENCE = Way("none", 0, 1)
WAYS = tuple(itertools.starmap(Way, itertools.product(ALGORITHMS, RUN_AHEADS, CONCURRENCIES)))


async def serve(stack: ServingStack, ways: Sequence[Way], cases: Sequence[Case]) -> dict[Way, list[list[int]]]:
    """The token ids of each case, by way. One scheduler serves all ways that differ in nothing it knows of."""
    outputs: dict[Way, list[list[int]]] = {}
    for (algorithm, run_ahead), group in itertools.groupby(ways, lambda way: (way.algorithm, way.run_ahead)):
        async with (
            stack.scheduler(algorithm, run_ahead=run_ahead) as address,
            AsyncClient(address) as client,
        ):
            for way in group:
                outputs[way] = await _generate(client, cases, way.concurrency)
    return outputs


async def _generate(client: AsyncClient, cases: Sequence[Case], concurrency: int) -> list[list[int]]:
    texts = [prompt.text for prompt in prompts()]
    room = asyncio.Semaphore(concurrency)

    async def run(case: Case) -> list[int]:
        async with room:
            chunks = client.generate(
                texts[case.prompt], temperature=case.temperature, seed=case.seed, max_new_tokens=MAX_NEW_TOKENS
            )
            return [token async for chunk in chunks for token in chunk.token_ids]

    return list(await asyncio.gather(*map(run, cases)))


def differences(outputs: dict[Way, list[list[int]]], cases: Sequence[Case]) -> list[str]:
    """A line for each output that is not the reference's."""
    expected = outputs[REFERENCE]
    return [
        f"{way}, {case}: {output} instead of {reference}"
        for way, found in outputs.items()
        for case, output, reference in zip(cases, found, expected, strict=True)
        if output != reference
    ]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write what was compared.")] = None,
) -> None:
    """Compares all of it."""
    outputs = asyncio.run(_serve_all())
    wrong = differences(outputs, CASES)
    distinct = sorted({len(set(output)) for output in outputs[REFERENCE]})
    report = {
        "num_cases": len(CASES),
        "max_new_tokens": MAX_NEW_TOKENS,
        "num_outputs": sum(map(len, outputs.values())),
        "num_tokens": sum(len(output) for found in outputs.values() for output in found),
        "distinct_tokens_per_output": {"least": distinct[0], "most": distinct[-1]},
        "num_different": len(wrong),
        "differences": wrong,
        "cases": [asdict(case) for case in CASES],
        "ways": [{**asdict(way), "sha256_of_each_output": list(map(_digest, found))} for way, found in outputs.items()],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['num_outputs']} outputs, {report['num_tokens']} tokens, {len(wrong)} different from the reference")
    print("\n".join(wrong[:20]))
    sys.exit(1 if wrong else 0)


async def _serve_all() -> dict[Way, list[list[int]]]:
    async with ServingStack.start(LOG_DIR) as stack:
        return await serve(stack, WAYS, CASES)


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


if __name__ == "__main__":
    typer.run(main)
