"""Compares the tokens of requests that are served in many ways: they must be the same in all of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.benchmarks.models import ALGORITHMS, NGRAM_SUFFIX, NONE, draft_of
from slipstream.benchmarks.runner import NoPlan, Row, benchmark, write_json
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.streams import Answer, accept_length, answers
from slipstream.bundled import prompts
from slipstream.cli.load_requests import Request
from slipstream.client import AsyncClient
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


class Case(NamedTuple):
    """A request: a prompt and its sampling parameters."""

    prompt: int
    """Number of the held-out prompt."""
    sampling: str
    """A name in `SAMPLINGS`."""


class Way(NamedTuple):
    """A configuration in which requests are served."""

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


CASES = tuple(itertools.starmap(Case, itertools.product(range(NUM_PROMPTS), SAMPLINGS)))
REFERENCE = Way(NONE, 0, IN_ONE_PIECE, 1)


def _ways() -> Iterator[Way]:
    """Yields each pair of values of any two dimensions, with each algorithm."""
    for algorithm in (*ALGORITHMS, NGRAM_SUFFIX):
        for run_ahead in range(3):
            alone, together = (IN_CHUNKS, IN_ONE_PIECE) if run_ahead == 1 else (IN_ONE_PIECE, IN_CHUNKS)
            yield Way(algorithm, run_ahead, alone, 1)
            yield Way(algorithm, run_ahead, together, 8)
            if algorithm != NONE:
                yield Way(algorithm, run_ahead, together, 8, is_mixed=True)


WAYS = tuple(_ways())


async def serve(stack: Stack, ways: Sequence[Way], cases: Sequence[Case]) -> dict[Way, list[Answer]]:
    """Starts the models that these ways need; returns the output of each case, by way.

    One scheduler serves all ways with the same settings of the scheduler.
    """
    await stack.models(*{way.algorithm for way in ways} - {NONE})
    outputs: dict[Way, list[Answer]] = {}
    for (algorithm, run_ahead, chunk_tokens), group in itertools.groupby(ways, lambda way: way.scheduler):
        scheduler = stack.scheduler(draft_of(algorithm), run_ahead=run_ahead, max_batched_tokens=chunk_tokens)
        async with scheduler as served, AsyncClient(served.address) as client:
            for way in group:
                outputs[way] = await _generate(client, cases, way)
    return outputs


async def _generate(client: AsyncClient, cases: Sequence[Case], way: Way) -> list[Answer]:
    texts, requests = [prompt.text for prompt in prompts()], []
    for number, case in enumerate(cases):
        options: RequestOptions = {**SAMPLINGS[case.sampling], "max_new_tokens": MAX_NEW_TOKENS}
        if way.is_mixed:
            options["speculation"] = number % 2 == 0
        requests.append(Request(texts[case.prompt], options))
    found = await answers(client, requests, way.concurrency)
    without = found if way.algorithm == NONE else found[1::2] if way.is_mixed else []
    assert not any(answer.usage.total_draft_tokens for answer in without), "nothing is drafted where drafts are off"
    return found


def differences(outputs: Mapping[Way, Sequence[Answer]], cases: Sequence[Case]) -> list[str]:
    """A line for each output that differs from the reference."""
    expected = outputs[REFERENCE]
    return [
        f"{way}, {case}: {output} instead of {reference}"
        for way, found in outputs.items()
        for case, output, reference in zip(cases, found, expected, strict=True)
        if (output.token_ids, output.finish_reason) != (reference.token_ids, reference.finish_reason)
    ]


def _report(outputs: Mapping[Way, Sequence[Answer]]) -> Row:
    wrong, reference = differences(outputs, CASES), outputs[REFERENCE]
    distinct = sorted(len(set(output.token_ids)) for output in reference)
    algorithms, run_aheads, chunks, concurrencies, _ = (sorted(set(values)) for values in zip(*outputs, strict=True))
    return {
        "num_cases": len(CASES),
        "num_prompts": NUM_PROMPTS,
        "samplings": SAMPLINGS,
        "num_ways": len(outputs),
        "algorithms": algorithms,
        "run_aheads": run_aheads,
        "concurrencies": concurrencies,
        "chunk_tokens": chunks,
        "max_new_tokens": MAX_NEW_TOKENS,
        "num_outputs": sum(map(len, outputs.values())),
        "num_tokens": sum(len(output.token_ids) for found in outputs.values() for output in found),
        "distinct_tokens_per_output": {"least": distinct[0], "most": distinct[-1]},
        "finish_reasons": Counter(output.finish_reason for output in reference),
        "num_different": len(wrong),
        "differences": wrong,
        "cases": [case._asdict() for case in CASES],
        "ways": [
            {
                **way._asdict(),
                "mean_accept_length": round(accept_length(found), 3),
                "sha256_of_each_output": [_digest(output.token_ids) for output in found],
            }
            for way, found in outputs.items()
        ],
    }


def _digest(tokens: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


@benchmark(NoPlan)
async def main(_: NoPlan, file: Path | None) -> list[str]:
    """Compares all ways."""
    started = time.monotonic()
    async with Stack() as stack:
        report = _report(await serve(stack, WAYS, CASES))
    write_json({**report, "seconds": round(time.monotonic() - started, 1)}, file)
    print(f"{report['num_outputs']} outputs, the reference's among them; {report['num_different']} differ from those")
    differences: list[str] = report["differences"]
    return differences[:20]
