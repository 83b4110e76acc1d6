"""The plan over every short sequence of steps: nothing collides, no stream is stuck, and no wait is needless."""

from __future__ import annotations

import random
import time
from itertools import product
from operator import attrgetter

import pytest

from slipstream.scheduler.records import DraftTraits
from tests.ordering.model import Model
from tests.ordering.plan_checker import needless_waits
from tests.ordering.sequences import Visit, Walk

pytestmark = pytest.mark.sampled_module(9)

NO_DRAFT = DraftTraits(is_present=False)
LANGUAGE_MODEL = DraftTraits(is_present=True)
HEAD = DraftTraits(is_present=True, reads_hidden=True)
NUM_SLOTS = 2

both_drafts = pytest.mark.parametrize("draft", [LANGUAGE_MODEL, HEAD], ids=["language model", "head"])
run_aheads = pytest.mark.parametrize("run_ahead", [0, 1, 2])


def check(visit: Visit) -> None:
    """Checks the last send of the sequence, and at the end the consumption of all that is left."""
    assert not visit.after.problems, explain(visit)
    lanes = visit.after.operations(visit.after.state.step).send_lanes
    needless = needless_waits(visit.before.checker, lanes)
    assert not needless, f"{needless[0]} is not needed: {visit.sends}"
    if visit.is_end:
        while visit.after.has_unconsumed:
            visit.after.consume()
        assert not visit.after.problems, explain(visit)


def explain(visit: Visit) -> str:
    return f"{visit.after.problems[0]}: {visit.sends}"


def sampled(share: float) -> tuple[float, random.Random]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return share, random.Random(seed)


def check_all(walk: Walk, model: Model, num_steps: int) -> None:
    """All sequences of the walk, or the share of them that it visits."""
    started = time.process_time()
    num_sequences = 0
    for visit in walk.visits(model, num_steps):
        if visit.is_new:
            check(visit)
        num_sequences += visit.is_end
    print(f"{num_sequences} sequences of {num_steps} steps in {time.process_time() - started:.1f} s")


@both_drafts
@run_aheads
def test_sequences_of_4_steps(draft: DraftTraits, run_ahead: int) -> None:
    check_all(Walk(NUM_SLOTS, (), *sampled(0.03)), Model(draft, run_ahead), 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@both_drafts
@run_aheads
@pytest.mark.parametrize(("num_steps", "share"), [(4, 1.0), (5, 0.005)])
def test_all_sequences(draft: DraftTraits, run_ahead: int, num_steps: int, share: float) -> None:
    """All sequences of five steps take an hour: of those a share with a seed is enough beside the random sequences."""
    check_all(Walk(NUM_SLOTS, (), *sampled(share)), Model(draft, run_ahead), num_steps)


@both_drafts
@run_aheads
@pytest.mark.parametrize("num_steps", [2, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_all_sequences_over_3_slots(draft: DraftTraits, run_ahead: int, num_steps: int) -> None:
    check_all(Walk(3), Model(draft, run_ahead), num_steps)


@pytest.mark.parametrize("draft", [NO_DRAFT, LANGUAGE_MODEL, HEAD], ids=["no draft", "language model", "head"])
@run_aheads
def test_sequences_with_constraints(draft: DraftTraits, run_ahead: int) -> None:
    check_all(Walk(NUM_SLOTS, (), *sampled(0.0002), masks=True), Model(draft, run_ahead), 3)
    check_all(Walk(1, masks=True), Model(draft, run_ahead), 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@both_drafts
@run_aheads
def test_all_sequences_with_constraints(draft: DraftTraits, run_ahead: int) -> None:
    check_all(Walk(NUM_SLOTS, masks=True), Model(draft, run_ahead), 3)


@both_drafts
@run_aheads
def test_sequences_with_a_draft_that_leaves_and_joins(draft: DraftTraits, run_ahead: int) -> None:
    check_all(Walk(NUM_SLOTS, (NO_DRAFT, draft), *sampled(0.1)), Model(NO_DRAFT, run_ahead), 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@both_drafts
@run_aheads
@pytest.mark.parametrize("num_steps", [3, 4])
def test_all_sequences_with_a_draft_that_leaves_and_joins(draft: DraftTraits, run_ahead: int, num_steps: int) -> None:
    check_all(Walk(NUM_SLOTS, drafts=(NO_DRAFT, draft)), Model(NO_DRAFT, run_ahead), num_steps)


Element = tuple[int, int, int, int, int, bool]
"""The last consumed step, and the fields of a move: rows, ready, prompts, kept and whether it is drafted."""


def may_follow(earlier: tuple[Element, ...], element: Element, run_ahead: int) -> bool:
    consumed, rows, ready, prompts, kept, is_drafted = element
    consumed_before, _, ready_before, *_ = earlier[-1] if earlier else (0, 0, 0)
    step, stashed = len(earlier) + 1, 0
    for _, rows_before, _, prompts_before, *_ in earlier:
        stashed |= rows_before | prompts_before
    if not max(consumed_before, step - run_ahead - 1) <= consumed < step:
        return False
    if rows & (~ready_before | prompts) or (ready ^ ready_before) & ~prompts:
        return False
    return kept & ~(rows & stashed) == 0 and (kept != 0 or not is_drafted)


def canonical(sequence: tuple[Element, ...]) -> tuple[Element, ...]:
    """The first of a sequence and the same one with both slots renamed."""

    def swapped(mask: int) -> int:
        return (mask & 1) << 1 | mask >> 1

    renamed = tuple((consumed, *map(swapped, masks), is_drafted) for consumed, *masks, is_drafted in sequence)
    return min(sequence, renamed)


@run_aheads
def test_the_walk_finds_every_sequence_once(run_ahead: int) -> None:
    masks = range(1 << NUM_SLOTS)
    elements = list(product(range(3), masks, masks, masks, masks, (False, True)))
    expected: set[tuple[Element, ...]] = {()}
    for _ in range(3):
        expected = {
            (*earlier, element)
            for earlier in expected
            for element in elements
            if may_follow(earlier, element, run_ahead)
        }
    fields = attrgetter("rows", "ready", "prompts", "kept", "is_drafted")
    found = [
        canonical(tuple((send.consumed, *fields(send.move)) for send in visit.sends))
        for visit in Walk(NUM_SLOTS).visits(Model(HEAD, run_ahead), 3)
        if visit.is_end
    ]
    assert len(found) == len(set(found)), "none is visited twice"
    assert set(found) == {canonical(sequence) for sequence in expected}
