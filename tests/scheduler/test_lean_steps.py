"""A step in which no sequence begins or ends costs as much Python for many rows as for a few."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from slipstream.scheduler.plan import initial_state, plan_step
from slipstream.scheduler.records import DraftTraits
from slipstream.scheduler.sizes import BatchSizes
from tests.harness.simulated_run import Run, make_job
from tests.harness.step_kinds import Kind, kind_of_step


class SomeAcceptance:
    """In place of a random generator: every draft has one right token."""

    def randint(self, low: int, high: int) -> int:
        """One."""
        return min(1, high)


def count_operations(work: Callable[[], None]) -> int:
    """How many bytecode instructions `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # what others left may have finalizers, which would be counted
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def operations_of_a_step(num_rows: int, streams: int) -> int:
    """To decide a step, plan it, take its result in and pack the output."""
    sizes = BatchSizes(
        num_slots=num_rows + 1,
        num_pages=num_rows * 20 + 1,
        page_tokens=8,
        chunk_tokens=num_rows,
        num_draft_tokens=3,
        run_ahead=1,
    )
    run = Run(sizes, SomeAcceptance())  # type: ignore[arg-type]
    jobs = [make_job(str(number), (1,), 100, stops=False) for number in range(num_rows)]
    for number, job in enumerate(jobs):
        job.stream = number % streams
    run.jobs.add(*jobs)
    for _ in range(4):
        run.turn()
    run.take()
    before, result_before = run.in_flight.popleft()
    kinds: list[Kind] = []

    def turn() -> None:
        run.batch.cancel(run.queue.take_cancelled())
        run.batch.admit(run.queue)
        step = run.batch.next_step(3)
        assert step is not None
        kinds.append(kind_of_step(step))
        state = initial_state(DraftTraits(is_present=True), run_ahead=1)._replace(stashed=step.decoded.mask)
        plan_step(state, 1, step.decoded.mask, kept=step.kept, is_drafted=step.most_draft_tokens > 0)
        list(run.batch.take_output().deliveries())
        run.batch.apply(before, result_before)
        list(run.batch.take_output().deliveries())

    operations = count_operations(turn)
    assert kinds == [Kind.DECODE]
    return operations


def test_the_number_of_rows_changes_nothing() -> None:
    few, many = operations_of_a_step(3, streams=1), operations_of_a_step(48, streams=1)
    assert 200 < few == many < 2000


def test_rows_of_two_gateways_cost_a_bit_more_once() -> None:
    assert operations_of_a_step(4, streams=2) == operations_of_a_step(48, streams=2)
