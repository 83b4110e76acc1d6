"""The table of `scheduler/plan.py` against the plan that is derived from the declared accesses."""

from __future__ import annotations

import random

import pytest

from slipstream.common.errors import OrderingError
from slipstream.scheduler import plan
from slipstream.scheduler.records import DraftTraits
from tests.ordering import derivation
from tests.ordering.accesses import Command
from tests.ordering.model import plan_all
from tests.ordering.sequences import num_consumable

DRAFTS = (DraftTraits(is_present=False), DraftTraits(is_present=True), DraftTraits(is_present=True, reads_hidden=True))
STEPS_PER_RUN = 60


class Both:
    """The table and the derivation side by side: what one does the other does, refusals included."""

    def __init__(self, draft: DraftTraits, run_ahead: int) -> None:
        self.table = plan.initial_state(draft, run_ahead)
        self.derived = derivation.initial_state(draft, run_ahead)
        self.unconsumed: list[int] = []

    def plan(self, command: Command) -> None:
        *planned, self.table = plan_all(self.table, command)
        *derived, self.derived = derivation.plan_step(self.derived, command)
        assert planned == derived, f"{command}: the table has {planned}, derived is {derived}"
        self.unconsumed.append(command.step)

    def refuse(self, command: Command) -> None:
        with pytest.raises(OrderingError):
            plan_all(self.table, command)
        with pytest.raises(OrderingError):
            derivation.plan_step(self.derived, command)

    def change_grammar(self) -> None:
        self.derived = derivation.with_grammar(self.derived)

    def consume(self) -> None:
        step = self.unconsumed.pop(0)
        self.table, self.derived = plan.consume(self.table, step), derivation.consume(self.derived, step)

    def refuse_consumption(self, step: int) -> None:
        with pytest.raises(OrderingError):
            plan.consume(self.table, step)
        with pytest.raises(OrderingError):
            derivation.consume(self.derived, step)

    def change_draft(self, draft: DraftTraits) -> None:
        self.table = plan.with_draft(self.table, draft)
        self.derived = derivation.with_draft(self.derived, draft)


def compare(randomness: random.Random, draft: DraftTraits, run_ahead: int, num_slots: int) -> None:
    """One run of random valid steps, consumed at random allowed places, in which drafts come and go."""
    both, ready, all_slots = Both(draft, run_ahead), 0, (1 << num_slots) - 1
    for _ in range(STEPS_PER_RUN):
        if randomness.random() < 0.1:
            both.change_draft(randomness.choice(DRAFTS))
        if randomness.random() < 0.05:
            both.change_grammar()
        table = both.table
        command, ready = random_step(randomness, table.step, ready, all_slots, stashed=table.stashed)
        fewest, *more = num_consumable(command.step, table.consumed, both.unconsumed, run_ahead)
        for num_consumed in range(randomness.choice((fewest, fewest, *more))):
            if num_consumed < fewest:
                both.refuse(command)
            both.consume()
        if not both.table.draft.is_present or all_slots & ~both.table.stashed:
            both.refuse(Command(both.table.step + 1, all_slots, kept=all_slots))
        both.refuse(command._replace(step=command.step + randomness.choice((-1, 1))))
        both.plan(command)
        both.refuse_consumption(randomness.choice((both.table.consumed, command.step + 1, command.step + 2)))


def random_step(
    randomness: random.Random, last: int, ready: int, all_slots: int, *, stashed: int
) -> tuple[Command, int]:
    """A valid step after `last`, and the slots that are ready to decode after it."""
    prompts = randomness.randint(0, all_slots) if randomness.random() < 0.4 else 0
    rows = ready & ~prompts & randomness.randint(0, all_slots)
    kept = rows & stashed & randomness.choice((0, all_slots, all_slots, randomness.randint(0, all_slots)))
    is_drafted = bool(kept) and randomness.random() < 0.6
    after = ready & ~prompts | prompts & randomness.randint(0, all_slots)
    masked = (rows | prompts & after) & randomness.choice((0, all_slots, randomness.randint(0, all_slots)))
    return Command(last + 1, rows, prompts, kept, is_drafted, masked), after


@pytest.mark.parametrize("num_runs", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("run_ahead", range(1, 5))
@pytest.mark.parametrize("draft", DRAFTS, ids=["no draft", "language model", "head"])
def test_both_order_every_step_alike(draft: DraftTraits, run_ahead: int, num_runs: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    randomness = random.Random(seed)
    for _ in range(num_runs):
        for num_slots in range(1, 6):
            compare(randomness, draft, run_ahead, num_slots)
