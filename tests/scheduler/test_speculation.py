"""Drafts that join, leave and are lost while sequences run, against drafts that miss no token and no step."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from slipstream.common.errors import DeadlineExceededError, UnavailableError
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, WaitPlace
from slipstream.scheduler.draft import CatchUp, DraftState
from slipstream.scheduler.observer import SentStep
from slipstream.scheduler.records import NO_LIMIT, NO_SLOTS, LossCause, SlotLease, Step, StepSlots
from slipstream.scheduler.speculation import Patience
from tests.harness.drafted_run import SIZES, DraftedRun, check, lost_run, make_jobs
from tests.harness.fake_drafts import FakeDraft, FakeFence
from tests.harness.simulated_run import make_job
from tests.harness.step_kinds import Kind

NUM_RUNS = 4


@pytest.mark.usefixtures("tiny_small_steps")
@pytest.mark.parametrize("reads_hidden", [False, True], ids=["language model", "head"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 64])
def test_drafts_come_and_go_at_any_time(reads_hidden: bool, run_ahead: int, chunk_tokens: int) -> None:
    """Each draft checks that it is told every token once, and that each step it drafts in was stashed for it.

    There are as many runs as it takes until drafts have joined and jobs were preempted.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    num_joined = num_preempted = 0
    for number in count():
        if number >= NUM_RUNS and num_joined and num_preempted:
            break
        rng = random.Random(seed + number)
        sizes = replace(SIZES, chunk_tokens=chunk_tokens, run_ahead=run_ahead, mixes=number % 4 < 2)
        if number % 2:
            # Hardly more pages than one job needs: some are preempted.
            sizes = replace(sizes, num_pages=sizes.pages_for(50 + 60) + 1 + rng.randrange(10))
        run = DraftedRun(sizes, rng)
        jobs = make_jobs(rng, 10)
        to_submit, drafts = deque(jobs), list[FakeDraft]()
        for _ in range(20_000):
            if not run.turn() and not to_submit and not len(run.queue):
                break
            if to_submit and rng.random() < (0.8 if number % 2 else 0.1):
                run.jobs.add(to_submit.popleft())
            if rng.random() < 0.04:
                context_tokens = rng.choice((NO_LIMIT, 15, 40, 70))
                draft = FakeDraft(
                    len(drafts) + 10, rng.randrange(1, 4), reads_hidden=reads_hidden, context_tokens=context_tokens
                )
                drafts.append(draft)
                run.offer(drafts[-1])
            if drafts and rng.random() < 0.02:
                rng.choice(drafts[-2:]).fail()
        check(run, jobs)
        num_preempted += run.batch.counts.preemptions
        joined = [number for event, number in run.listener.events if event == "joined"]
        num_joined += len(joined)
        for event in ("joined", "left", "gone"):
            numbers = [number for what, number in run.listener.events if what == event]
            assert len(set(numbers)) == len(numbers) or event == "joined", "each attachment has one end"


def draft_ops(step: int, stash: int = 0) -> FenceOps:
    """Of a draft's command with a decode part that waits for a stash; 0 for none."""
    waits = (FenceWait(FenceName.VERIFY_STASH, stash),) if stash else ()
    return FenceOps(waits, (proposed(step),))


def proposed(step: int) -> FencePoint:
    """The end of draft's decode part of a step."""
    return FencePoint(FenceName.DRAFT_PROPOSED, step)


def test_a_draft_that_is_there_before_the_first_step_takes_part_in_it() -> None:
    run = DraftedRun(SIZES, random.Random(1))
    draft = FakeDraft(2, 3)
    run.offer(draft)
    run.speculation.settle()
    assert run.listener.events == [("joined", 2)]
    job = make_job("job", (1, 2, 3), 30)
    run.jobs.add(job)
    run.finish()
    assert run.kinds[0] is Kind.PREFILL
    assert set(run.kinds[1:]) == {Kind.DECODE}
    assert draft.kinds[: len(run.kinds)] == run.kinds
    check(run, [job])


