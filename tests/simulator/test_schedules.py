"""Schedules of the simulator: 100 of the first 300 in the quick tests, 10,300 in all tests."""

from __future__ import annotations

import random

import pytest

from tests.harness.sampling import examples
from tests.simulator.faults import Fault, Faults
from tests.simulator.planted_bugs import BUGS, PlantedBug
from tests.simulator.schedule import Schedule, run_schedule
from tests.simulator.world import START_S, SimulationError

QUICK, QUICK_AT_ONCE = 300, 50
ALL, AT_ONCE = 10_000, 250
MOST = 1000
"""Schedules that a planted bug may survive."""
RARE = ("an output sent before its commit", "a release that is not repeated", "a draft beyond its context")
"""Planted bugs that survive dozens, or hundreds: what they need happens in few schedules."""
RARE_TIMEOUT_S = 900


def run_all(first: int, count: int) -> None:
    """Runs schedules; the first that fails says its seed."""
    results = [run_schedule(seed) for seed in range(first, first + count)]
    assert sum(result.num_faults for result in results) > count / 2, "most schedules have faults"
    assert sum(result.num_tokens for result in results) > 5 * count, "and clients get tokens"
    assert sum(result.num_moves for result in results) > count / 2, "some of them at another server"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, QUICK, QUICK_AT_ONCE))
def test_some_schedules(first: int) -> None:
    """Whatever goes wrong, every job ends with the reference's tokens, and everything is given back."""
    run_all(first, QUICK_AT_ONCE)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, QUICK + ALL, AT_ONCE))
def test_many_schedules(first: int) -> None:
    """The same for many more."""
    run_all(first, AT_ONCE)


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same events, another one gives others."""
    results = [run_schedule(seed) for seed in (7, 7, 8)]
    assert results[0] == results[1]
    assert results[0].digest != results[2].digest


def test_a_clock_that_steps_changes_no_event() -> None:
    """Forward or back, by minutes or a day, between any two events: all that happens is the same as without it."""
    num_compared, num_seeds = 0, examples(QUICK // 6, sampled=25)
    for seed in range(num_seeds):
        schedule, other = Schedule(seed), Schedule(seed)
        kinds = {fault.kind for fault in schedule.faults.faults}
        if "step" in kinds and "boot" not in kinds:
            other.world.keeps_clocks = True
            assert schedule.run() == other.run()
            num_compared += 1
    assert num_compared > num_seeds / 6


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug, id=bug.name, marks=[pytest.mark.slow, pytest.mark.timeout(RARE_TIMEOUT_S)] if bug.name in RARE else []
        )
        for bug in BUGS
    ],
)
def test_planted_bugs_are_found(bug: PlantedBug) -> None:
    """A bug makes a schedule fail, which says its seed; with that seed it fails again in the same way, and passes
    without the bug.
    """
    found = bug.find(range(MOST))
    assert found is not None, "no schedule has found it"
    number, seed, verdict = found
    print(f"{bug.name}: found after {number} schedules")
    assert verdict.startswith(f"seed {seed}: ")
    assert bug.find([seed]) == (1, seed, verdict)
    run_schedule(seed)


def test_a_run_leaves_nothing_behind() -> None:
    """The modules under test have their own clock and threads again, also after a failure."""
    from slipstream.gateway import journal
    from slipstream.scheduler import loop

    before = journal.threading, loop.time
    schedule = Schedule(3)
    schedule.world.at(0.01, schedule.world.fail, "on purpose")
    with pytest.raises(SimulationError, match="seed 3: on purpose"):
        schedule.run()
    assert (journal.threading, loop.time) == before


def test_a_draft_may_be_swapped_while_an_epoch_opens() -> None:
    """Serving begins without a delay, at whichever point of the opening the swap comes."""
    seed = next(seed for seed in range(QUICK) if Schedule(seed).num_swaps)
    events = random.sample(range(20, 60), examples(40, sampled=12))
    print(f"events {events}")
    for event in events:
        schedule = Schedule(seed)
        schedule.faults = Faults([Fault(event, "swap", "other-draft", 0.0)])
        schedule.run()
        assert schedule.world.now < START_S + 10
