"""Prompt lookup that remembers outputs, on real engines and streams: other drafts, and the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slipstream.bundled import prompts, target_dir
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import NGRAM, WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.prompt_lookup import PlainSuffixCache

pytestmark = pytest.mark.sampled_module(2)

BOUNDS = (2, 4)
NUM_DRAFT_TOKENS = 3


def make_jobs(count: int, *, salt: str = "", seed: int = 1) -> list[Job]:
    """Sampled, so that an output seldom repeats itself."""
    rng = random.Random(seed)
    specs = [
        SequenceSpec(
            job_id=str(number),
            prompt=tuple(rng.choices(range(256), k=rng.randrange(1, 30))),
            max_new_tokens=rng.randrange(30, 60),
            sampling=SamplingParams(temperature=1.0, seed=number),
            stop_token_ids=frozenset(),
            cache_salt=salt,
        )
        for number in range(count)
    ]
    return [Job(spec) for spec in specs]


@pytest.fixture(scope="module")
def drafts(target: Path) -> dict[int, RoleEngine]:
    """Drafters by the tokens that they remember."""
    shortest, longest = BOUNDS
    bounds = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    configs = {
        size: WorkerConfig(algorithm=NGRAM, target=target, suffix_cache_tokens=size, **bounds) for size in (0, 70, 5000)
    }
    return {size: make_draft(config, HostDevice(), 0) for size, config in configs.items()}


def num_steps(reference: PlainSuffixCache, job: Job, output: list[int]) -> int:
    """The decode steps of a job that runs alone."""
    piece, done, num_new, count = object(), 1, 1, 0
    while done < len(output):
        text, rest = (*job.spec.prompt, *output[:done]), output[done:]
        reference.record(text, num_new, piece)
        guesses = reference.continued(text, NUM_DRAFT_TOKENS, *BOUNDS)
        is_right = [guess == token for guess, token in zip(guesses, rest, strict=False)]
        num_new = 1 + (is_right.index(False) if False in is_right else len(is_right))
        done, count = done + num_new, count + 1
    return count


@pytest.mark.parametrize("size", [70, 5000])
def test_one_after_the_other_each_draft_is_that_of_a_plain_search(
    verify: RoleEngine, drafts: dict[int, RoleEngine], size: int
) -> None:
    """So many steps: one guess that is another, and there is one more or one less."""
    way = Way(num_draft_tokens=NUM_DRAFT_TOKENS, run_ahead=0, slots=1)
    models = Models(verify, drafts[size], drafts[size])
    first, again = make_jobs(6), make_jobs(6)
    outputs = Served(models, way).run(first, again)
    assert outputs == 2 * Served(models, Way(run_ahead=0, slots=1)).run(make_jobs(6))
    reference = PlainSuffixCache(size)
    steps = [num_steps(reference, job, output) for job, output in zip((*first, *again), outputs, strict=True)]
    assert [job.stats.num_verify_steps for job in (*first, *again)] == steps
    if size == 5000:
        assert sum(steps[6:]) < 0.5 * sum(steps[:6])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("num_pages", [None, 30])
def test_what_was_sent_before_is_drafted_from_it(
    verify: RoleEngine, drafts: dict[int, RoleEngine], run_ahead: int, num_pages: int | None
) -> None:
    """Many at a time, in slots that change hands, also with so few pages that some are preempted."""
    way = Way(num_draft_tokens=NUM_DRAFT_TOKENS, run_ahead=run_ahead, slots=4, num_pages=num_pages)
    plain = Served(Models(verify, drafts[0], drafts[0]), Way(run_ahead=0, slots=1)).run(make_jobs(8))
    lengths = {}
    for size in (0, 5000):
        first, again = make_jobs(8), make_jobs(8)
        assert Served(Models(verify, drafts[size], drafts[size]), way).run(first, again) == 2 * plain
        lengths[size] = [job.stats.mean_accept_length for job in again]
    assert sum(lengths[0]) / 8 < 1.5
    assert sum(lengths[5000]) / 8 > 2.5


def test_the_bundled_target_says_the_same_sooner() -> None:
    """Each request twice, the second time in another order: greedy ones, and sampled ones with their seeds."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir())
    specs = [
        SequenceSpec(
            job_id=str(number),
            prompt=tuple(tokenizer(prompt.text).input_ids),
            max_new_tokens=40,
            sampling=SamplingParams(temperature=0.8 * (number % 2), seed=number),
            stop_token_ids=frozenset(),
        )
        for number, prompt in enumerate(prompts()[:4])
    ]
    target = make_verify(WorkerConfig(model=target_dir()), HostDevice(), 0)
    way = Way(num_draft_tokens=NUM_DRAFT_TOKENS, slots=3, context_tokens=256, chunk_tokens=64)
    plain = Served(Models(target, target, target), replace(way, num_draft_tokens=0)).run([Job(spec) for spec in specs])
    lengths = {}
    for size in (0, 5000):
        config = WorkerConfig(algorithm=NGRAM, target=target_dir(), prompt_lookup_min=2, suffix_cache_tokens=size)
        draft = make_draft(config, HostDevice(), 0)
        first, again = ([Job(spec) for spec in order] for order in (specs, specs[::-1]))
        assert Served(Models(target, draft, draft), way).run(first, again) == plain + plain[::-1]
        lengths[size] = [sum(job.stats.mean_accept_length for job in wave) / len(wave) for wave in (first, again)]
    assert lengths[5000][1] > lengths[5000][0] + 1
    assert lengths[5000][1] > lengths[0][1] + 1


def test_it_learns_from_an_output_that_is_not_finished(verify: RoleEngine, drafts: dict[int, RoleEngine]) -> None:
    """A job that takes the slot of a short one overtakes half of its twin in the other slot."""
    models, way = Models(verify, drafts[5000], drafts[5000]), Way(num_draft_tokens=NUM_DRAFT_TOKENS, slots=2)
    other, job = (make_jobs(2)[index].spec for index in (0, 1))
    specs = (replace(job, max_new_tokens=60), replace(other, max_new_tokens=30), replace(job, max_new_tokens=60))
    jobs = [Job(replace(spec, job_id=str(number))) for number, spec in enumerate(specs)]
    outputs = Served(models, way).run(jobs)
    assert outputs[0] == outputs[2]
    assert jobs[2].stats.num_verify_steps < 0.7 * jobs[0].stats.num_verify_steps


def test_requests_with_a_salt_stay_apart(verify: RoleEngine, drafts: dict[int, RoleEngine]) -> None:
    """Neither from a salted one, of the same salt even, nor for one."""
    models = Models(verify, drafts[5000], drafts[5000])
    way = Way(num_draft_tokens=NUM_DRAFT_TOKENS, slots=4)
    waves = [make_jobs(4, salt=salt) for salt in ("", "a", "a", "b", "")]
    Served(models, way).run(*waves)
    means = [sum(job.stats.mean_accept_length for job in wave) / len(wave) for wave in waves]
    assert max(means[:4]) < 1.5
    assert means[4] > 2.5