def test_a_language_model_takes_in_what_it_missed_and_costs_one_plain_step() -> None:
    run = DraftedRun(SIZES, random.Random(1))
    jobs = [make_job(str(number), tuple(range(40 + number)), 60) for number in range(3)]
    run.jobs.add(*jobs)
    for _ in range(20):
        run.turn()
    assert Kind.DECODE not in run.kinds
    draft = FakeDraft(2, 3)
    run.offer(draft)
    run.finish()
    assert run.listener.events[0] == ("joined", 2)
    assert draft.kinds.count(Kind.CATCH_UP) >= 120 // SIZES.chunk_tokens
    assert Kind.PLAIN not in run.kinds[run.kinds.index(Kind.DECODE) :], "one change, and no way back"
    check(run, jobs)


def test_a_head_joins_within_two_steps_without_tokens() -> None:
    run = DraftedRun(SIZES, random.Random(1))
    job = make_job("job", tuple(range(40)), 60)
    run.jobs.add(job)
    for _ in range(10):
        run.turn()
    num_before = len(run.kinds)
    draft = FakeDraft(2, 3, reads_hidden=True)
    run.offer(draft)
    run.finish()
    assert run.kinds[num_before : num_before + 2] == [Kind.PLAIN, Kind.DECODE]
    assert draft.kinds[0] is Kind.CATCH_UP
    assert draft.slots[1].history_from > 40
    check(run, [job])


def test_a_lost_draft_is_released_up_to_the_last_step_until_that_is_consumed() -> None:
    run, draft, job = lost_run()
    last = run.plan.step
    draft.proposed.value = last - 1
    draft.fail()
    run.speculation.check()
    assert draft.proposed.releases == [last]
    draft.proposed.value = last - 1  # a late write
    run.speculation.watch(None, None, time.monotonic())
    assert draft.proposed.value == last
    assert run.listener.events[1:] == [("left", 2)]
    run.turn()
    assert run.kinds[-1] is Kind.PLAIN
    run.turn()
    assert run.listener.events[1:] == [("left", 2), ("gone", 2)]
    assert run.listener.causes == [LossCause.DIED]
    run.finish()
    check(run, [job])


def test_a_draft_that_refuses_a_command_is_counted_so() -> None:
    run, draft, _ = lost_run()
    draft.has_refused = True
    draft.fail()
    run.turn()
    assert run.listener.causes == [LossCause.REFUSED]


def test_the_watchdog_loses_a_draft_that_holds_a_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run, draft, _ = lost_run(timeout_s=0.2)
    now = time.monotonic()
    monkeypatch.setattr("slipstream.scheduler.speculation.time.monotonic", lambda: now)
    step = run.plan.step
    attachment = draft.draft
    draft.proposed.value = step - 1
    run.speculation.watch(attachment, proposed(step), now)
    assert run.speculation.active is attachment
    draft.proposed.value = step
    run.speculation.watch(attachment, proposed(step), now - 1.0)
    assert run.speculation.active is attachment, "it is verify that the step waits for"
    next_step = step + 1
    attachment.sending(next_step, draft_ops(next_step))
    now += 0.3
    run.speculation.watch(attachment, proposed(next_step), now - 1.0)
    assert run.listener.causes == [LossCause.TIMEOUT]
    assert draft.proposed.value == next_step


def test_a_draft_is_not_blamed_for_a_stash_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    run, draft, _ = lost_run(timeout_s=0.1)
    now = time.monotonic()
    monkeypatch.setattr("slipstream.scheduler.speculation.time.monotonic", lambda: now)
    step, attachment = run.plan.step + 1, draft.draft
    sent_at = now
    attachment.sending(step, draft_ops(step, step - 1))
    draft.stash.value = step - 2
    run.speculation.watch(attachment, proposed(step), sent_at)
    now += 0.9
    run.speculation.watch(attachment, proposed(step), sent_at)
    assert run.speculation.active is attachment, "verify has not stashed"
    draft.stash.value = step - 1
    run.speculation.watch(attachment, proposed(step), sent_at)
    now += 0.09
    run.speculation.watch(attachment, proposed(step), sent_at)
    assert run.speculation.active is attachment, "its time counts from the stash on"
    draft.stash.value = 0  # as a hostile draft writes it
    now += 0.02
    run.speculation.watch(attachment, proposed(step), sent_at)
    assert run.listener.causes == [LossCause.TIMEOUT]


