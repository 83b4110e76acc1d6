"""Jobs of every kind, the same ones each time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from tests.harness.counted_jobs import Job

SEED = 11
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_k=40, seed=2),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2**64 - 1),
    SamplingParams(temperature=0.7, min_p=0.05, top_k=100, seed=4),
)


def make_jobs(
    count: int = len(SAMPLINGS),
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    max_draft_tokens: tuple[int | None, ...] = (None,),
    top_logprobs: tuple[int | None, ...] = (None,),
    samplings: tuple[SamplingParams, ...] = SAMPLINGS,
    seed: int = SEED,
) -> list[Job]:
    """Prompts of 1 to 40 tokens, the same ones each time. What is given as a tuple is of one job after the other."""
    rng = random.Random(seed)
    specs = [
        SequenceSpec(
            job_id=str(number),
            prompt=tuple(rng.randrange(256) for _ in range(rng.choice((1, 7, 8, 9, 23, 40)))),
            max_new_tokens=rng.randrange(10, 24),
            sampling=samplings[number % len(samplings)],
            stop_token_ids=stop_token_ids,
            top_logprobs=top_logprobs[number % len(top_logprobs)],
            max_draft_tokens=max_draft_tokens[number % len(max_draft_tokens)],
        )
        for number in range(count)
    ]
    return [Job(spec) for spec in specs]


def adjusted_jobs(plain: list[list[int]]) -> list[Job]:
    """Jobs with bias, penalties and masks, greedy and sampled, of which some speculate; and one with nothing of it.

    `plain`: what the same jobs bring with nothing of it.
    """
    frequent = sorted({token for output in plain for token in output[::3]})
    adjustments: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.4, "max_draft_tokens": 2},
        {"frequency_penalty": 1.2, "presence_penalty": -0.4},
        {"logit_bias": tuple((token, 6.0) for token in frequent[:3]), "frequency_penalty": 0.8},
        {},
        {"masked_token_ids": tuple(frequent), "masked_after": 9},
        {"repetition_penalty": 0.8, "presence_penalty": 1.5, "masked_token_ids": tuple(frequent), "masked_after": 4},
        {"repetition_penalty": 1.9, "logit_bias": ((frequent[5], 8.0), (frequent[7], 7.0)), "max_draft_tokens": 0},
        {"logit_bias": tuple((token, -100.0) for token in frequent[10:30]), "repetition_penalty": 1.1},
    )
    jobs = make_jobs(len(adjustments))
    for job, changes in zip(jobs, adjustments, strict=True):
        kept = {name: value for name, value in changes.items() if name not in ("max_draft_tokens", "masked_after")}
        if "masked_after" in changes:
            kept["masked_before"] = len(job.spec.prompt) + changes["masked_after"]
        sampling = replace(job.spec.sampling, **kept)
        job.spec = replace(job.spec, sampling=sampling, max_draft_tokens=changes.get("max_draft_tokens"))
    return jobs
