"""Prompts that begin alike on real engines and streams: the prefix cache changes no token and no guess."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import WorkerConfig
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import SAMPLINGS

pytestmark = pytest.mark.sampled_module(2)


def jobs_that_begin_alike(seed: int, count: int = 14, *, longest_output: int = 23) -> list[Job]:
    """Prompts of up to 60 tokens: some begin with the same tokens, some are the same, some have a salt or penalties."""
    rng = random.Random(seed)
    common = [tuple(rng.randrange(256) for _ in range(50)) for _ in range(2)]
    jobs: list[Job] = []
    for number in range(count):
        start = rng.choice(common)[: rng.choice((0, 4, 15, 16, 17, 30, 50))]
        prompt = start + tuple(rng.randrange(256) for _ in range(rng.randrange(1, 10)))
        if jobs and rng.random() < 0.3:
            prompt = rng.choice(jobs).spec.prompt
        sampling = replace(rng.choice(SAMPLINGS), seed=number)
        spec = SequenceSpec(
            job_id=str(number),
            prompt=prompt,
            max_new_tokens=rng.randint(1, longest_output),
            sampling=replace(sampling, repetition_penalty=1.3) if rng.random() < 0.15 else sampling,
            stop_token_ids=frozenset(),
            max_draft_tokens=rng.choice((None, None, None, 0, 1)),
            cache_salt=rng.choice(("", "", "", "a tenant")),
        )
        jobs.append(Job(spec))
    return jobs


def assert_all_is_given_back(served: Served) -> None:
    """No page has an owner."""
    pages = served.epoch.epoch.batch.pages
    assert pages.num_free == pages.num_pages
    assert not pages._references


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_hits_change_no_token_and_all_pages_come_back(
    models: Models, seed: int, num_draft_tokens: int, run_ahead: int
) -> None:
    rng = random.Random(seed)
    apart = Served(models, Way(run_ahead=0, slots=1, chunk_tokens=64, no_prefix_cache=True))
    expected = apart.run(jobs_that_begin_alike(seed))
    way = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead, slots=3, chunk_tokens=rng.choice((5, 8, 64)))
    served = Served(models, way)
    together, again = jobs_that_begin_alike(seed), jobs_that_begin_alike(seed)
    doomed = {job: rng.randrange(10) for job in rng.sample(again, 4)}

    def cancel_some(*_: object) -> None:
        for job, after in doomed.items():
            if job in served.epoch.outputs and len(served.epoch.outputs[job]) >= after:
                served.epoch.jobs.cancel(job)

    served.epoch.on_progress = cancel_some
    outputs = served.run(together, again)
    for job, output, full in zip((*together, *again), outputs, expected * 2, strict=True):
        if job in doomed and served.epoch.finish_reason(job) is FinishReason.ABORT:
            assert output == full[: len(output)]
        else:
            assert output == full
        assert job.stats.cached_tokens < len(job.spec.prompt)
        assert job.stats.cached_tokens == 0 or not job.spec.sampling.has_penalty
    assert sum(job.stats.cached_tokens for job in together) > 0, "prompts that run together share their beginning"
    assert sum(job.stats.cached_tokens for job in again) > 0
    assert_all_is_given_back(served)


def test_samples_of_one_prompt_share_it_and_take_it_in_once(models: Models) -> None:
    prompt = tuple(range(100, 150))
    spec = SequenceSpec(
        job_id="job", prompt=prompt, max_new_tokens=6, sampling=SamplingParams(), stop_token_ids=frozenset()
    )
    for num_draft_tokens in (0, 2):
        samples = [Job(replace(spec, sampling=SamplingParams(temperature=1.0, seed=seed))) for seed in range(4)]
        served = Served(models, Way(num_draft_tokens=num_draft_tokens, chunk_tokens=20))
        served.run(samples)
        assert [job.stats.cached_tokens for job in samples] == [0, 48, 48, 48]
        assert_all_is_given_back(served)


def test_a_draft_that_is_the_target_is_always_right_behind_a_hit(models: Models) -> None:
    def jobs() -> list[Job]:
        made = jobs_that_begin_alike(5)
        plain = [job for job in made if not job.spec.sampling.has_penalty]
        return [Job(replace(job.spec, max_new_tokens=21, max_draft_tokens=None, cache_salt="")) for job in plain]

    together, again = jobs(), jobs()
    served = Served(replace(models, draft=models.twin), Way(num_draft_tokens=4, slots=3))
    served.run(together, again)
    assert sum(job.stats.cached_tokens for job in (*together, *again)) > 100
    # One token comes with the prompt, and the others in fours and the one behind them.
    assert {(job.stats.num_verify_steps, job.stats.total_accepted_tokens) for job in (*together, *again)} == {(4, 16)}


def test_the_next_turn_of_a_conversation_finds_the_last_answer(models: Models) -> None:
    def job(prompt: tuple[int, ...]) -> Job:
        return Job(
            SequenceSpec(
                job_id="turn", prompt=prompt, max_new_tokens=20, sampling=SamplingParams(), stop_token_ids=frozenset()
            )
        )

    for num_draft_tokens, num_settled in ((0, 35), (3, 35 - 4)):
        first = job(tuple(range(16)))
        (answer,) = Served(models, Way(num_draft_tokens=num_draft_tokens)).run([first])
        second = job((*first.spec.prompt, *answer, 1, 2, 3))
        Served(models, Way(num_draft_tokens=num_draft_tokens)).run([job(first.spec.prompt)], [second])
        assert second.stats.cached_tokens == num_settled // 4 * 4


@pytest.mark.slow
def test_the_bundled_head_guesses_as_well_behind_a_hit_as_without() -> None:
    device, target = HostDevice(), bundled.target_dir()
    verify = make_verify(WorkerConfig(model=target), device, 0)
    head = make_draft(WorkerConfig(model=bundled.eagle3_dir(), target=target, algorithm=EAGLE3), device, 0)

    def jobs() -> list[Job]:
        common = tuple(range(300, 340))
        endings = [(), (), (7, 8), (7, 9), (340, 341, 342), (340, 343)]
        return [
            Job(
                SequenceSpec(
                    job_id=str(number),
                    prompt=(*common, *ending),
                    max_new_tokens=32,
                    sampling=SamplingParams(temperature=0.8, seed=number),
                    stop_token_ids=frozenset(),
                )
            )
            for number, ending in enumerate(endings)
        ]

    counts, outputs = [], []
    for is_off in (True, False):
        made = jobs()
        served = Served(
            Models(verify, head, head),
            Way(num_draft_tokens=4, page_tokens=8, chunk_tokens=16, no_prefix_cache=is_off),
        )
        outputs.append(served.run(*([job] for job in made)))
        counts.append([(job.stats.num_verify_steps, job.stats.total_accepted_tokens) for job in made])
        cached = [job.stats.cached_tokens for job in made]
        assert cached == ([0] * 6 if is_off else [0, 32, 32, 40, 32, 40])
    assert outputs[0] == outputs[1]
    assert counts[0] == counts[1], "its entries are those that it would have made itself"
