"""Drafts that rest while plain steps are faster, and come back: no token changes, and none is missed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.plan import catch_up
from slipstream.scheduler.records import LossCause
from slipstream.scheduler.speculation import CATCH_UP_TIMEOUT_S
from tests.harness.counted_jobs import Job
from tests.harness.drafted_run import SIZES, DraftedRun, check, make_jobs
from tests.harness.fake_drafts import FakeDraft
from tests.harness.random_choice import RandomChoice
from tests.harness.simulated_run import make_job
from tests.harness.step_kinds import Kind

NUM_RUNS = 4


@pytest.mark.usefixtures("tiny_small_steps")
@pytest.mark.parametrize("reads_hidden", [False, True], ids=["language model", "head"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_drafts_rest_and_come_back_at_any_time(reads_hidden: bool, run_ahead: int) -> None:
    """The same beside drafts that come and are lost: a draft that rests is told nothing, and then what it missed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    num_rests, kinds = 0, list[Kind]()
    for number in range(NUM_RUNS):
        rng = random.Random(seed + number)
        choice = RandomChoice(rng)
        run = DraftedRun(replace(SIZES, run_ahead=run_ahead), rng, choice=choice)
        jobs = make_jobs(rng, 20)
        to_submit, drafts = deque(jobs), [FakeDraft(10, 3, reads_hidden=reads_hidden)]
        run.offer(drafts[0])
        for _ in range(20_000):
            if not run.turn() and not to_submit and not len(run.queue):
                break
            if to_submit and rng.random() < 0.1:
                run.jobs.add(to_submit.popleft())
            if rng.random() < 0.01:
                drafts.append(FakeDraft(len(drafts) + 10, rng.randrange(1, 4), reads_hidden=reads_hidden))
                run.offer(drafts[-1])
            if rng.random() < 0.005:
                drafts[-1].fail()
        check(run, jobs)
        num_rests += choice.num_rests
        kinds += run.kinds
        joined = [number for event, number in run.listener.events if event == "joined"]
        assert len(joined) <= 2 * len(drafts), "coming back from a rest is not another beginning"
    assert num_rests > 10
    assert Kind.DECODE in kinds


def resting_run(*, reads_hidden: bool = False) -> tuple[DraftedRun, FakeDraft, Job, DraftChoice]:
    """A run whose draft rests."""
    choice = RandomChoice(random.Random(1), changes=0.0)
    run = DraftedRun(SIZES, random.Random(1), choice=choice)
    draft, job = FakeDraft(2, 3, reads_hidden=reads_hidden), make_job("job", (1, 2, 3), 200)
    run.offer(draft)
    run.jobs.add(job)
    with choice.held():
        for _ in range(5):
            run.turn()
        choice.drafts = False
        for _ in range(5):
            run.turn()
        assert run.kinds[-1] is Kind.DECODE, "it is judged"
    for _ in range(5):
        run.turn()
    return run, draft, job, choice


def test_a_draft_that_rests_takes_part_in_no_step_and_is_told_nothing() -> None:
    run, draft, job, _ = resting_run()
    assert run.speculation.active is None
    assert run.speculation.resting is draft.draft
    assert run.kinds[-4:] == [Kind.PLAIN] * 4
    num_commands = len(draft.kinds)
    run.jobs.add(other := make_job("other", tuple(range(30)), 20))
    run.finish()
    assert len(draft.kinds) == num_commands
    assert run.listener.events == [("joined", 2)]
    check(run, [job, other])


@pytest.mark.parametrize("reads_hidden", [False, True], ids=["language model", "head"])
def test_a_draft_comes_back_as_one_that_catches_up(reads_hidden: bool) -> None:
    run, draft, job, choice = resting_run(reads_hidden=reads_hidden)
    choice.drafts = True
    run.turn()
    while run.kinds[-1] is not Kind.DECODE:
        run.turn()
    assert Kind.CATCH_UP in draft.kinds
    run.finish()
    assert run.listener.events == [("joined", 2)]
    check(run, [job])


def test_a_draft_comes_back_at_no_cost_while_nothing_runs() -> None:
    run, draft, job, choice = resting_run()
    run.finish()
    choice.drafts = True
    run.turn()
    assert run.speculation.active is draft.draft
    assert Kind.CATCH_UP not in draft.kinds
    num_before = len(run.kinds)
    run.jobs.add(other := make_job("other", (1, 2), 20))
    run.finish()
    assert run.kinds[num_before : num_before + 2] == [Kind.PREFILL, Kind.DECODE]
    check(run, [job, other])


def test_a_draft_that_rests_is_lost_withdrawn_and_swapped_as_another() -> None:
    for end, causes in (
        (lambda run, draft: draft.fail(), [LossCause.DIED]),
        (lambda run, draft: run.speculation.withdraw(draft.draft, LossCause.LEFT), [LossCause.LEFT]),
        (lambda run, draft: run.offer(FakeDraft(3, 2)), [LossCause.SWAPPED]),
    ):
        run, draft, job, _ = resting_run()
        end(run, draft)
        run.finish()
        assert run.listener.causes == causes
        assert ("gone", 2) in run.listener.events
        check(run, [job])
        assert run.speculation.resting is None


def test_a_draft_that_hangs_while_it_rests_is_lost_when_it_is_to_come_back() -> None:
    run, _, job, choice = resting_run()
    resting = run.speculation.resting
    assert resting is not None
    resting.add(10**6, catch_up(10**6))
    choice.drafts = True
    run.turn()
    assert run.listener.causes == []
    resting.moved_at -= CATCH_UP_TIMEOUT_S
    run.turn()
    assert run.listener.causes == [LossCause.TIMEOUT]
    run.finish()
    check(run, [job])


def test_a_draft_on_its_way_back_rests_on_if_another_comes_and_is_lost() -> None:
    run, draft, job, choice = resting_run()
    choice.drafts = True
    run.turn()
    second = FakeDraft(3, 2)
    run.offer(second)
    run.speculation.check()
    second.fail()
    run.speculation.check()
    assert run.speculation.resting is draft.draft
    run.finish()
    assert ("left", 2) not in run.listener.events
    assert run.kinds[-1] is Kind.DECODE
    check(run, [job])
