"""The order in which prompts get room in steps."""

from __future__ import annotations

from random import Random

import pytest

from slipstream.scheduler.sizes import BatchSizes
from tests.harness.counted_jobs import Job
from tests.harness.simulated_run import Run, make_job

SIZES = BatchSizes(num_slots=17, num_pages=400, page_tokens=4, chunk_tokens=64, num_draft_tokens=2, run_ahead=1)


def make_run() -> Run:
    """A run without jobs."""
    return Run(SIZES, Random(0))


def prompt_of(number: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt that shares no page with another one."""
    return (number,) * num_tokens


def taken_in(run: Run, *jobs: Job) -> list[tuple[str, int]]:
    """Has the next step sent, and returns the jobs that it takes in tokens of, in order, and how many."""
    names = {job.lease.slot: job.spec.job_id for job in jobs}
    run.turn()
    step, _ = run.in_flight[-1]
    names |= {job.lease.slot: job.spec.job_id for job in jobs}
    return [(names[chunk.slot], len(chunk.tokens)) for chunk in step.chunks]


def test_a_short_prompt_does_not_wait_for_longer_ones() -> None:
    run = make_run()
    long, short, shorter = (
        make_job("long", prompt_of(1, 100), 4),
        make_job("short", prompt_of(2, 20), 4),
        make_job("shorter", prompt_of(3, 10), 4),
    )
    run.jobs.add(long, short, shorter)
    assert taken_in(run, long, short, shorter) == [("shorter", 10), ("short", 20), ("long", 34)]


def test_equal_prompts_are_taken_in_as_they_come() -> None:
    run = make_run()
    first, second = make_job("first", prompt_of(1, 40), 4), make_job("second", prompt_of(2, 40), 4)
    run.jobs.add(first, second)
    assert taken_in(run, first, second) == [("first", 40), ("second", 24)]


def test_a_higher_priority_goes_before_a_shorter_prompt() -> None:
    run = make_run()
    short, urgent = make_job("short", prompt_of(1, 10), 4), make_job("urgent", prompt_of(2, 60), 4, priority=1)
    run.jobs.add(short, urgent)
    assert taken_in(run, short, urgent) == [("urgent", 60), ("short", 4)]


def test_tokens_in_the_cache_do_not_count() -> None:
    run = make_run()
    before = make_job("before", prompt_of(1, 60), 1)
    run.jobs.add(before)
    while before not in run.jobs.ends:
        run.turn()
    other, known = make_job("other", prompt_of(2, 30), 4), make_job("known", prompt_of(1, 62), 4)
    run.jobs.add(other, known)
    assert taken_in(run, other, known)[0] == ("known", 62 - 60)


@pytest.mark.parametrize("priority", [0, 1])
def test_a_prompt_does_not_wait_for_pages_that_one_behind_it_fills(priority: int) -> None:
    """The first is under way, and longer by far or of a lower priority; others of the second's priority come, too."""
    run = make_run()
    first = make_job("first", prompt_of(1, 900), 1)
    second = make_job("second", prompt_of(1, 100), 1, priority=priority)
    run.jobs.add(first)
    run.turn()
    run.jobs.add(second)
    for number in range(2, 6):
        run.jobs.add(make_job(f"later {number}", prompt_of(number, 120), 1, priority=priority))
        run.turn()
    assert not second.is_prefilling


def test_a_prompt_that_begins_alike_waits_for_the_pages_that_one_before_it_fills() -> None:
    run = make_run()
    first, second = make_job("first", prompt_of(1, 100), 1), make_job("second", prompt_of(1, 100), 1)
    run.jobs.add(first, second)
    assert taken_in(run, first, second) == [("first", 64)]
    while second.is_prefilling:
        run.turn()
    assert second.num_cached >= 96


def test_later_prompts_go_before_a_long_one_until_as_many_tokens_as_it_has_were_taken_in() -> None:
    """One that is shorter comes before each step, and has nearly all the room if it goes first."""
    run = make_run()
    long, jobs, overtaking = make_job("long", prompt_of(1, 200), 1), [], 0
    run.jobs.add(long)
    for number in range(2, 40):
        later = make_job(f"later {number}", prompt_of(number, 60), 1)
        jobs.append(later)
        run.jobs.add(later)
        steps = taken_in(run, long, *jobs)
        overtaking += sum(count for name, count in steps[: [name for name, _ in steps].index("long")])
        if not long.is_prefilling:
            break
    assert not long.is_prefilling
    assert 60 <= overtaking <= 200 + 60
