"""The records of the last steps, and the calls when a step is complete."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.common.errors import UnavailableError
from slipstream.common.wire.recorder import FlightRecorder, Record, Site
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, PrefillChunk, Role, WaitPlace
from slipstream.common.wire.trace import MAX_STEPS, TracedStep
from slipstream.scheduler.records import SentStep, SlotLease, Step, StepSlots
from slipstream.scheduler.telemetry.timings import StepRecorder

WAITS = FenceOps((FenceWait(FenceName.DRAFT_PROPOSED, 1),), ())
NOTHING = FenceOps()


def sent_step(step: Step, draft_ops: FenceOps | None, verify_ops: FenceOps = WAITS) -> SentStep:
    """The step, sent with these waits and signals."""
    decided_ns = 10 * step.number
    return SentStep(step, None, draft_ops, verify_ops, None, decided_ns=decided_ns, sent_ns=decided_ns + 1)


def send(recorder: StepRecorder, number: int, draft_ops: FenceOps | None = NOTHING) -> SentStep:
    """A step of two requests is sent."""
    decoded = StepSlots.of([SlotLease(1, 1), SlotLease(2, 1)])
    step = Step(number, decoded, yielding=decoded, most_more=np.ones(2, np.int32), most_draft_tokens=3)
    sent = sent_step(step, draft_ops)
    recorder.sent(sent)
    return sent


def consume(recorder: StepRecorder, sent: SentStep) -> None:
    """Its result arrives and is applied, with one nanosecond and more between what the loop does."""
    sent.wait_ns, sent.arrived_ns, sent.applied_ns = sent.sent_ns + 1, sent.sent_ns + 4, sent.sent_ns + 6
    recorder.consumed(sent)


def complete(recorder: StepRecorder, number: int) -> None:
    """Its stamps are there."""
    recorder.stamped(number, (number, number + 2), (number, number + 1), None)


class TestFlightRecorder:
    """The ring that every process has."""

    def test_keeps_the_newest(self) -> None:
        recorder = FlightRecorder(capacity=3)
        for step in range(1, 6):
            recorder.add(Site.ENQUEUE, step, step, step + 1)
        assert [record.step for record in recorder.since(0)] == [3, 4, 5]
        assert recorder.since(5) == [Record(Site.ENQUEUE, 5, 5, 6)]

    def test_an_epoch_begins_with_nothing(self) -> None:
        recorder = FlightRecorder()
        recorder.add(Site.ENQUEUE, 7, 1, 2)
        recorder.begin_epoch(4)
        assert (recorder.since(0), recorder.epoch) == ([], 4)


class TestStepRecorder:
    """The scheduler's."""

    def test_steps_are_told_once_they_are_complete(self) -> None:
        recorder = StepRecorder()
        send(recorder, 1, draft_ops=None)
        send(recorder, 2)
        assert recorder.steps(1, 2) == []
        complete(recorder, 1)
        expected = TracedStep(
            step=1, num_slots=2, num_decoding=2, num_draft_tokens=3, has_draft=False, verify_waits=WAITS.waits
        )
        assert recorder.steps(1, 2) == [expected]
        complete(recorder, 2)
        assert [(step.step, step.has_draft) for step in recorder.steps(2, 9)] == [(2, True)]
        assert recorder.host_records(2) == [Record(Site.SEND, 2, 20, 21)]
        assert recorder.stream_records(Role.VERIFY, 2) == [Record(Site.STREAM, 2, 2, 4)]
        assert recorder.stream_records(Role.DRAFT, 2) == [Record(Site.STREAM, 2, 2, 3)]

    def test_a_mixed_step_has_the_stamps_of_both_parts_of_its_draft(self) -> None:
        recorder = StepRecorder()
        decoded = StepSlots.of([SlotLease(1, 1)])
        chunk = PrefillChunk(slot=2, start=0, tokens=(1, 2, 3), is_last=False)
        ones = np.ones(1, np.int32)
        step = Step(5, decoded, yielding=decoded, most_more=ones, chunks=(chunk,), num_prompt_tokens=3, is_kept=True)
        signals = tuple(FencePoint(fence, 5) for fence in (FenceName.DRAFT_PROPOSED, FenceName.DRAFT_PREFILLED))
        waits = (FenceWait(FenceName.DRAFT_PROPOSED, 5, WaitPlace.SAMPLING),)
        recorder.sent(sent_step(step, FenceOps((), signals), FenceOps(waits)))
        recorder.stamped(5, (20, 30), (10, 20), (30, 35))
        [traced] = recorder.steps(4, 5)
        assert (traced.step, traced.label, traced.has_draft, traced.num_prompt_tokens) == (5, "mixed", True, 3)
        assert traced.verify_waits == waits
        stamps = recorder.stream_records(Role.DRAFT, 0)
        assert stamps == [Record(Site.STREAM, 5, 10, 20), Record(Site.PREFILL, 5, 30, 35)]

    def test_tells_what_the_loop_did_in_the_order_in_which_it_ended(self) -> None:
        recorder = StepRecorder()
        recorder.add(Site.IDLE, 0, 5, 19)
        send(recorder, 1)
        consume(recorder, send(recorder, 2))
        send(recorder, 3)
        assert recorder.host_records(2) == [
            Record(Site.SEND, 2, 20, 21),
            Record(Site.WAIT, 2, 22, 25),
            Record(Site.RESULT, 2, 21, 25),
            Record(Site.TAKE_IN, 2, 25, 27),
            Record(Site.SEND, 3, 30, 31),
        ]

    def test_keeps_as_many_steps_as_a_trace_may_have(self) -> None:
        recorder = StepRecorder()
        for number in range(1, 2 * MAX_STEPS):
            consume(recorder, send(recorder, number))
            recorder.add(Site.IDLE, number, 1, 2)
            complete(recorder, number)
        first = 2 * MAX_STEPS - MAX_STEPS
        numbers = list(range(first, 2 * MAX_STEPS))
        assert [step.step for step in recorder.steps(first, 2 * MAX_STEPS)] == numbers
        assert [record.step for record in recorder.stream_records(Role.DRAFT, first)] == numbers
        assert sorted({record.step for record in recorder.host_records(first)}) == numbers
        assert len(recorder.steps(0, 2 * MAX_STEPS)) < 1.1 * MAX_STEPS

    def test_watchers_are_told_of_their_step_once(self) -> None:
        recorder, told = StepRecorder(), list[str]()
        recorder.watch(2, lambda: told.append("two"))
        recorder.watch(3, lambda: told.append("three"))
        forgotten = lambda: told.append("forgotten")  # noqa: E731
        recorder.watch(2, forgotten)
        recorder.forget(forgotten)
        complete(recorder, 1)
        assert told == []
        complete(recorder, 2)
        assert told == ["two"]
        recorder.watch(2, lambda: told.append("late"))
        complete(recorder, 3)
        assert told == ["two", "late", "three"]

    def test_the_end_of_the_epoch_is_told_to_all(self) -> None:
        recorder, told = StepRecorder(), list[int]()
        send(recorder, 1)
        complete(recorder, 1)
        recorder.watch(5, lambda: told.append(5))
        recorder.close()
        recorder.watch(6, lambda: told.append(6))
        assert told == [5, 6]
        with pytest.raises(UnavailableError, match="were lost"):
            recorder.steps(1, 1)