def test_a_stash_that_never_comes_does_not_excuse_a_draft_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    run, draft, _ = lost_run(timeout_s=0.1)
    now = time.monotonic()
    monkeypatch.setattr("slipstream.scheduler.speculation.time.monotonic", lambda: now)
    step, attachment = run.plan.step + 1, draft.draft
    sent_at = now
    attachment.sending(step, draft_ops(step, step - 1))
    draft.stash.value = step - 2
    run.speculation.watch(attachment, proposed(step), sent_at)
    now += 1.1
    run.speculation.watch(attachment, proposed(step), sent_at)
    assert run.listener.causes == [LossCause.TIMEOUT]


def test_a_draft_whose_fence_falls_back_is_lost_as_one_that_never_came_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    run, draft, _ = lost_run(timeout_s=0.1)
    now = time.monotonic()
    monkeypatch.setattr("slipstream.scheduler.speculation.time.monotonic", lambda: now)
    step, attachment = run.plan.step + 1, draft.draft
    attachment.sending(step, draft_ops(step))
    draft.proposed.value = 2**63
    run.speculation.watch(attachment, proposed(step), now - 1.0)
    assert run.speculation.active is attachment
    draft.proposed.value = 0
    now += 0.2
    run.speculation.watch(attachment, proposed(step), now - 1.0)
    assert run.listener.causes == [LossCause.TIMEOUT]
    assert draft.proposed.value == step


@pytest.mark.parametrize("takes_prompts", [False, True], ids=["plain", "mixed"])
def test_a_step_waits_two_steps_for_its_draft_unless_a_time_is_set(takes_prompts: bool) -> None:
    patience = Patience(None, is_on_gpu=False)
    assert patience.timeout_s == 0.25
    take(patience, 100, 0.5, takes_prompts=takes_prompts)
    assert patience.timeout_s == pytest.approx(1.0, rel=0.01)
    assert patience.tokens_timeout_s == takes_prompts
    assert Patience(0.125, is_on_gpu=False).timeout_s == 0.125


def test_a_draft_that_was_left_out_for_two_others_drafts_again_when_both_are_lost() -> None:
    run, first, job = lost_run()
    second, third = FakeDraft(3, 2), FakeDraft(4, 2)
    run.offer(second)
    while run.kinds[-1] is not Kind.PLAIN:
        run.turn()
    second.fail()
    run.speculation.check()
    assert first.draft.state is DraftState.CATCHING_UP
    run.offer(third)
    run.speculation.check()
    assert (first.draft.state, third.draft.state) == (DraftState.RESTING, DraftState.CATCHING_UP)
    third.fail()
    run.finish()
    assert ("left", 2) not in run.listener.events
    assert run.kinds[-1] is Kind.DECODE
    check(run, [job])


def test_a_draft_changes_its_state_only_as_the_table_says() -> None:
    life = (DraftState.CATCHING_UP, DraftState.STASHED, DraftState.ACTIVE, DraftState.RESTING, DraftState.CATCHING_UP)
    life += (DraftState.LEAVING, DraftState.LEFT, DraftState.DETACHED)
    draft = FakeDraft(2, 3).draft
    for state in life:
        with pytest.raises(AssertionError, match="cannot be offered next"):
            draft.enter(DraftState.OFFERED)
        draft.enter(state)
        assert draft.is_staying is (state not in life[-3:])
    with pytest.raises(AssertionError, match="a draft that is detached cannot be catching up next"):
        draft.enter(DraftState.CATCHING_UP)


