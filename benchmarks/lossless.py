"""Compares the tokens of requests that are served in many ways: they must be the same in all of them.

Held-out prompts, each greedy and sampled, with and without penalties, bias and a least length; without a draft, with
the bundled drafts and prompt lookup; alone and in batches of eight, prompts in one piece and in chunks,
run-ahead 0, 1 and 2, and with drafts off for every other request of a batch. Everything is compared with plain
decoding, alone, in one piece, run-ahead 0. Status 1 if any differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from slipstream.benchmarks.models import ALGORITHMS, NGRAM_SUFFIX, NONE, JsonOption, Models, draft_of
from slipstream.benchmarks.result_files import write_json
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import prompts
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from slipstream.client.requests import RequestOptions

NUM_PROMPTS = 10
MAX_NEW_TOKENS = 48
IN_ONE_PIECE, IN_CHUNKS = 512, 16
"""Prompt tokens in a step at most; the prompts have 48 to 96."""
ENDS = (8, 12, 26, 199)
"""Opening bracket, comma, colon, end of line: tokens that the model samples all the time."""

SAMPLINGS: Mapping[str, RequestOptions] = {
    "greedy": {"temperature": 0.0},
    "T = 0.8": {"temperature": 0.8, "seed": 1},
    "T = 0.8, filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 2},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "T = 0.8, penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
    },
    # Tokens that end the output are made likely, and kept out for a while.
    "T = 0.8, bias, least length": {
        "temperature": 0.8,
        "seed": 4,
        "logit_bias": dict.fromkeys(ENDS, 3.0),
        "stop_token_ids": ENDS,
        "min_new_tokens": 20,
    },
}
"""Sampling parameters by the name of the combination."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request: a prompt and its sampling parameters."""

    prompt: int
    """Number of the held-out prompt."""
    sampling: str
    """A name in `SAMPLINGS`."""


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration in which requests are served."""

    algorithm: str
    run_ahead: int
    chunk_tokens: int
    concurrency: int
    is_mixed: bool = False
    """Every other request has drafts off."""

    @property
    def scheduler(self) -> tuple[str, int, int]:
        """The settings of the scheduler."""
        return self.algorithm, self.run_ahead, self.chunk_tokens


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a request, and its counts."""

    token_ids: tuple[int, ...]
    finish_reason: str
    num_verify_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int


CASES = tuple(itertools.starmap(Case, itertools.product(range(NUM_PROMPTS), SAMPLINGS)))
REFERENCE = Way(NONE, 0, IN_ONE_PIECE, 1)


def _ways() -> Iterator[Way]:
    """Each pair of values of any two dimensions, with each algorithm."""
    for algorithm in (*ALGORITHMS, NGRAM_SUFFIX):
        for run_ahead, alone, together in (
            (0, IN_ONE_PIECE, IN_CHUNKS),
            (1, IN_CHUNKS, IN_ONE_PIECE),
            (2, IN_ONE_PIECE, IN_CHUNKS),
        ):
            yield Way(algorithm, run_ahead, alone, 1)
            yield Way(algorithm, run_ahead, together, 8)
            if algorithm != NONE:
                yield Way(algorithm, run_ahead, together, 8, is_mixed=True)


WAYS = tuple(_ways())


async def serve(stack: Stack, ways: Sequence[Way], cases: Sequence[Case]) -> dict[Way, list[Output]]:
    """Starts the models that these ways need; returns the output of each case, by way.

    One scheduler serves all ways with the same settings of the scheduler.
    """
    algorithms = {way.algorithm for way in ways}
    await stack.models(Models().with_drafts(*algorithms))
    outputs: dict[Way, list[Output]] = {}
    for (algorithm, run_ahead, chunk_tokens), group in itertools.groupby(ways, lambda way: way.scheduler):
        scheduler = stack.scheduler(draft_of(algorithm), run_ahead=run_ahead, max_batched_tokens=chunk_tokens)
        async with scheduler as served, AsyncClient(served.address) as client:
            for way in group:
                outputs[way] = await _generate(client, cases, way)
    return outputs


