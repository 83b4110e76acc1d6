"""Real engines on real streams, driven by the real loop: the tokens of a request are a function of the request."""

from __future__ import annotations

import random

import pytest

from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.step import Role
from tests.harness.leaks import nothing_left
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import make_jobs

pytestmark = pytest.mark.sampled_module(5)

WAYS = [
    *(Way(run_ahead=run_ahead) for run_ahead in (0, 1, 2)),
    *(Way(num_draft_tokens=4, run_ahead=run_ahead) for run_ahead in (0, 1, 2)),
    Way(num_draft_tokens=1, run_ahead=1, slots=2),
    Way(num_draft_tokens=3, run_ahead=2, slots=1, page_tokens=16, chunk_tokens=64),
    Way(num_draft_tokens=4, run_ahead=1, debug=False),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_token_ids_are_the_same_however_they_are_served(models: Models, reference: list[list[int]], way: Way) -> None:
    together, alone = make_jobs(), make_jobs()
    with nothing_left():
        served = Served(models, way)
        outputs = served.run(together, *([job] for job in alone))
        assert outputs == reference * 2
        counts = [job.stats for job in (*together, *alone)]
        if way.num_draft_tokens:
            lengths = [count.mean_accept_length for count in counts]
            assert 1.2 < sum(lengths) / len(lengths) < way.num_draft_tokens + 1, "some drafts are right, not all"
        batch = served.epoch.epoch.batch
        assert (batch.num_running, batch.slots.num_free) == (0, way.slots)
        assert batch.pages.num_free == batch.pages.num_pages
        del served, batch


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_stop_tokens_end_a_request_and_nobody_elses(models: Models, reference: list[list[int]], run_ahead: int) -> None:
    stop = reference[0][6]
    jobs = make_jobs(stop_token_ids=frozenset({stop}))
    served = Served(models, Way(num_draft_tokens=4, run_ahead=run_ahead))
    for output, full, job in zip(served.run(jobs), reference, jobs, strict=True):
        if stop in full:
            assert output == full[: full.index(stop) + 1]
            assert served.epoch.finish_reason(job) is FinishReason.STOP
        else:
            assert output == full


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_cancels_change_nothing_for_the_others(models: Models, seed: int) -> None:
    """Slots and pages change hands while steps of their last owners are still under way."""
    rng = random.Random(seed)
    way = Way(num_draft_tokens=2, run_ahead=rng.randrange(3), slots=2, num_pages=rng.choice((None, 20)), debug=True)
    expected = Served(models, Way(run_ahead=0)).run(make_jobs(12))
    jobs = make_jobs(12)
    doomed = {job: rng.randrange(10) for job in rng.sample(jobs, 6)}
    served = Served(models, way)

    def cancel_some(*_: object) -> None:
        for job, after in doomed.items():
            if len(served.epoch.outputs[job]) >= after and job.stats.admitted_ns is not None:
                served.epoch.jobs.cancel(job)

    served.epoch.on_progress = cancel_some
    outputs = served.run(jobs)
    for job, output, full in zip(jobs, outputs, expected, strict=True):
        if served.epoch.finish_reason(job) is FinishReason.ABORT:
            assert job in doomed
            assert output == full[: len(output)]
        else:
            assert output == full
    assert any(served.epoch.finish_reason(job) is FinishReason.ABORT for job in jobs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_draft_that_is_the_target_is_always_right(models: Models, reference: list[list[int]], run_ahead: int) -> None:
    """So draft's keys and values are those of the tokens that were accepted, and its noise is verify's."""
    for num_draft_tokens in (1, 4):
        way = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead)
        jobs = make_jobs()
        assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == reference
        for job in jobs:
            # In a job's last step tokens past its end are drafted, for which there are no pages.
            missed = num_draft_tokens * job.stats.num_verify_steps - job.stats.total_accepted_tokens
            assert missed <= num_draft_tokens
            assert job.stats.num_verify_steps == -(-(job.spec.max_new_tokens - 1) // (num_draft_tokens + 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("bounds", [(0, None), (0, 0, 2, 0), (1, 0, 3), (0,)], ids=str)
def test_speculation_that_is_bounded_or_off_changes_no_token(
    models: Models, reference: list[list[int]], run_ahead: int, bounds: tuple[int | None, ...]
) -> None:
    """Requests with and without it come and go in one batch, so that steps are of both kinds; the twin is always right
    as far as it may be, so a draft that lost the thread over plain steps would show."""
    num_draft_tokens = 4
    way = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead, slots=2)
    jobs = make_jobs(max_draft_tokens=bounds)
    assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == reference
    for job in jobs:
        bound = num_draft_tokens if job.spec.max_draft_tokens is None else job.spec.max_draft_tokens
        counts = job.stats
        assert counts.total_draft_tokens == counts.num_verify_steps * bound
        assert counts.num_verify_steps == (-(-(job.spec.max_new_tokens - 1) // (bound + 1)) if bound else 0)
        assert counts.num_verify_steps * bound - counts.total_accepted_tokens <= bound
        assert not any(counts.accepted_per_position[bound:])


def test_roles_are_what_they_say(models: Models) -> None:
    assert models.verify.description.role is Role.VERIFY
    assert models.draft.description.role is Role.DRAFT
    models.draft.description.check_fits(models.verify.description)
