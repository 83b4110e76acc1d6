"""The plan, row by row of its table, its errors, and what it costs."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from slipstream.common.errors import OrderingError
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, WaitPlace
from slipstream.scheduler.plan import PlanState, catch_up, consume, initial_state, plan_step, with_draft
from slipstream.scheduler.records import DraftTraits, mask_of

NO_DRAFT = DraftTraits(is_present=False)
LANGUAGE_MODEL = DraftTraits(is_present=True)
HEAD = DraftTraits(is_present=True, reads_hidden=True)

PROPOSED, PREFILLED = FenceName.DRAFT_PROPOSED, FenceName.DRAFT_PREFILLED
PUBLISH, STASH = FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH
HIDDEN, SAMPLING = WaitPlace.PREFILL_HIDDEN, WaitPlace.SAMPLING
A, B, C = 1, 2, 3
LIMIT_US = 40.0
"""Several times what a step takes, for a machine that is busy with something else."""


class Planned(NamedTuple):
    """Waits and signals of a step's commands."""

    draft: FenceOps | None
    verify: FenceOps


@dataclass
class Epoch:
    """Plans one step after the other. By default nothing is consumed, and nothing has to be."""

    state: PlanState

    @classmethod
    def begin(cls, draft: DraftTraits, *, run_ahead: int = 20) -> Epoch:
        return cls(initial_state(draft, run_ahead))

    def prefill(self, *slots: int) -> Planned:
        return self.step(prompts=slots)

    def decode(self, *slots: int) -> Planned:
        return self.step(slots, slots, is_drafted=True)

    def plain(self, *slots: int) -> Planned:
        return self.step(slots)

    def consume(self) -> None:
        self.state = consume(self.state, self.state.consumed + 1)

    def step(
        self,
        rows: tuple[int, ...] = (),
        kept: tuple[int, ...] = (),
        prompts: tuple[int, ...] = (),
        *,
        is_drafted: bool = False,
    ) -> Planned:
        masks = mask_of(rows), mask_of(prompts), mask_of(kept)
        draft, verify, self.state = plan_step(self.state, self.state.step + 1, *masks, is_drafted=is_drafted)
        return Planned(draft, verify)


def waits(ops: FenceOps | None) -> dict[FenceName, int]:
    """The waits at the start, which all are."""
    assert ops is not None
    assert all(wait.place is WaitPlace.START for wait in ops.waits)
    return {wait.fence: wait.value for wait in ops.waits}


def drafts(draft: DraftTraits) -> Epoch:
    """Slots A and B are prefilled in steps 1 and 2."""
    epoch = Epoch.begin(draft)
    epoch.prefill(A)
    epoch.prefill(B)
    return epoch


@pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD, NO_DRAFT])
def test_every_command_signals_its_own_step(draft: DraftTraits) -> None:
    epoch = Epoch.begin(draft)
    steps = [epoch.prefill(A), epoch.plain(A), epoch.plain()]
    if draft.is_present:
        steps += [epoch.decode(A), epoch.step((A,), (A,)), epoch.step((A,), (A,), (B,), is_drafted=True)]
    for step, planned in enumerate(steps, start=1):
        stash = (FencePoint(STASH, step),) if draft.is_present else ()
        assert planned.verify.signals == (FencePoint(PUBLISH, step), *stash)
    of_draft = [() if draft is None else tuple(point.fence for point in draft.signals) for draft, _ in steps]
    if draft.is_present:
        assert of_draft == [(PREFILLED,), (), (), (PROPOSED,), (PROPOSED,), (PROPOSED, PREFILLED)]
        assert {point.value for planned in steps[-1:] for point in planned.draft.signals} == {len(steps)}
    else:
        assert of_draft == [(), (), ()]