async def _generate(client: AsyncClient, cases: Sequence[Case], way: Way) -> list[Output]:
    texts = [prompt.text for prompt in prompts()]
    room = asyncio.Semaphore(way.concurrency)

    async def run(number: int, case: Case) -> Output:
        has_drafts = way.algorithm != NONE and not (way.is_mixed and number % 2)
        options: RequestOptions = {**SAMPLINGS[case.sampling], "max_new_tokens": MAX_NEW_TOKENS}
        if way.is_mixed:
            options["speculation"] = has_drafts
        async with room:
            found = [chunk async for chunk in client.generate(texts[case.prompt], **options)]
        usage = found[-1].usage
        assert usage is not None, "the last message has it"
        assert has_drafts or not usage.total_draft_tokens, "nothing is drafted where drafts are off"
        return Output(
            token_ids=tuple(token for chunk in found for token in chunk.token_ids),
            finish_reason=str(found[-1].finish_reason),
            num_verify_steps=usage.num_verify_steps,
            num_draft_tokens=usage.total_draft_tokens,
            num_accepted_tokens=usage.total_accepted_tokens,
        )

    return list(await asyncio.gather(*itertools.starmap(run, enumerate(cases))))


def differences(outputs: Mapping[Way, Sequence[Output]], cases: Sequence[Case]) -> list[str]:
    """A line for each output that differs from the reference."""
    expected = outputs[REFERENCE]
    return [
        f"{way}, {case}: {output} instead of {reference}"
        for way, found in outputs.items()
        for case, output, reference in zip(cases, found, expected, strict=True)
        if (output.token_ids, output.finish_reason) != (reference.token_ids, reference.finish_reason)
    ]


def mean_accept_length(outputs: Sequence[Output]) -> float:
    """The mean over the steps in which a draft was checked; 1 if there is none."""
    steps = sum(output.num_verify_steps for output in outputs)
    return 1 + sum(output.num_accepted_tokens for output in outputs) / max(1, steps)


def main(json_file: JsonOption = None) -> None:
    """Compares all ways."""
    started = time.monotonic()
    outputs = asyncio.run(_serve_all())
    report = _report(outputs, time.monotonic() - started)
    write_json(report, json_file)
    print(f"{report['num_outputs']} outputs, the reference's among them; {report['num_different']} differ from those")
    sys.exit("\n".join(report["differences"][:20]) if report["differences"] else 0)


async def _serve_all() -> dict[Way, list[Output]]:
    async with Stack() as stack:
        return await serve(stack, WAYS, CASES)


def _report(outputs: Mapping[Way, Sequence[Output]], seconds: float) -> dict[str, Any]:
    wrong = differences(outputs, CASES)
    reference = outputs[REFERENCE]
    distinct = sorted(len(set(output.token_ids)) for output in reference)
    return {
        "num_cases": len(CASES),
        "num_prompts": NUM_PROMPTS,
        "samplings": SAMPLINGS,
        "num_ways": len(outputs),
        "algorithms": sorted({way.algorithm for way in outputs}),
        "run_aheads": sorted({way.run_ahead for way in outputs}),
        "concurrencies": sorted({way.concurrency for way in outputs}),
        "chunk_tokens": sorted({way.chunk_tokens for way in outputs}),
        "max_new_tokens": MAX_NEW_TOKENS,
        "num_outputs": sum(map(len, outputs.values())),
        "num_tokens": sum(len(output.token_ids) for found in outputs.values() for output in found),
        "distinct_tokens_per_output": {"least": distinct[0], "most": distinct[-1]},
        "finish_reasons": Counter(output.finish_reason for output in reference),
        "num_different": len(wrong),
        "differences": wrong,
        "seconds": round(seconds, 1),
        "cases": [asdict(case) for case in CASES],
        "ways": [
            {
                **asdict(way),
                "mean_accept_length": round(mean_accept_length(found), 3),
                "sha256_of_each_output": [_digest(output.token_ids) for output in found],
            }
            for way, found in outputs.items()
        ],
    }


def _digest(tokens: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


if __name__ == "__main__":
    typer.run(main)
