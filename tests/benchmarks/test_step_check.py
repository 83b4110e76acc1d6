"""The arithmetic of the step check: what marks come to, and when a check has failed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks.delayed_plan import DelayPlan, Late
from slipstream.benchmarks.step_check_marks import Mark, Marks, StepSums, read_marks
from slipstream.benchmarks.step_check_table import (
    CYCLES,
    DELAYS,
    blocks_of,
    clock_check,
    clock_line,
    delay_check,
    delay_lines,
    growths,
)
from slipstream.common.worker.step import StepKind
from slipstream.scheduler.telemetry.timings import DRAFT_TO_VERIFY, EDGES, VERIFY_TO_DRAFT

if TYPE_CHECKING:
    from pathlib import Path

PLAN = DelayPlan(delay_us=500.0, first_step=1001, block_steps=10, cycle=CYCLES[1])
STEP_US = {"draft": 300.0, "verify": 4500.0, VERIFY_TO_DRAFT: 5.0, DRAFT_TO_VERIFY: 4.0}
EDGE_OF = {Late.STASH: VERIFY_TO_DRAFT, Late.DONE: DRAFT_TO_VERIFY}
NUM_CLIENTS = 4


def marks_of(num_steps: int, *, shown_us: float = 500.0, stray_us: float = 0.0) -> list[Mark]:
    """Of steps in which each delay shows as `shown_us` at its edge and `stray_us` at the other."""
    totals = dict.fromkeys((*STEP_US, *EDGES), 0.0)
    marks = []
    for step in range(1, num_steps + 1):
        for name, length_us in STEP_US.items():
            # The context grows: so does verify's time.
            totals[name] += 1e-6 * (length_us + (0.5 * step if name == "verify" else 0.0))
        edge = EDGE_OF.get(PLAN.at(step))
        if edge is not None:
            totals[edge] += 1e-6 * shown_us
            totals[DRAFT_TO_VERIFY if edge == VERIFY_TO_DRAFT else VERIFY_TO_DRAFT] += 1e-6 * stray_us
        if PLAN.ends_block(step):
            wall_s = sum(totals.values())
            marks.append(
                Mark(
                    step=step,
                    taken_in_ns=10**12 + round(1e9 * wall_s),
                    num_prefills=3,
                    num_plain=0,
                    num_rows=NUM_CLIENTS * step,
                    num_timed=step,
                    step_s=wall_s,
                    busy_s={"draft": totals["draft"], "verify": totals["verify"]},
                    bubble_s={edge: totals[edge] for edge in EDGES},
                )
            )
    return marks


def test_blocks_take_turns_from_the_first_step_that_may_be_late() -> None:
    plan = DelayPlan(delay_us=500.0, first_step=4, block_steps=2, cycle=(Late.NOTHING, Late.STASH))
    kinds = [plan.at(step) for step in range(1, 10)]
    assert [step for step, kind in enumerate(kinds, start=1) if kind is Late.STASH] == [6, 7]
    assert [step for step in range(1, 10) if plan.ends_block(step)] == [1, 3, 5, 7, 9]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    assert DelayPlan.read(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize("late", [Late.STASH, Late.DONE])
def test_a_delay_grows_its_edge_alone(late: Late) -> None:
    blocks = blocks_of(marks_of(1200), PLAN, NUM_CLIENTS)
    delay = next(delay for delay in DELAYS if (delay.late, delay.is_plain) == (late, False))
    check = delay_check(blocks, delay, PLAN)
    assert check is not None
    assert check.passes
    assert check.median.bubble_us == pytest.approx(dict.fromkeys(EDGES, 0.0) | {delay.edge: 500.0}, abs=1e-3)
    # What grows steadily is no part of it.
    assert check.median.busy_us == pytest.approx({"draft": 0.0, "verify": 0.0}, abs=1e-3)
    assert check.median.step_us == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("shown_us", "stray_us", "passes"),
    [(451.0, 0.0, True), (449.0, 0.0, False), (551.0, 0.0, False), (500.0, 49.0, True), (500.0, -51.0, False)],
)
def test_a_delay_that_shows_wrongly_fails(shown_us: float, stray_us: float, passes: bool) -> None:
    blocks = blocks_of(marks_of(1200, shown_us=shown_us, stray_us=stray_us), PLAN, NUM_CLIENTS)
    check = delay_check(blocks, DELAYS[0], PLAN)
    assert check is not None
    assert check.passes is passes
    assert ("MISSED" in delay_lines([check])[1]) is not passes


def test_every_delay_has_blocks_without_it_on_both_sides() -> None:
    for delay in DELAYS:
        cycle = CYCLES[delay.run_ahead]
        places = [place for place, late in enumerate(cycle) if late is delay.late]
        assert places
        for place in places:
            assert {cycle[place - 1], cycle[(place + 1) % len(cycle)]} == {delay.base}


def test_without_a_draft_verifys_command_is_the_first() -> None:
    plan = replace(PLAN, first_step=1, cycle=CYCLES[0])
    marks = [replace(mark, num_plain=mark.step) for mark in marks_of(180)]
    blocks = blocks_of(marks, plan, NUM_CLIENTS)
    drafted, plain = (
        next(d for d in DELAYS if d.late is Late.FIRST_LATER and d.is_plain is is_plain) for is_plain in (False, True)
    )
    # Three cycles with two each, but for the very first, whose neighbour has no beginning.
    assert len(growths(blocks, plain)) == 5
    assert not growths(blocks, drafted)


def test_a_block_without_a_neighbour_is_compared_with_nothing() -> None:
    marks = marks_of(1200)
    blocks = blocks_of(marks, PLAN, NUM_CLIENTS)
    whole = len(growths(blocks, DELAYS[0]))
    gap = next(place for place, block in enumerate(blocks) if block.late is Late.STASH)
    assert len(growths([*blocks[: gap - 1], *blocks[gap:]], DELAYS[0])) == whole - 1


def test_the_clock_is_compared_over_steps_without_a_delay() -> None:
    check = clock_check(blocks_of(marks_of(1200), PLAN, NUM_CLIENTS), 1, is_plain=False, with_delays=False)
    assert check is not None
    # To the end of the first block, which begins with nothing late.
    assert check.num_steps == 1000
    assert not check.has_delays
    assert check.passes
    assert check.ratio == pytest.approx(1.0, abs=1e-6)
    assert check.busy_and_bubbles_s == pytest.approx(check.step_s)


def test_a_clock_that_differs_fails() -> None:
    marks = marks_of(1200)
    slow = [replace(mark, taken_in_ns=10**12 + round(1.011 * (mark.taken_in_ns - 10**12))) for mark in marks]
    check = clock_check(blocks_of(slow, PLAN, NUM_CLIENTS), 1, is_plain=False, with_delays=False)
    assert check is not None
    assert not check.passes
    assert "MISSED" in clock_line(check)


def test_parts_that_do_not_make_up_the_step_fail() -> None:
    marks = [replace(mark, busy_s=mark.busy_s | {"draft": 0.999 * mark.busy_s["draft"]}) for mark in marks_of(1200)]
    check = clock_check(blocks_of(marks, PLAN, NUM_CLIENTS), 1, is_plain=False, with_delays=False)
    assert check is not None
    assert not check.passes


def test_few_steps_fail() -> None:
    check = clock_check(blocks_of(marks_of(900), PLAN, NUM_CLIENTS), 1, is_plain=False, with_delays=False)
    assert check is not None
    assert check.num_steps == 890
    assert not check.passes


@pytest.mark.parametrize(
    "change",
    [{"num_prefills": 4}, {"num_rows": NUM_CLIENTS * 500 - 1}, {"num_timed": 499}, {"num_plain": 3}],
    ids=lambda change: next(iter(change)),
)
def test_a_request_that_comes_or_goes_cuts_the_stretch(change: dict[str, int]) -> None:
    marks = marks_of(1200)
    place = next(place for place, mark in enumerate(marks) if mark.step == 500)
    (field, value) = next(iter(change.items()))
    added = value - getattr(marks[place], field)
    marks[place:] = [replace(mark, **{field: getattr(mark, field) + added}) for mark in marks[place:]]
    check = clock_check(blocks_of(marks, PLAN, NUM_CLIENTS), 1, is_plain=False, with_delays=False)
    assert check is not None
    assert check.num_steps == 510


def test_marks_go_with_the_step_whose_times_were_taken_in(tmp_path: Path) -> None:
    plan = DelayPlan(delay_us=500.0, first_step=3, block_steps=2, cycle=(Late.NOTHING,))
    file = io.StringIO()
    marks = Marks(plan, file)
    kinds = (StepKind.PREFILL, StepKind.DECODE)
    for step in range(1, 4):
        marks.taken_in(step, num_rows=step)
        if step > 1:
            # A step's times are there when the next one's result is.
            marks.observed(kinds[step - 2], partial(sums, step))
    path = tmp_path / "marks"
    path.write_text(file.getvalue() + '{"step": 4, "half a li')
    (mark,) = read_marks(path)
    assert (mark.step, mark.num_prefills, mark.num_plain) == (2, 1, 0)
    # Those of the first two, although the third was there by then.
    assert mark.num_rows == 3
    assert mark.step_s == 3.0
    assert json.loads(file.getvalue())["num_timed"] == 3


def sums(number: int) -> StepSums:
    return StepSums(num_timed=number, step_s=float(number), busy_s={}, bubble_s={})
