"""Pages on demand: a sequence holds those that it uses, and gives them back for one that comes before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.common.wire.job import FinishReason
from slipstream.scheduler.pages import STEPS_AHEAD
from slipstream.scheduler.sizes import BatchSizes
from slipstream.scheduler.waiting_queue import MOST_OVERTAKING
from tests.harness.counted_jobs import Job
from tests.harness.simulated_run import Run, make_job, reference

SIZES = BatchSizes(num_slots=9, num_pages=33, page_tokens=4, chunk_tokens=64, num_draft_tokens=2, run_ahead=1)
WHOLE = SIZES.num_pages - 1


class Acceptance:
    """In place of a random generator: every draft has as many right tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def randint(self, low: int, high: int) -> int:
        """The number, as far as it may be."""
        return min(self.count, high)


def make_run(sizes: BatchSizes = SIZES, *, accepted: int = 2) -> Run:
    """A run without jobs."""
    return Run(sizes, Acceptance(accepted))  # type: ignore[arg-type]


def finish(run: Run, *jobs: Job) -> None:
    """Runs to the end: each job has its own tokens, and all pages are back."""
    for _ in range(3000):
        if not run.turn() and not len(run.queue):
            break
    for job in jobs:
        expected, reason = reference(job)
        assert (run.jobs.outputs[job], run.jobs.ends[job]) == (expected[job.num_brought :], reason)
    assert (run.batch.num_running, run.batch.pages.num_free) == (0, run.batch.pages.num_pages)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_sequence_holds_pages_for_its_tokens_and_a_few_steps(accepted: int) -> None:
    sizes = replace(SIZES, num_pages=500)
    run = make_run(sizes, accepted=accepted)
    job = make_job("job", (1,) * 10, 900)
    run.jobs.add(job)
    run.turn()
    assert len(job.pages) == sizes.pages_for(10)
    num_updates = 0
    for _ in range(150):
        run.turn()
        step, _ = run.in_flight[-1]
        num_updates += len(step.updates)
        num_tokens = 10 + len(run.jobs.outputs[job])
        assert sizes.pages_of(num_tokens) <= len(job.pages) <= sizes.pages_of(num_tokens + (STEPS_AHEAD + 4) * 3)
    assert 0 < num_updates < 20, "pages come some at a time"
    run.jobs.cancel(job)
    finish(run)


def test_sequences_that_use_little_of_their_limits_run_together() -> None:
    """Their limits together are many times the pages that there are."""
    run = make_run()
    jobs = [make_job(str(number), (number,), 100, stops=True) for number in range(8)]
    run.jobs.add(*jobs)
    run.turn()
    assert run.batch.num_running == 8
    finish(run, *jobs)


def test_the_youngest_of_the_lowest_priority_is_preempted_and_its_tokens_go_on() -> None:
    run = make_run()
    low, oldest, youngest = (
        make_job("low", (1,) * 20, 60, priority=-1),
        make_job("oldest", (2,) * 20, 60),
        make_job("youngest", (3,) * 20, 60),
    )
    run.jobs.add(low, oldest, youngest)
    preempted: list[Job] = []
    while len(run.jobs.ends) < 3:
        run.turn()
        for job in (low, oldest, youngest):
            if job.was_preempted and job not in preempted:
                preempted.append(job)
                had = run.jobs.outputs[job]
                assert job.tokens == job.spec.prompt + tuple(had), "it waits with all output that its gateway has"
    assert preempted == [low, youngest]
    assert run.batch.counts.preemptions >= 2
    assert list(run.jobs.ends) == [oldest, youngest, low]
    finish(run, low, oldest, youngest)


def test_what_is_under_way_for_a_preempted_sequence_is_dropped() -> None:
    run = make_run()
    jobs = [make_job(str(number), (number,) * 30, 50) for number in range(2)]
    run.jobs.add(*jobs)
    while not run.batch.counts.preemptions:
        under_way, before = [step.yielding.slots for step, _ in run.in_flight], list(run.jobs.outputs[jobs[1]])
        run.turn()
    assert [len(slots) for slots in under_way] == [2], "a step of both"
    assert run.jobs.outputs[jobs[1]] == before
    finish(run, *jobs)