class TestDecode:
    def test_waits_for_the_last_stash_of_its_slots_and_for_its_own_draft(self) -> None:
        planned = drafts(LANGUAGE_MODEL).decode(A)
        assert waits(planned.draft) == {STASH: 1}, "step 2 was not about this slot"
        assert waits(planned.verify) == {PROPOSED: 3}

    def test_the_latest_of_its_slots_counts(self) -> None:
        assert waits(drafts(LANGUAGE_MODEL).decode(A, B).draft) == {STASH: 2}

    def test_steady(self) -> None:
        epoch = Epoch.begin(HEAD, run_ahead=1)
        epoch.prefill(A, B)
        for step in range(2, 40):
            if step > 2:
                epoch.consume()
            planned = epoch.decode(A, B)
            # Draft knows the stash of step 1 from its own prefill.
            assert waits(planned.draft) == ({STASH: step - 1} if step > 2 else {})
            assert waits(planned.verify) == {PROPOSED: step}

    def test_a_stash_of_a_plain_step_counts(self) -> None:
        epoch = drafts(LANGUAGE_MODEL)
        epoch.plain(A)
        epoch.plain(B)
        assert waits(epoch.decode(A).draft) == {STASH: 3}

    def test_leaves_out_what_draft_knows_from_an_earlier_wait(self) -> None:
        epoch = drafts(LANGUAGE_MODEL)
        epoch.decode(B)  # waits for step 2
        assert waits(epoch.decode(A).draft) == {}, "step 1 came before step 2"

    def test_leaves_out_what_draft_knows_from_its_own_prefill(self) -> None:
        assert waits(drafts(HEAD).decode(A, B).draft) == {}

    def test_leaves_out_what_the_scheduler_knew_when_it_sent_the_command(self) -> None:
        epoch = drafts(LANGUAGE_MODEL)
        epoch.consume()
        assert waits(epoch.decode(A).draft) == {STASH: 1}, "the publish of step 1 comes before its stash"
        epoch = drafts(LANGUAGE_MODEL)
        epoch.consume()
        epoch.consume()
        assert waits(epoch.decode(A).draft) == {}, "the publish of step 2 comes after the stash of step 1"


class TestPrefillForHiddenStates:
    def test_the_first_one(self) -> None:
        planned = Epoch.begin(HEAD).prefill(A)
        assert planned.draft.waits == (FenceWait(STASH, 1, HIDDEN),)
        assert planned.verify.waits == ()

    def test_verify_waits_for_the_last_reader_of_the_one_buffer_whatever_its_slot(self) -> None:
        planned = drafts(HEAD).prefill(C)
        assert planned.verify.waits == (FenceWait(PREFILLED, 2, HIDDEN),)
        assert planned.draft.waits == (FenceWait(STASH, 3, HIDDEN),)

    def test_last_is_the_last_step_that_took_in_prompts(self) -> None:
        epoch = drafts(HEAD)
        epoch.plain(A)
        epoch.plain(A, B)
        assert epoch.prefill(C).verify.waits == (FenceWait(PREFILLED, 2, HIDDEN),)

    def test_leaves_out_the_reader_that_a_decode_step_has_waited_for(self) -> None:
        epoch = drafts(HEAD)
        epoch.decode(A)
        assert waits(epoch.prefill(C).verify) == {}

    def test_a_publish_that_is_consumed_says_nothing_of_draft(self) -> None:
        epoch = drafts(HEAD)
        epoch.consume()
        epoch.consume()
        assert epoch.prefill(C).verify.waits == (FenceWait(PREFILLED, 2, HIDDEN),)


class TestWithPrompts:
    """Steps that decode and take in prompts."""

    def test_with_draft_tokens_verify_knows_all_before_from_its_wait_at_the_start(self) -> None:
        planned = drafts(HEAD).step((A,), (A,), (C,), is_drafted=True)
        assert planned.verify.waits == (FenceWait(PROPOSED, 3),)
        assert planned.draft.waits == (FenceWait(STASH, 3, HIDDEN),), "the stash of step 1 is known since step 2"

    def test_the_chunks_of_the_step_itself_are_read_later(self) -> None:
        epoch = drafts(HEAD)
        epoch.step((A,), (A,), (C,), is_drafted=True)
        assert epoch.prefill(C).verify.waits == (FenceWait(PREFILLED, 3, HIDDEN),)

    def test_draft_waits_for_each_part_at_its_place(self) -> None:
        epoch = drafts(HEAD)
        epoch.decode(A)
        planned = epoch.step((A,), (A,), (C,), is_drafted=True)
        assert planned.draft.waits == (FenceWait(STASH, 3), FenceWait(STASH, 4, HIDDEN))
        assert planned.draft.signals == (FencePoint(PROPOSED, 4), FencePoint(PREFILLED, 4))

    def test_of_a_language_model(self) -> None:
        planned = drafts(LANGUAGE_MODEL).step((A,), (A,), (C,), is_drafted=True)
        assert waits(planned.draft) == {STASH: 1}
        assert waits(planned.verify) == {PROPOSED: 3}

    def test_without_draft_tokens_verify_runs_its_forward_first(self) -> None:
        planned = drafts(HEAD).step((A,), (A,), (C,))
        assert planned.verify.waits == (FenceWait(PREFILLED, 2, HIDDEN), FenceWait(PROPOSED, 3, SAMPLING))

    def test_that_draft_has_no_part_in_but_the_chunks(self) -> None:
        planned = drafts(HEAD).step((A,), (), (C,))
        assert planned.verify.waits == (FenceWait(PREFILLED, 2, HIDDEN),)
        assert planned.draft == FenceOps((FenceWait(STASH, 3, HIDDEN),), (FencePoint(PREFILLED, 3),))


