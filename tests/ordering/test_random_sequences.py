"""The plan over long random sequences of steps on many slots."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from slipstream.scheduler.records import DraftTraits
from tests.harness.sampling import examples
from tests.ordering.accesses import Command
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


def draw_step(data: st.DataObject, last: int, ready: int, stashed: int) -> tuple[Command, int]:
    """A valid step after `last`, and the slots that are ready after it. `stashed`: those that draft can have."""
    draw = data.draw
    prompts = draw(st.integers(0, ALL_SLOTS)) if draw(st.booleans()) else 0
    rows = ready & ~prompts & draw(st.integers(0, ALL_SLOTS))
    kept = rows & stashed & draw(st.sampled_from((0, ALL_SLOTS)) | st.integers(0, ALL_SLOTS))
    is_drafted = bool(kept) and draw(st.booleans())
    after = ready & ~prompts | prompts & draw(st.integers(0, ALL_SLOTS))
    masked = (rows | prompts & after) & draw(st.sampled_from((0, ALL_SLOTS)) | st.integers(0, ALL_SLOTS))
    return Command(last + 1, rows, prompts, kept, is_drafted, masked), after


@seed(RANDOM_SEED)
@settings(max_examples=examples(150), deadline=None, print_blob=True)
@given(st.data(), st.integers(1, 4), st.sampled_from(DRAFTS))
def test_nothing_collides_and_no_wait_is_needless(data: st.DataObject, run_ahead: int, draft: DraftTraits) -> None:
    draw = data.draw
    model = Model(draft, run_ahead)
    ready = 0
    for _ in range(draw(st.integers(1, NUM_STEPS))):
        if draw(st.integers(0, 9)) == 9:
            model.change_draft(draw(st.sampled_from(DRAFTS)))
        if draw(st.integers(0, 9)) == 9:
            model.change_grammar()
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
