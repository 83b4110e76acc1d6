"""Tests of when the loop looks for a result: by verify's stamps, once a step, whatever the loop itself was late."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.common.device.interface import ANY_TIME
from slipstream.common.wire.step import FenceOps, PrefillChunk
from slipstream.scheduler.observer import SentStep
from slipstream.scheduler.records import SlotLease, Step, StepSlots
from slipstream.scheduler.result_poller import (
    CPU_LEAD_S,
    EARLY_S,
    GAP_STEPS,
    GPU_LEAD_S,
    LAST_STEPS,
    LATE_PART,
    UNSURE_PART,
    ResultPoller,
)

OFFSET_NS = -7 * 10**18
"""From the device's clock to the host's."""
SIGHT_NS = 30_000
"""From a stamp to a look in time."""


def step_of(number: int, num_slots: int = 4, num_prompt_tokens: int = 0) -> Step:
    """A plain step."""
    slots = StepSlots.of([SlotLease(slot, 1) for slot in range(1, num_slots + 1)])
    chunk = PrefillChunk(slot=9, start=0, tokens=(1,) * num_prompt_tokens, is_last=True)
    chunks = (chunk,) if num_prompt_tokens else ()
    return Step(
        number=number,
        decoded=slots,
        yielding=slots,
        most_more=np.ones(num_slots, np.int32),
        chunks=chunks,
        num_prompt_tokens=num_prompt_tokens,
    )


def sent_step(step: Step, sent_ns: int) -> SentStep:
    """The same, sent at this time."""
    return SentStep(step, None, None, FenceOps(), None, decided_ns=sent_ns, sent_ns=sent_ns)


class Run:
    """Steps one behind the other, each sent while the one before is under way."""

    def __init__(self, lead_s: float = CPU_LEAD_S) -> None:
        self.ends_ns: dict[int, int] = {0: 0}
        """By step, of the device."""
        self.poller = ResultPoller(lambda number: self.ends_ns.get(number, 0), lead_s)
        self.number = 0
        self.hold_s = 0.0
        """Of the last step, when it was sent."""
        self.end_ns = 10**9
        """When the last step ended, by the host's clock."""
        self.arrived_ns = self.end_ns
        self.late_ns: list[int] = []
        """For each step, how late its result was seen."""
        self.looks: list[tuple[float, float]] = []
        """For each step, seconds from its end to the first look, and the time that it was said to take usually."""

    def do(
        self, length_ns: int, late_ns: int | None = 0, *, num_prompt_tokens: int = 0, has_stamp: bool = True
    ) -> None:
        """A step of this length, whose result is seen late. None: when it is looked for, and then polled."""
        sent = self.send(self.arrived_ns - 1, num_prompt_tokens=num_prompt_tokens)
        self.hold_s = self.poller.hold_s
        poll_time = self.poller.poll_time(sent, self.arrived_ns)
        self.end_ns += length_ns
        self.looks.append((poll_time.first_s - self.end_ns / 1e9, poll_time.usual_s))
        if late_ns is None:
            late_ns = round(1e9 * self.looks[-1][0]) - SIGHT_NS
            late_ns = late_ns if late_ns >= 0 else min(1_000_000, length_ns // 30)
        self.late_ns.append(late_ns)
        before_ns, self.arrived_ns = self.arrived_ns, self.end_ns + SIGHT_NS + late_ns
        sent.arrived_ns = self.arrived_ns
        self.poller.arrived(sent, before_ns)
        if has_stamp:
            self.ends_ns[self.number] = self.end_ns - OFFSET_NS

    def send(self, sent_ns: int, *, num_slots: int = 4, num_prompt_tokens: int = 0) -> SentStep:
        """The next step is under way."""
        self.number += 1
        step = step_of(self.number, num_slots, num_prompt_tokens)
        self.poller.sent(step)
        return sent_step(step, sent_ns)


@pytest.mark.parametrize("length_ns", [800_000, 12_000_000, 40_000_000])
def test_looks_that_are_late_by_plan_do_not_add_up(length_ns: int) -> None:
    rng, run = random.Random(5), Run()
    for _ in range(2000):
        run.do(length_ns + rng.randrange(length_ns // 2000), late_ns=None)
    assert max(run.late_ns[100:]) <= max(50_000, 0.035 * length_ns)
    if length_ns > 10**7:
        assert sum(first_s < SIGHT_NS / 1e9 for first_s, _ in run.looks) < 0.3 * len(run.looks)


@pytest.mark.parametrize("length_ns", [800_000, 12_000_000])
def test_late_looks_do_not_make_the_next_ones_late(length_ns: int) -> None:
    rng, run = random.Random(4), Run()
    for _ in range(60):
        run.do(length_ns, late_ns=rng.choice([0, 10_000, length_ns // 30]))
    for late_s, usual_s in run.looks[40:]:
        assert usual_s == pytest.approx(length_ns / 1e9)
        assert late_s - SIGHT_NS / 1e9 + EARLY_S == pytest.approx(LATE_PART * usual_s, abs=2e-6) or (
            late_s - SIGHT_NS / 1e9 + EARLY_S == pytest.approx(-UNSURE_PART * usual_s, abs=2e-6)
        )


def test_one_step_that_took_long_says_nothing_of_the_next() -> None:
    run = Run()
    for number in range(60):
        run.do(90_000_000 if number == 50 else 12_000_000)
    assert [round(usual_s, 6) for _, usual_s in run.looks[45:]] == [0.012] * 15


def test_steps_that_take_less_are_believed_at_once() -> None:
    run = Run()
    for number in range(60):
        run.do(40_000_000 if number < 50 else 12_000_000)
    assert [round(usual_s, 6) for _, usual_s in run.looks[51:]] == [0.012] * 9


def test_without_a_stamp_the_end_is_guessed_from_gaps_and_looked_for_early() -> None:
    run = Run()
    for number in range(60):
        run.do(12_000_000, has_stamp=number < 50)
    late_s, usual_s = run.looks[-1]
    assert late_s == pytest.approx(SIGHT_NS / 1e9 - UNSURE_PART * usual_s, abs=2e-6)


def test_steps_with_prompts_are_looked_for_by_the_shortest() -> None:
    """How long they take differs within a size."""
    run = Run()
    for number in range(40):
        run.do(12_000_000 + 1_000_000 * (number % 2), num_prompt_tokens=1000)
    assert run.looks[-1][1] == pytest.approx(0.012)


def test_nothing_is_known_of_a_new_size() -> None:
    run = Run()
    run.do(12_000_000)
    assert run.poller.poll_time(run.send(0, num_slots=20), run.arrived_ns) == ANY_TIME


def test_a_step_that_was_sent_late_is_looked_for_from_its_sending() -> None:
    run = Run()
    for _ in range(20):
        run.do(12_000_000)
    sent_ns = run.arrived_ns + 5_000_000
    poll_time = run.poller.poll_time(run.send(sent_ns), run.arrived_ns)
    assert poll_time.first_s == pytest.approx(sent_ns / 1e9 + 0.012 * (1 - UNSURE_PART), abs=2e-6)


def test_the_next_step_is_held_back_by_the_shortest_of_many() -> None:
    run = Run()
    for number in range(GAP_STEPS):
        run.do(40_000_000 + 1_000_000 * number)
        assert run.hold_s == 0
    run.send(0)
    assert run.poller.hold_s == pytest.approx(0.75 * 0.040, rel=0.01)
    assert LAST_STEPS < GAP_STEPS


@pytest.mark.parametrize("lead_s", [GPU_LEAD_S, CPU_LEAD_S])
def test_commands_of_a_short_step_have_the_lead_at_least(lead_s: float) -> None:
    run = Run(lead_s)
    for _ in range(GAP_STEPS):
        run.do(8_000_000)
    run.send(0)
    assert run.poller.hold_s == pytest.approx(0.008 - lead_s, abs=1e-4)