class TestRowsWithoutDraftTokens:
    """Draft takes in their stash, before verify stashes anew."""

    def test_verify_waits_before_it_samples(self) -> None:
        planned = drafts(LANGUAGE_MODEL).step((A, B), (A,))
        assert planned.verify.waits == (FenceWait(PROPOSED, 3, SAMPLING),)
        assert waits(planned.draft) == {STASH: 1}

    def test_what_verify_knows_then_counts_for_the_next_step(self) -> None:
        epoch = drafts(HEAD)
        epoch.step((A,), (A,))
        assert waits(epoch.prefill(C).verify) == {}

    def test_beside_rows_with_some_the_wait_is_at_the_start(self) -> None:
        assert waits(drafts(LANGUAGE_MODEL).step((A, B), (A, B), is_drafted=True).verify) == {PROPOSED: 3}

    def test_draft_tokens_need_a_part_for_draft(self) -> None:
        for kept in ((), (C,)):
            with pytest.raises(OrderingError, match="draft's part does not have"):
                drafts(LANGUAGE_MODEL).step((A,), kept, is_drafted=True)


def test_prefill_of_a_language_model_waits_for_nothing() -> None:
    epoch = drafts(LANGUAGE_MODEL)
    epoch.decode(A)
    planned = epoch.prefill(A)
    assert waits(planned.draft) == {}
    assert waits(planned.verify) == {}


@pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD])
def test_plain_step_waits_for_nothing(draft: DraftTraits) -> None:
    epoch = drafts(draft)
    epoch.decode(A)
    for slots in ((), (A,), (A, B)):
        planned = epoch.plain(*slots)
        assert planned.draft is None
        assert waits(planned.verify) == {}


class TestAnotherDraft:
    @pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD])
    def test_joins_behind_a_plain_step_that_stashes_for_it(self, draft: DraftTraits) -> None:
        epoch = drafts(draft)
        epoch.decode(A, B)
        epoch.state = with_draft(epoch.state, NO_DRAFT)
        epoch.plain(A, B)
        epoch.plain(A)
        epoch.state = with_draft(epoch.state, draft)
        epoch.plain(A, B)
        planned = epoch.decode(A, B)
        assert waits(planned.draft) == {STASH: 6}
        assert waits(planned.verify) == {PROPOSED: 7}

    @pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD])
    def test_drafts_for_no_slot_that_nothing_was_stashed_for(self, draft: DraftTraits) -> None:
        epoch = drafts(draft)
        epoch.state = with_draft(epoch.state, draft)
        with pytest.raises(OrderingError, match="step 3 has slots that nothing was stashed for"):
            epoch.decode(A)
        epoch.plain(A)
        with pytest.raises(OrderingError, match="step 4 has slots that nothing was stashed for"):
            epoch.decode(A, B)
        epoch.decode(A)

    def test_knows_nothing_of_what_the_one_before_it_knew(self) -> None:
        epoch = drafts(HEAD)
        epoch.decode(A)
        epoch.state = with_draft(epoch.state, HEAD)
        epoch.plain(A)
        assert waits(epoch.decode(A).draft) == {STASH: 4}

    def test_verify_does_not_wait_for_one_that_is_gone(self) -> None:
        epoch = drafts(HEAD)
        epoch.state = with_draft(epoch.state, HEAD)
        assert waits(epoch.prefill(C).verify) == {}

    def test_is_not_there_between_two(self) -> None:
        epoch = drafts(LANGUAGE_MODEL)
        epoch.state = with_draft(epoch.state, NO_DRAFT)
        with pytest.raises(OrderingError, match="there is no draft"):
            epoch.decode(A)

    def test_is_sent_tokens_that_are_known_without_a_wait(self) -> None:
        assert catch_up(7) == FenceOps((), (FencePoint(PREFILLED, 7),))


