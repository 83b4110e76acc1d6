"""A sequence that comes with output goes on with exactly the tokens that would have come next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import SequenceSpec
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import adjusted_jobs, make_jobs

pytestmark = pytest.mark.sampled_module(2)

WAYS = [
    Way(),
    Way(run_ahead=2, chunk_tokens=64, page_tokens=16),
    Way(num_draft_tokens=4, run_ahead=1),
    Way(num_draft_tokens=3, run_ahead=0, chunk_tokens=5),
    Way(num_draft_tokens=4, run_ahead=2, slots=3),
]


@pytest.fixture(scope="module")
def undisturbed(models: Models) -> list[tuple[SequenceSpec, list[int]]]:
    """Greedy and sampled, with penalties, bias and masks, and with stop tokens; each with its whole output."""
    plain = make_jobs(8)
    outputs = Served(models, Way(run_ahead=0)).run(plain)
    jobs = [*plain, *adjusted_jobs(outputs)]
    for output in outputs[:3]:
        jobs.append(Job(replace(jobs[len(jobs) % 3].spec, stop_token_ids=frozenset({output[7], output[9]}))))
    specs = [job.spec for job in jobs]
    whole = Served(models, Way(run_ahead=0, slots=1)).run(*([Job(spec)] for spec in specs))
    return list(zip(specs, whole, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_cut_anywhere_the_rest_is_the_same(
    models: Models, undisturbed: list[tuple[SequenceSpec, list[int]]], way: Way
) -> None:
    cuts, expected = [], []
    for number, (spec, whole) in enumerate(undisturbed):
        for length in range(1 + number % 2, len(whole), 2):
            cuts.append(Job(replace(spec, output=tuple(whole[:length]))))
            expected.append(whole[length:])
    served = Served(models, way)
    assert served.run(cuts) == expected
    for job, rest in zip(cuts, expected, strict=True):
        is_stop = rest[-1] in job.spec.stop_token_ids
        assert served.epoch.finish_reason(job) is (FinishReason.STOP if is_stop else FinishReason.LENGTH)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [replace(way, num_pages=80 // way.page_tokens) for way in WAYS], ids=str)
def test_preempted_for_want_of_pages_the_rest_is_the_same(
    models: Models, undisturbed: list[tuple[SequenceSpec, list[int]]], way: Way
) -> None:
    """Penalties, masks, stop tokens and logprobs go on as if nothing had been."""
    jobs = [Job(replace(spec, top_logprobs=3 if number % 2 else None)) for number, (spec, _) in enumerate(undisturbed)]
    rich, served = Served(models, replace(way, num_pages=None)), Served(models, way)
    expected = [Job(job.spec) for job in jobs]
    assert served.run(jobs) == rich.run(expected) == [whole for _, whole in undisturbed]
    batch, jobs_before = served.epoch.epoch.batch, rich.epoch.jobs
    assert batch.counts.preemptions > 0
    assert served.epoch.registry.get_sample_value("slipstream_preemptions_total") == batch.counts.preemptions
    assert batch.pages.num_free == batch.pages.num_pages
    for job, before in zip(jobs, expected, strict=True):
        assert served.epoch.finish_reason(job) is rich.epoch.finish_reason(before)
        found, likely = served.epoch.jobs.logprobs[job], jobs_before.logprobs[before]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in likely], abs=1e-4)


def test_a_draft_that_is_the_target_counts_the_output_as_well(
    models: Models, undisturbed: list[tuple[SequenceSpec, list[int]]]
) -> None:
    """So all that it guesses is right, with penalties, too."""
    jobs = [
        Job(replace(spec, output=tuple(whole[: len(whole) // 2]), max_draft_tokens=None)) for spec, whole in undisturbed
    ]
    expected = [whole[len(whole) // 2 :] for _, whole in undisturbed]
    way = Way(num_draft_tokens=3, run_ahead=1)
    assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == expected
    for job, rest in zip(jobs, expected, strict=True):
        if not job.spec.stop_token_ids:
            # One token of the prefill, then 4 a step.
            assert job.stats.num_verify_steps == -(-(len(rest) - 1) // 4)


def test_logprobs_go_on_as_well(models: Models, undisturbed: list[tuple[SequenceSpec, list[int]]]) -> None:
    specs = [(replace(spec, top_logprobs=3), whole) for spec, whole in undisturbed[::3]]
    way = Way(num_draft_tokens=4)
    served = Served(models, way)
    jobs = [Job(spec) for spec, _ in specs]
    served.run(jobs)
    again = Served(models, way)
    cut = [Job(replace(spec, output=tuple(whole[:4]))) for spec, whole in specs]
    again.run(cut)
    for one, other in zip(jobs, cut, strict=True):
        rest = served.epoch.jobs.logprobs[one][4:]
        found = again.epoch.jobs.logprobs[other]
        assert [likely.logprob for likely in found] == pytest.approx([likely.logprob for likely in rest], abs=1e-3)
        assert [len(likely.top) for likely in found] == [3] * len(rest)
