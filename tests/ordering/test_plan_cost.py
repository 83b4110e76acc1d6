"""The plan runs on the scheduler's loop: its cost depends neither on the slots nor on the steps so far."""

from __future__ import annotations

import random
import time

from slipstream.common.worker.step import StepKind
from slipstream.scheduler.core.plan import OrderedStep, PlanState, consume, initial_state, mask_of, plan_step
from slipstream.scheduler.ordering.accesses import DraftTraits

NUM_SLOTS = 64
RUN_AHEAD = 2
HEAD = DraftTraits(is_present=True, reads_hidden=True)
LIMIT_US = 150.0
"""Several times what it takes, for a machine that is busy with something else."""


def advance(state: PlanState, kind: StepKind, rows: int) -> PlanState:
    step = state.step + 1
    if step - RUN_AHEAD - 1 > state.consumed:
        state = consume(state, state.consumed + 1)
    _, state = plan_step(state, OrderedStep(step, kind, rows))
    return state


def num_entries(state: PlanState) -> int:
    return sum(len(history.writes) + len(history.reads) for history in state.histories)


def test_the_history_is_bounded_by_the_run_ahead() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    randomness = random.Random(seed)
    state = advance(initial_state(HEAD, RUN_AHEAD), StepKind.PREFILL, (1 << NUM_SLOTS) - 1)
    # Each step of each group, for its writer and its reader.
    bound = 2 * len(state.histories) * (RUN_AHEAD + 2)
    for _ in range(2000):
        kind = randomness.choice(tuple(StepKind))
        state = advance(state, kind, randomness.getrandbits(NUM_SLOTS) | 1)
        assert num_entries(state) <= bound


def test_a_step_of_64_slots_costs_little() -> None:
    rows = mask_of(range(NUM_SLOTS))
    state = advance(initial_state(HEAD, RUN_AHEAD), StepKind.PREFILL, rows)
    costs_us = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(200):
            state = advance(state, StepKind.DECODE, rows)
        costs_us.append((time.perf_counter() - started) / 200 * 1e6)
    print(f"{min(costs_us):.1f} us a step at best, {max(costs_us):.1f} us at worst")
    assert min(costs_us) < LIMIT_US
