"""The plan over long random sequences of steps on many slots."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from slipstream.common.worker.step import StepKind
from slipstream.scheduler.records import DraftTraits, OrderedStep
from tests.ordering.model import Model
from tests.ordering.plan_checker import needless_waits
from tests.ordering.sequences import num_consumable

NUM_SLOTS = 8
NUM_STEPS = 30
ALL_SLOTS = (1 << NUM_SLOTS) - 1
DRAFTS = (DraftTraits(is_present=False), DraftTraits(is_present=True), DraftTraits(is_present=True, reads_hidden=True))
RANDOM_SEED = random.randrange(2**32)


@pytest.fixture(autouse=True)
def print_seed() -> None:
    print(f"@seed({RANDOM_SEED})")


def draw_step(data: st.DataObject, last: int, ready: int, drafted: int) -> tuple[OrderedStep, int]:
    """A valid step behind `last`, and the slots that are ready after it. `drafted`: those that draft can draft for."""
    step = last + 1
    draw = data.draw
    rows = draw(st.integers(0, ALL_SLOTS))
    kind = draw(st.sampled_from((StepKind.DECODE, StepKind.DECODE, StepKind.PREFILL, StepKind.PLAIN)))
    if kind is StepKind.PREFILL and rows:
        after = ready & ~rows | rows & draw(st.integers(0, ALL_SLOTS))
        beside = drafted & ready & ~rows & draw(st.integers(0, ALL_SLOTS))
        return OrderedStep(step + 1, StepKind.DECODE, beside, rows) if beside else OrderedStep(step, kind, rows), after
    rows &= ready
    if kind is StepKind.DECODE and rows & drafted:
        return OrderedStep(step, kind, rows & drafted), ready
    return OrderedStep(step, StepKind.PLAIN, rows), ready


@seed(RANDOM_SEED)
@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.data(), st.integers(1, 4), st.sampled_from(DRAFTS))
def test_nothing_collides_and_no_wait_is_needless(data: st.DataObject, run_ahead: int, draft: DraftTraits) -> None:
    draw = data.draw
    model = Model(draft, run_ahead)
    ready = 0
    for _ in range(draw(st.integers(1, NUM_STEPS))):
        if draw(st.integers(0, 9)) == 9:
            model.change_draft(draw(st.sampled_from(DRAFTS)))
        command, ready = draw_step(data, model.state.step, ready, model.state.stashed)
        state = model.state
        for _ in range(
            draw(st.sampled_from(num_consumable(command.step, state.consumed, model.unconsumed, run_ahead)))
        ):
            model.consume()
        before = model.copy()
        planned = model.send(command)
        note(f"{command}: {planned}")
        assert not model.problems
        assert not needless_waits(before.checker, model.operations(command.step).send_lanes)
    while model.has_unconsumed:
        model.consume()
    assert not model.problems
