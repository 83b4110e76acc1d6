"""Prompt lookup on real engines and streams: every step drafts what a plain search over the whole sequence finds."""

from __future__ import annotations

import operator
import random
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft
from slipstream.services.worker.config import NGRAM, WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.counted_jobs import Job, OutputRow
from tests.harness.local_epoch import LocalEpoch, Models, Served, Way
from tests.harness.prompt_lookup import continued, num_steps
from tests.harness.workers import local_workers

pytestmark = pytest.mark.sampled_module(2)

BOUNDS = (1, 3)
LETTERS = (65, 66, 67)


def make_jobs(count: int, seed: int, max_new_tokens: int | None = None) -> list[Job]:
    """Prompts that may begin alike, and outputs, all of three letters: they hold the same n-grams again and again."""
    rng = random.Random(seed)
    common = tuple(rng.choices(LETTERS, k=40))
    return [
        Job(
            SequenceSpec(
                job_id=str(number),
                prompt=(*common[: rng.choice((0, 13, 40))], *rng.choices(LETTERS, k=rng.randrange(1, 9))),
                max_new_tokens=max_new_tokens or rng.randrange(10, 40),
                sampling=SamplingParams(
                    temperature=rng.choice((0.0, 1.0)), seed=number, logit_bias=tuple((one, 60.0) for one in LETTERS)
                ),
                stop_token_ids=frozenset(),
                max_draft_tokens=rng.choice((None, None, 1)),
            )
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def draft(target: Path) -> RoleEngine:
    """The drafter, for the random target."""
    shortest, longest = BOUNDS
    config = WorkerConfig(algorithm=NGRAM, target=target, prompt_lookup_min=shortest, prompt_lookup_max=longest)
    return make_draft(config, HostDevice(), 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
def test_slots_and_cached_pages_change_hands_and_each_sequence_is_looked_up(
    verify: RoleEngine, draft: RoleEngine, run_ahead: int, num_draft_tokens: int
) -> None:
    """So many steps as the plain search takes: one guess that is another, and there is one more or one less."""
    way = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead, slots=3, chunk_tokens=7)
    plain = Served(Models(verify, draft, draft), Way(run_ahead=0, slots=1)).run(make_jobs(10, seed=run_ahead))
    together, again = make_jobs(10, seed=run_ahead), make_jobs(10, seed=run_ahead)
    outputs = Served(Models(verify, draft, draft), way).run(together, again)
    assert outputs == 2 * plain
    for job, output in zip((*together, *again), outputs, strict=True):
        most = job.spec.max_draft_tokens
        assert job.stats.num_verify_steps == num_steps(job.spec.prompt, output, num_draft_tokens, *BOUNDS, most)
    assert sum(job.stats.cached_tokens for job in again) > 100, "tokens of pages that others have left"
    assert sum(job.stats.total_accepted_tokens for job in again) > 20


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_one_that_comes_late_looks_up_all_of_a_sequence(verify: RoleEngine, draft: RoleEngine, run_ahead: int) -> None:
    """The prompt, and the output of the steps before the draft came."""
    num_draft_tokens, checked = 3, 0
    config = replace(Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead).config(None), context_tokens=300)
    with local_workers(verify, draft) as both:
        epoch = LocalEpoch(1, config, both[:1])

        def follow(job: Job, row: OutputRow) -> None:
            nonlocal checked
            output, known = epoch.outputs[job], (*job.spec.prompt, *epoch.outputs[job])
            if len(output) > 20 and not epoch.attachments:
                epoch.epoch.speculation.offer(epoch.attach(both[1]))  # type: ignore[arg-type]
            if not epoch.events:
                both[1].stream.synchronize(20.0)  # or all sequences may end before it has caught up
            if job.stats.num_verify_steps > drafted[job] and row.finish_reason is None:
                before = known[: len(known) - len(row.tokens)]
                guesses = continued(before, num_draft_tokens, *BOUNDS)[: job.spec.max_draft_tokens]
                is_right = [*map(operator.eq, guesses, row.tokens), False]
                assert len(row.tokens) == is_right.index(False) + 1
                checked += 1
            drafted[job] = job.stats.num_verify_steps

        epoch.on_progress = follow
        jobs = make_jobs(3, seed=4, max_new_tokens=200)
        drafted = dict.fromkeys(jobs, 0)
        epoch.run(jobs)
        assert [event for event, _ in epoch.events] == ["joined"]
        assert checked > 20