class TestSendAfterConsume:
    @pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
    def test_a_step_is_planned_once_the_step_run_ahead_and_one_before_it_is_consumed(self, run_ahead: int) -> None:
        epoch = Epoch.begin(HEAD, run_ahead=run_ahead)
        epoch.prefill(A)
        for _ in range(run_ahead):
            epoch.decode(A)
        for _ in range(10):
            before = epoch.state
            with pytest.raises(OrderingError):
                epoch.decode(A)
            assert epoch.state == before
            epoch.consume()
            epoch.decode(A)

    def test_the_error_names_the_step_that_is_not_consumed(self) -> None:
        epoch = Epoch.begin(LANGUAGE_MODEL, run_ahead=1)
        epoch.prefill(A)
        epoch.decode(A)
        expected = r"step 3 is planned before step 1 is consumed, .*; consumed so far: 0"
        with pytest.raises(OrderingError, match=expected):
            epoch.decode(A)

    def test_steps_are_consumed_once_and_in_order(self) -> None:
        state = drafts(LANGUAGE_MODEL).state
        with pytest.raises(OrderingError, match="step 2 is consumed after step 0 of 2"):
            consume(state, 2)
        state = consume(consume(state, 1), 2)
        for step in (2, 3):
            with pytest.raises(OrderingError, match=f"step {step} is consumed after step 2 of 2"):
                consume(state, step)

    def test_steps_are_planned_once_and_in_order(self) -> None:
        state = drafts(LANGUAGE_MODEL).state
        for step in (2, 4):
            with pytest.raises(OrderingError, match=f"step {step} is planned after step 2"):
                plan_step(state, step, 0)


def test_a_state_is_a_value() -> None:
    state = drafts(HEAD).state
    slots = mask_of((A, B))
    assert plan_step(state, 3, slots, 0, slots) == plan_step(state, 3, slots, 0, slots)


class TestCost:
    """The plan runs on the scheduler's loop: its cost depends neither on the slots nor on the steps so far."""

    NUM_SLOTS = 64
    RUN_AHEAD = 2

    def test_the_state_is_bounded_by_the_run_ahead(self) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        randomness = random.Random(seed)
        state = initial_state(HEAD, self.RUN_AHEAD)
        for _ in range(2000):
            rows, prompts = randomness.getrandbits(self.NUM_SLOTS), randomness.choice((0, randomness.getrandbits(9)))
            kept = rows & ~prompts & state.stashed
            state = self._advance(
                state, rows & ~prompts, prompts, kept, is_drafted=randomness.random() < 0.5 and kept > 0
            )
            assert len(state.rows) <= self.RUN_AHEAD + 2

    def test_a_step_of_64_slots_costs_little(self) -> None:
        rows = mask_of(range(self.NUM_SLOTS))
        state = self._advance(initial_state(HEAD, self.RUN_AHEAD), prompts=rows)
        costs_us = []
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(200):
                state = self._advance(state, rows, kept=rows, is_drafted=True)
            costs_us.append((time.perf_counter() - started) / 200 * 1e6)
        print(f"{min(costs_us):.1f} us a step at best, {max(costs_us):.1f} us at worst")
        assert min(costs_us) < LIMIT_US

    def _advance(
        self, state: PlanState, rows: int = 0, prompts: int = 0, kept: int = 0, *, is_drafted: bool = False
    ) -> PlanState:
        step = state.step + 1
        if step - self.RUN_AHEAD - 1 > state.consumed:
            state = consume(state, state.consumed + 1)
        return plan_step(state, step, rows, prompts, kept, is_drafted=is_drafted)[-1]
