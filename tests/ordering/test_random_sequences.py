"""The plan over random sequences of steps, long ones on many slots, in which drafts and grammar workers come and go."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from slipstream.common.errors import OrderingError
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.plan import consume
from slipstream.scheduler.records import DraftTraits
from tests.harness.sampling import examples
from tests.ordering.accesses import Command
from tests.ordering.model import Model, plan_all
from tests.ordering.plan_checker import needless_waits
from tests.ordering.sequences import num_consumable

NUM_SLOTS = 8
STEPS_PER_RUN = 60
DRAFTS = (DraftTraits(is_present=False), DraftTraits(is_present=True), DraftTraits(is_present=True, reads_hidden=True))
RANDOM_SEED = random.randrange(2**32)


@pytest.fixture(autouse=True)
def print_seed() -> None:
    print(f"@seed({RANDOM_SEED})")


def check(randomness: random.Random, draft: DraftTraits, run_ahead: int, num_slots: int, num_steps: int) -> None:
    """One run of random valid steps, consumed at random allowed places: nothing collides, and no wait is needless.

    Nor does a wait stand earlier in a command than it has to.
    """
    model, ready, stashed, all_slots = Model(draft, run_ahead), 0, 0, (1 << num_slots) - 1
    for _ in range(num_steps):
        if randomness.random() < 0.1:
            model.change_draft(randomness.choice(DRAFTS))
            stashed = 0
        if randomness.random() < 0.1:
            model.change_grammar()
        has_draft = model.state.draft.is_present
        command, ready = random_step(randomness, model.state.step, ready, all_slots, stashed=stashed)
        fewest, *more = num_consumable(command.step, model.state.consumed, model.unconsumed, run_ahead)
        for num_consumed in range(randomness.choice((fewest, fewest, *more))):
            if num_consumed < fewest:
                refuse(model, command)
            model.consume()
        if all_slots & ~stashed:
            refuse(model, Command(model.state.step + 1, all_slots, kept=all_slots))
        refuse(model, command._replace(step=command.step + randomness.choice((-1, 1))))
        before = model.copy()
        planned = model.send(command)
        assert not model.problems, f"{model.problems[0]}: {command}, {planned}"
        assert [signal.fence for signal in planned[1].signals] == signals_of_verify(command, has_draft=has_draft)
        assert not needless_waits(before.checker, model.operations(command.step).send_lanes), f"{command}: {planned}"
        assert not before.early_waits(command), f"{command}: {planned}"
        stashed |= (command.rows | command.prompts) * has_draft
        with pytest.raises(OrderingError):
            consume(model.state, randomness.choice((model.state.consumed, command.step + 1, command.step + 2)))
    while model.has_unconsumed:
        model.consume()
    assert not model.problems


def refuse(model: Model, command: Command) -> None:
    """The step cannot be ordered now."""
    with pytest.raises(OrderingError):
        plan_all(model.state, command)


def signals_of_verify(command: Command, *, has_draft: bool) -> list[FenceName]:
    """The fences that it signals, in this order."""
    copied, stash = [FenceName.VERIFY_COPIED] * command.copies, [FenceName.VERIFY_STASH] * has_draft
    return [*copied, FenceName.VERIFY_PUBLISH, *stash]


def random_step(
    randomness: random.Random, last: int, ready: int, all_slots: int, *, stashed: int
) -> tuple[Command, int]:
    """A valid step after `last`, and the slots that are ready after it. `stashed`: those that draft can have."""
    prompts = randomness.randint(0, all_slots) if randomness.random() < 0.4 else 0
    rows = ready & ~prompts & randomness.randint(0, all_slots)
    kept = rows & stashed & randomness.choice((0, all_slots, all_slots, randomness.randint(0, all_slots)))
    is_drafted = bool(kept) and randomness.random() < 0.6
    after = ready & ~prompts | prompts & randomness.randint(0, all_slots)
    masked = (rows | prompts & after) & randomness.choice((0, all_slots, randomness.randint(0, all_slots)))
    return Command(last + 1, rows, prompts, kept, is_drafted, masked), after


@seed(RANDOM_SEED)
@settings(max_examples=examples(150), deadline=None, print_blob=True)
@given(st.randoms(use_true_random=False), st.integers(1, 30), st.integers(1, 4), st.sampled_from(DRAFTS))
def test_nothing_collides_and_no_wait_is_needless(
    randomness: random.Random, num_steps: int, run_ahead: int, draft: DraftTraits
) -> None:
    check(randomness, draft, run_ahead, NUM_SLOTS, num_steps)


@pytest.mark.parametrize("num_runs", [1, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("run_ahead", range(1, 5))
@pytest.mark.parametrize("draft", DRAFTS, ids=["no draft", "language model", "head"])
def test_long_runs_on_few_slots(draft: DraftTraits, run_ahead: int, num_runs: int) -> None:
    randomness = random.Random(RANDOM_SEED)
    for _ in range(num_runs):
        for num_slots in range(1, 6):
            check(randomness, draft, run_ahead, num_slots, STEPS_PER_RUN)