def test_a_pause_and_a_long_prompt_hardly_change_how_long_a_step_waits() -> None:
    patience = Patience(None, is_on_gpu=False)
    take(patience, 100, 0.5)
    take(patience, 1, 60.0)
    assert patience.timeout_s < 2.0
    patience.took(60.0, decodes=False, takes_prompts=True, is_drafted=False)
    assert patience.timeout_s < 2.0
    assert patience.tokens_timeout_s == 2.0


def test_a_draft_that_comes_back_may_take_as_long_as_before_its_rest() -> None:
    patience = Patience(None, is_on_gpu=False)
    take(patience, 20, 1.0, is_drafted=True)
    assert patience.timeout_s > 1.5
    take(patience, 100, 0.1)
    assert patience.timeout_s > 1.5, "plain steps say nothing of how long a draft takes"


def test_steps_of_no_sequence_or_of_a_lost_draft_do_not_change_how_long_a_step_waits() -> None:
    run, draft, _ = lost_run()
    take(run.speculation.patience, 100, 0.5)
    draft.is_released = True
    full = Step(7, StepSlots.of([SlotLease(1, 1)]), NO_SLOTS, np.ones(0, np.int32))
    for step, life in ((run.batch.empty_step(), None), (full, draft.draft)):
        run.speculation.consumed(SentStep(step, life, None, FenceOps(), None, 0, 0), 60.0)
    assert run.speculation.patience.timeout_s == pytest.approx(1.0, rel=0.01)
    run.speculation.consumed(SentStep(full, None, None, FenceOps(), None, 0, 0), 60.0)
    assert run.speculation.patience.timeout_s > 1.1


def take(
    patience: Patience, count: int, seconds: float, *, takes_prompts: bool = False, is_drafted: bool = False
) -> None:
    """So many steps that decode take so long."""
    for _ in range(count):
        patience.took(seconds, decodes=True, takes_prompts=takes_prompts, is_drafted=is_drafted)


def test_a_draft_that_verify_cannot_be_released_from_ends_the_epoch() -> None:
    run, draft, _ = lost_run()
    draft.proposed = FakeFence(is_releasable=False)
    draft.fail()
    draft_step = run.plan.step
    attachment = draft.draft
    attachment.sending(draft_step, draft_ops(draft_step))
    attachment.verify_waits(FenceOps((FenceWait(FenceName.DRAFT_PROPOSED, draft_step),), ()))
    with pytest.raises(UnavailableError, match="cannot be released"):
        run.speculation.check()


def test_a_wait_for_masks_is_none_for_the_draft() -> None:
    run, draft, _ = lost_run()
    draft.prefilled = FakeFence(is_releasable=False)
    step = run.plan.step
    draft.draft.verify_waits(FenceOps((FenceWait(FenceName.GRAMMAR_READY, step, WaitPlace.SAMPLING),), ()))
    draft.fail()
    run.speculation.check()
    assert run.listener.causes == [LossCause.DIED]


def test_a_step_that_verify_was_not_sent_yet_is_no_reason_to_end_the_epoch() -> None:
    run, draft, _ = lost_run()
    draft.proposed = FakeFence(is_releasable=False)
    attachment, step = draft.draft, run.plan.step + 1
    attachment.sending(step, draft_ops(step))
    run.speculation.lose(attachment, DeadlineExceededError("the draft service did not acknowledge the step"))
    assert run.listener.causes == [LossCause.TIMEOUT]


def test_a_draft_that_is_withdrawn_finishes_its_steps() -> None:
    run, draft, job = lost_run()
    run.speculation.withdraw(draft.draft, LossCause.LEFT)
    run.finish()
    assert run.listener.events[1:] == [("left", 2), ("gone", 2)]
    assert run.listener.causes == [LossCause.LEFT]
    assert draft.proposed.releases == []
    check(run, [job])


def test_another_draft_takes_over_from_one_step_to_the_next() -> None:
    run, _, job = lost_run()
    second = FakeDraft(3, 2)
    run.offer(second)
    run.finish()
    assert run.listener.events[1:] == [("left", 2), ("gone", 2), ("joined", 3)]
    assert run.listener.causes == [LossCause.SWAPPED]
    assert run.kinds.count(Kind.PLAIN) == 1
    check(run, [job])