def test_a_sequence_that_waits_again_can_be_cancelled() -> None:
    run = make_run()
    jobs = [make_job(str(number), (number,) * 30, 50) for number in range(2)]
    run.jobs.add(*jobs)
    while not jobs[1].was_preempted:
        run.turn()
    run.jobs.cancel(jobs[1])
    finish(run, jobs[0])
    assert run.jobs.ends[jobs[1]] is FinishReason.ABORT


def test_one_alone_has_all_pages() -> None:
    run = make_run()
    job = make_job("job", (1,) * 4, WHOLE * SIZES.page_tokens - 4)
    run.jobs.add(job)
    finish(run, job)
    assert run.batch.counts.preemptions == 0


def test_some_pages_are_kept_for_what_runs() -> None:
    run = make_run()
    first, second = make_job("first", (1,) * 50, 20), make_job("second", (2,) * 66, 20)
    assert SIZES.pages_for(50) + SIZES.pages_for(66) == WHOLE
    run.jobs.add(first, second)
    run.turn()
    assert run.batch.num_running == 1
    finish(run, first, second)


def test_a_prompt_that_does_not_fit_is_overtaken_but_not_for_ever() -> None:
    run = make_run()
    runs, large = make_job("runs", (1,) * 40, 80), make_job("large", (2,) * 100, 10)
    small = [make_job(str(number), (number,), 2) for number in range(3 * MOST_OVERTAKING)]
    run.jobs.add(runs, large, *small)
    finish(run, runs, large, *small)
    assert large.num_overtaken == MOST_OVERTAKING
    ended = list(run.jobs.ends)
    assert ended.index(runs) < ended.index(large)
    assert sum(ended.index(job) < ended.index(runs) for job in small) == MOST_OVERTAKING


def test_no_step_costs_anything_for_pages_while_there_are_enough() -> None:
    run, calls = make_run(replace(SIZES, num_pages=500), accepted=1), list[int]()
    job = make_job("job", (1,), 900)
    run.jobs.add(job)
    page_lists = run.batch._page_lists
    num_steps = page_lists.num_steps

    def counted(*arguments: object) -> object:
        calls.append(run.device.last_step)
        return num_steps(*arguments)  # type: ignore[arg-type]

    page_lists.num_steps = counted  # type: ignore[method-assign, assignment]
    for _ in range(200):
        run.turn()
    assert 0 < len(set(calls)) < 80


def test_a_preempted_sequence_goes_on_behind_the_pages_that_it_had() -> None:
    run = make_run()
    first, second = make_job("first", (1,) * 30, 60), make_job("second", (2,) * 30, 40)
    run.jobs.add(first, second)
    while not second.was_preempted:
        run.turn()
    while second not in run.jobs.ends:
        run.turn()
    assert first in run.jobs.ends
    assert second.num_cached >= 28, "its new pages did not take the place of its own in the cache"
    finish(run, first, second)


def test_a_step_finds_its_pages_where_they_were_got_behind_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there are enough: then what the workers wait for takes no time for it."""
    run, calls, is_deciding = make_run(replace(SIZES, num_pages=500), accepted=1), list[bool](), False
    job = make_job("job", (1,), 900)
    run.jobs.add(job)
    grow_together, next_step = run.batch._page_lists.grow_together, run.batch.next_step

    def growing(*arguments: Any) -> bool:
        calls.append(is_deciding)
        return grow_together(*arguments)

    def deciding(num_draft_tokens: int) -> object:
        nonlocal is_deciding
        is_deciding = True
        step = next_step(num_draft_tokens)
        is_deciding = False
        return step

    monkeypatch.setattr(run.batch._page_lists, "grow_together", growing)
    monkeypatch.setattr(run.batch, "next_step", deciding)
    finish(run, job)
    assert len(calls) > 5
    assert not any(calls)


def test_nothing_is_preempted_ahead_of_the_step_that_needs_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    jobs = [make_job(str(number), (number,) * 30, 50) for number in range(2)]
    run.jobs.add(*jobs)
    grow_ahead = run.batch.grow_ahead

    def growing() -> None:
        before = run.batch.counts.preemptions, run.batch.num_running
        grow_ahead()
        assert (run.batch.counts.preemptions, run.batch.num_running) == before

    monkeypatch.setattr(run.batch, "grow_ahead", growing)
    finish(run, *jobs)
    assert run.batch.counts.preemptions