def test_the_draft_before_catches_up_again_if_the_other_is_lost_on_its_way_in() -> None:
    run, first, job = lost_run()
    second = FakeDraft(3, 2)
    run.offer(second)
    while run.kinds[-1] is not Kind.PLAIN:
        run.turn()
    second.fail()
    run.finish()
    assert [event for event in run.listener.events if event[0] == "joined"] == [("joined", 2)]
    assert run.kinds[-1] is Kind.DECODE
    assert first.kinds.count(Kind.CATCH_UP) >= 1
    check(run, [job])


@pytest.mark.parametrize(("release_up_to", "released"), [(7, [7]), (None, [])])
def test_the_end_of_an_epoch_releases_what_verify_waits_for(release_up_to: int | None, released: list[int]) -> None:
    run, draft, _ = lost_run()
    run.speculation.end(release_up_to)
    assert run.speculation.active is None
    assert draft.proposed.releases == draft.prefilled.releases == released


def catching_up(num_missing: int, num_commands: int) -> CatchUp:
    """A draft that lacks as many tokens before each of so many commands; it gets near before the last one."""
    run, draft, _ = lost_run()
    found = CatchUp(run.batch, draft.draft)
    assert all(found.gets_near(num_missing) for _ in range(num_commands))
    return found


def test_verify_waits_only_for_a_draft_that_is_near() -> None:
    near, far = 2 * SIZES.chunk_tokens, 2 * SIZES.chunk_tokens + 1
    assert not catching_up(near, 8).pauses_verify
    assert catching_up(near, 9).pauses_verify
    assert not catching_up(far, 9).pauses_verify
    assert not catching_up(far, 256).gets_near(far)


def test_a_draft_that_was_near_once_and_lacks_less_each_time_gains() -> None:
    found = catching_up(1, 1)
    for missing in range(60, 10, -1):
        found.gets_near(missing)
    assert not found.pauses_verify
    for _ in range(7):
        found.gets_near(11)
    assert not found.pauses_verify
    found.gets_near(11)
    assert found.pauses_verify


def begun_run(seed: int) -> DraftedRun:
    """A run of one sequence: its first drafted step fills its two pages, and brings one token more, if all is right."""
    run = DraftedRun(replace(SIZES, run_ahead=0), random.Random(seed))
    run.offer(FakeDraft(2, 3))
    run.jobs.add(make_job("job", (1, 2, 3, 4), 60))
    while not run.kinds or run.kinds[-1] is not Kind.DECODE:
        run.turn()
    return run


@pytest.mark.parametrize("pauses_verify", [False, True])
def test_a_token_that_has_no_page_yet_is_brought_with_its_page(pauses_verify: bool) -> None:
    runs = (begun_run(seed) for seed in range(200))
    run = next(run for run in runs if run.batch.begun()[0][1] == 2 * SIZES.page_tokens + 1)
    [(sequence, num_known)] = run.batch.begun()
    assert len(sequence.pages) == 2
    draft = FakeDraft(3, 3)
    found = CatchUp(run.batch, draft.draft)
    # Verify's steps are empty then, and bring no pages.
    found.pauses_verify = pauses_verify
    found.bring(10)
    draft.work()
    slot = draft.slots[sequence.lease.slot]
    assert len(slot.tokens) == num_known - (not pauses_verify)
    assert run.batch.is_decoding(), "and what decodes gets its pages"
    assert found.bring(11) is not pauses_verify
    draft.work()
    assert slot.pages == tuple(sequence.pages)
    assert tuple(slot.tokens) == run.batch.committed.read(sequence.lease.slot, 0, num_known)


def test_an_offer_waits_until_the_draft_that_is_stashed_for_has_joined() -> None:
    run, _, job = lost_run()
    run.offer(FakeDraft(3, 2))
    while run.kinds[-1] is not Kind.PLAIN:
        run.turn()
    run.offer(FakeDraft(4, 2))
    run.finish()
    assert [number for event, number in run.listener.events if event == "joined"] == [2, 3, 4]
    check(run, [job])
