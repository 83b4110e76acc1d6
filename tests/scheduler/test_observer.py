"""The times of steps: stamps are read when they are there, lost time shows in them, and a trace has the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.device.cpu.device import HostArena, HostDevice
from slipstream.common.errors import UnavailableError
from slipstream.common.wire.events import Event, EventLog, Site
from slipstream.common.wire.layout import DECODE_PART, PREFILL_PART, RESULT_FENCES, BufferName, DraftShape, EpochShape
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, PrefillChunk, Role, StepCommand
from slipstream.common.wire.trace import MAX_STEPS, TracedStep
from slipstream.scheduler.attachment import DraftAttachment
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.draft import Draft, DraftState
from slipstream.scheduler.link import Link
from slipstream.scheduler.metrics import (
    DRAFT_TO_VERIFY,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    StepTiming,
)
from slipstream.scheduler.observer import DecodeRecord, SentStep, StepObserver, StepTrace
from slipstream.scheduler.records import NO_SLOTS, SlotLease, Step, StepSlots
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.epoch import EpochState
from tests.harness.counted_jobs import Job
from tests.harness.counted_time import CountedDevice, CountedTime
from tests.harness.local_epoch import LocalEpoch
from tests.harness.step_kinds import Kind
from tests.harness.workers import LocalWorker, describe

DECODE, PREFILL, PLAIN = Kind.DECODE, Kind.PREFILL, Kind.PLAIN


SIZES = {"num_slots": 3, "run_ahead": 1, "num_draft_tokens": 2, "chunk_tokens": 8}
SHAPE = EpochShape(**SIZES)
LEASE = SlotLease(1, 1)


def made_step(number: int, kind: Kind = DECODE, *, takes_prompts: bool = False) -> Step:
    """A step of one slot, or of two that is mixed."""
    decoded = NO_SLOTS if kind is PREFILL else StepSlots.of([LEASE])
    chunk = PrefillChunk(slot=2, start=0, tokens=(1,), is_last=False)
    return Step(
        number,
        decoded,
        yielding=decoded,
        most_more=np.ones(len(decoded.slots), np.int32),
        most_draft_tokens=2 if kind is DECODE else 0,
        is_kept=kind is DECODE,
        chunks=(chunk,) if takes_prompts or kind is PREFILL else (),
    )


class Stamps:
    """An arena with stamps in place of workers, and what the scheduler makes of them."""

    def __init__(self) -> None:
        self.timings: list[StepTiming] = []
        """The times of the steps whose stamps came in so far."""
        self.sent: dict[int, SentStep] = {}
        self.arena = HostArena.create(SHAPE.specs(), RESULT_FENCES)
        link = cast("Link", LocalWorker(DummyDraft(describe(Role.DRAFT), 0)))
        self.attachment = DraftAttachment(
            2, link, describe(Role.DRAFT), DraftShape(**SIZES), HostDevice(), epoch=1, log=EventLog()
        )
        self.draft = Draft(self.attachment)
        metrics: Any = SimpleNamespace(
            observe=lambda timed: self.timings.append(timed()), decoded=lambda *_: None, tidy=lambda: None
        )
        trace = StepTrace(EventLog())
        self.observer = StepObserver(HostDevice(), self.arena, SHAPE, EventLog(), metrics, trace, DecodeRecord())

    def send(self, number: int, kind: Kind = DECODE, *, takes_prompts: bool = False) -> None:
        """A step is sent."""
        step, draft = made_step(number, kind, takes_prompts=takes_prompts), None if kind is PLAIN else self.draft
        fences = [FenceName.DRAFT_PROPOSED] * step.is_kept + [FenceName.DRAFT_PREFILLED] * bool(step.chunks)
        draft_ops = None if draft is None else FenceOps((), tuple(FencePoint(fence, number) for fence in fences))
        self.sent[number] = SentStep(step, draft, draft_ops, FenceOps(), None, decided_ns=0, sent_ns=0)
        self.observer.on_sent(self.sent[number])

    def verify(self, number: int, start: int, end: int) -> None:
        """Verify does its part."""
        self.arena.tensor(BufferName.VERIFY_STAMPS)[number % SHAPE.ring] = torch.tensor([start, end])

    def prefill(self, number: int, start: int, end: int) -> None:
        """Draft does its prefill part."""
        self.attachment.stamps[number % SHAPE.ring, PREFILL_PART] = torch.tensor([start, end])
        self.attachment.fences[FenceName.DRAFT_PREFILLED].release(number)

    def result(self, number: int, *before: tuple[int, int]) -> None:
        """The result of a step arrives, with the stamps of the one before: verify's, and the same of draft's parts.

        If three are given, they are its decode part's and its prefill part's.
        """
        verify, *parts = before or ((0, 0), (0, 0))
        result: Any = SimpleNamespace(stamps_before=(verify, parts[0], parts[-1]))
        self.observer.on_result(self.sent[number], result)


@pytest.fixture
def stamps() -> Iterator[Stamps]:
    """Three rows of stamps."""
    made = Stamps()
    yield made
    cast("LocalWorker", made.attachment.link).close()
    made.attachment.close()
    made.arena.close()


class TestStepObserver:
    """Stamps are read when it is sure that they are there, once, in order."""

    def test_stamps_come_with_the_next_result(self, stamps: Stamps) -> None:
        """No fence is polled: all of them are at zero here."""
        stamps.send(1)
        stamps.result(1)
        stamps.send(2)
        stamps.result(2, (30, 60), (10, 20))
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(10, 30)]

    def test_a_draft_that_no_step_waited_for_is_polled(self, stamps: Stamps) -> None:
        stamps.send(1, PREFILL)
        stamps.send(2, PREFILL)
        stamps.verify(1, 30, 60)
        stamps.result(2, (30, 60), (10, 0))
        assert stamps.timings == []
        stamps.prefill(1, 10, 20)
        stamps.send(3)
        stamps.result(3, (70, 80), (21, 30))
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(10, 30), (9, 10)]

    def test_each_part_of_a_draft_is_read_when_it_is_sure_to_be_done(self, stamps: Stamps) -> None:
        """Verify has waited for the decode part of its own step, and for the prefill part before a later part."""
        stamps.send(1, takes_prompts=True)
        stamps.result(1)
        stamps.send(2, takes_prompts=True)
        stamps.result(2, (30, 60), (10, 20), (40, 45))
        assert [(timing.phase, timing.draft_ns) for timing in stamps.timings] == [("mixed", 15)]
        stamps.verify(2, 70, 80)
        stamps.arena.tensor(BufferName.DRAFT_STAMPS)[2 % SHAPE.ring, DECODE_PART] = torch.tensor([61, 64])
        stamps.send(3, PLAIN)
        stamps.result(3, (70, 80), (61, 64), (40, 45))
        assert len(stamps.timings) == 1
        stamps.prefill(2, 81, 88)
        stamps.observer.collect(2)
        assert [timing.draft_ns for timing in stamps.timings] == [15, 10]

    def test_a_step_waits_for_those_before_it(self, stamps: Stamps) -> None:
        stamps.send(1, PREFILL)
        stamps.send(2, PLAIN)
        stamps.send(3, PLAIN)
        stamps.verify(1, 10, 20)
        stamps.verify(2, 25, 40)
        stamps.result(3, (25, 40), (0, 0))
        assert stamps.timings == []
        stamps.prefill(1, 11, 22)
        stamps.observer.collect(2)
        assert [(timing.phase, timing.wall_ns) for timing in stamps.timings] == [("prefill", None), ("decode", 20)]
        assert stamps.timings[1].bubbles_ns == {VERIFY_TO_VERIFY: 3}

    def test_a_draft_that_rests_while_it_is_behind_holds_no_stamps_of_verify_up(self, stamps: Stamps) -> None:
        stamps.send(1, PREFILL)
        for number in range(2, SHAPE.ring + 1):
            stamps.send(number, PLAIN)
        for number in range(1, SHAPE.ring):
            stamps.verify(number, 20 * number, 20 * number + 10)
        stamps.result(SHAPE.ring, (20 * SHAPE.ring - 20, 20 * SHAPE.ring - 10), (0, 0))
        stamps.observer.collect(1)
        assert stamps.timings == []
        stamps.observer.collect(1, is_last_chance=True)
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(0, 10)]
        stamps.verify(SHAPE.ring, 500, 510)
        stamps.send(SHAPE.ring + 1, PLAIN)
        stamps.result(SHAPE.ring + 1, (500, 510), (0, 0))
        assert [timing.verify_ns for timing in stamps.timings] == [10] * SHAPE.ring

    def test_verifys_stamps_are_not_read_before_the_next_result(self, stamps: Stamps) -> None:
        stamps.send(1, PLAIN)
        stamps.result(1)
        stamps.observer.collect(1)
        assert stamps.timings == []

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_a_draft_that_was_lost_or_is_gone_leaves_no_stamps(self, stamps: Stamps, is_lost: bool) -> None:
        stamps.send(1)
        if is_lost:
            stamps.attachment.release(1)
        else:
            for state in (DraftState.CATCHING_UP, DraftState.LEAVING, DraftState.LEFT):
                stamps.draft.enter(state)
        stamps.result(1)
        stamps.send(2, PLAIN)
        stamps.result(2, (30, 60), (10, 20))
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(0, 30)]

    @pytest.mark.parametrize(
        "hostile", [(20, 10), (10, 2**62), (-(2**63), 2**63 - 1), (2**62, 2**62 + 1), (31, 5_000_000)]
    )
    def test_stamps_that_no_work_left_are_left_out(self, stamps: Stamps, hostile: tuple[int, int]) -> None:
        stamps.send(1)
        stamps.result(1)
        stamps.send(2)
        stamps.result(2, (30, 60), hostile)
        stamps.send(3)
        stamps.result(3, (90, 100), hostile)
        assert [timing.draft_ns for timing in stamps.timings] == [0, 0]
        assert all(bubble >= 0 for timing in stamps.timings for bubble in timing.bubbles_ns.values())

    def test_idle_time_is_not_counted(self, stamps: Stamps) -> None:
        before: tuple[tuple[int, int], ...] = ()
        for number, start in ((1, 100), (2, 200), (3, 90_000), (4, 90_100), (5, 90_200)):
            if number == 3:
                stamps.observer.on_idle()
            stamps.send(number)
            stamps.result(number, *before)
            before = ((start + 10, start + 90), (start, start + 10))
        assert [timing.wall_ns for timing in stamps.timings] == [None, 100, None, 100]
        assert [sum(timing.bubbles_ns.values()) for timing in stamps.timings] == [0, 10, 0, 10]


DRAFT_NS, VERIFY_NS, DELAY_NS = 500_000, 2_000_000, 1_500_000
NUM_STEPS = 20


class LastingVerify(DummyVerify):
    """A verify whose step lasts VERIFY_NS."""

    def __init__(self, time: CountedTime) -> None:
        super().__init__(describe(Role.VERIFY), 0)
        self._time = time

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        return lasting(super().phases(command, state), self._time, VERIFY_NS)


class LastingDraft(DummyDraft):
    """A draft whose step lasts DRAFT_NS."""

    def __init__(self, time: CountedTime) -> None:
        super().__init__(describe(Role.DRAFT), 0)
        self._time = time

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        return lasting(super().phases(command, state), self._time, DRAFT_NS)


def lasting(phases: list[Phase], time: CountedTime, length_ns: int) -> list[Phase]:
    """The phases of a step; the work of the first one lasts so long."""
    first, *others = phases

    def work() -> None:
        first.work()
        time.spend(length_ns)

    return [replace(first, work=work), *others]


def measured(late_role: Role, *, run_ahead: int = 0, has_draft: bool = True) -> list[StepTiming]:
    """The times of decode steps, of which the worker of `late_role` gets every second command DELAY_NS late."""
    device = CountedDevice()

    def late(command: StepCommand) -> StepCommand:
        if command.slots and command.step % 2 == 0:
            device.time.spend(DELAY_NS)
        return command

    roles = [LastingVerify(device.time), *([LastingDraft(device.time)] if has_draft else [])]
    workers = [
        LocalWorker(role, device=device, before_send=late if role.description.role is late_role else None)
        for role in roles
    ]
    config = SchedulerConfig(
        verify="unix:/none",
        run_ahead=run_ahead,
        fixed_draft_tokens=1,
        slots=1,
        context_tokens=512,
        page_tokens=16,
    )
    epoch = LocalEpoch(1, config, workers, device=device)
    spec = SequenceSpec(
        job_id="job",
        prompt=(1, 2, 3),
        max_new_tokens=NUM_STEPS * (2 if has_draft else 1) + 1,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )
    epoch.run([Job(spec)])
    for worker in workers:
        worker.close()
    # Step 1 is the prefill; the last step's stamps are not read any more.
    prefill, *timings = epoch.metrics.timings
    assert prefill.phase == "prefill"
    assert len(timings) >= NUM_STEPS - 1
    return timings


def bubbles(timings: list[StepTiming], edge: str) -> list[int]:
    """The bubbles from step 3 on: step 2 is the first behind a prefill."""
    return [timing.bubbles_ns[edge] for timing in timings[1:]]


def alternating(length_ns: int, count: int) -> list[int]:
    """A bubble in every second step, the first of which is step 4."""
    return [length_ns * (number % 2) for number in range(count)]


@pytest.mark.parametrize(
    ("late_role", "has_draft", "edge"),
    [
        (Role.DRAFT, True, VERIFY_TO_DRAFT),
        (Role.VERIFY, False, VERIFY_TO_VERIFY),
    ],
)
def test_a_delay_before_a_send_is_a_bubble_of_its_length(late_role: Role, has_draft: bool, edge: str) -> None:
    timings = measured(late_role, has_draft=has_draft)
    found = bubbles(timings, edge)
    assert found == alternating(DELAY_NS, len(found))
    assert {timing.verify_ns for timing in timings} == {VERIFY_NS}
    assert {timing.draft_ns for timing in timings} == {DRAFT_NS if has_draft else 0}


def test_a_delay_while_draft_works_is_a_bubble_by_as_much_as_it_outlasts_draft() -> None:
    timings = measured(Role.VERIFY)
    found = bubbles(timings, DRAFT_TO_VERIFY)
    assert found == alternating(DELAY_NS - DRAFT_NS, len(found))
    assert set(bubbles(timings, VERIFY_TO_DRAFT)) == {0}


def test_running_ahead_hides_the_delay() -> None:
    timings = measured(Role.DRAFT, run_ahead=1)
    assert set(bubbles(timings, VERIFY_TO_DRAFT) + bubbles(timings, DRAFT_TO_VERIFY)) == {0}


MEMBERS = StepSlots.of([SlotLease(1, 1), SlotLease(2, 1)])
WAITS = FenceOps((FenceWait(FenceName.DRAFT_PROPOSED, 1),), ())
NOTHING = FenceOps()


def sent_step(number: int, draft: FenceOps | None = NOTHING, chunks: tuple[PrefillChunk, ...] = ()) -> SentStep:
    """A step that decodes two requests."""
    step = Step(number, MEMBERS, MEMBERS, np.ones(2, np.int32), chunks=chunks, num_prompt_tokens=3 * len(chunks))
    return SentStep(step, None, draft, WAITS, None, 10 * number, 10 * number + 1)


def complete(trace: StepTrace, number: int, draft: FenceOps | None = NOTHING) -> None:
    """Its stamps are there."""
    trace.add(sent_step(number, draft), (number, number + 2), (number, number + 1), None)


def test_steps_are_told_once_they_are_complete() -> None:
    trace = StepTrace(EventLog())
    assert (trace.last_complete, trace.steps(1, 2)) == (0, [])
    complete(trace, 1, draft=None)
    expected = TracedStep(step=1, num_slots=2, num_decoding=2, has_draft=False, verify_waits=WAITS.waits)
    assert trace.steps(1, 2) == [expected]
    complete(trace, 2)
    assert [(step.step, step.has_draft) for step in trace.steps(2, 9)] == [(2, True)]
    assert trace.stream_events(Role.VERIFY, 2) == [Event(Site.STREAM, 2, 2, 4)]
    assert trace.stream_events(Role.DRAFT, 2) == [Event(Site.STREAM, 2, 2, 3)]
    assert trace.last_complete == 2


def test_a_mixed_step_has_two_parts_of_draft() -> None:
    trace = StepTrace(EventLog())
    chunk = PrefillChunk(slot=3, start=0, tokens=(1, 2, 3), is_last=False)
    trace.add(sent_step(5, chunks=(chunk,)), (20, 30), (10, 20), (30, 35))
    (mixed,) = trace.steps(4, 5)
    assert (mixed.label, mixed.num_slots, mixed.num_decoding, mixed.num_prompt_tokens) == ("mixed", 3, 2, 3)
    assert trace.stream_events(Role.DRAFT, 0) == [Event(Site.STREAM, 5, 10, 20), Event(Site.PREFILL, 5, 30, 35)]


def test_tells_what_the_loop_did_in_the_order_in_which_it_ended() -> None:
    log = EventLog()
    trace = StepTrace(log)
    log.add(Site.IDLE, 0, 5, 19)
    for step in (1, 2, 3):
        log.add(Site.SEND, step, 10 * step, 10 * step + 1)
    log.stall(Site.WAIT, 2, 22, 25)
    log.add(Site.TAKE_IN, 2, 25, 27)
    assert trace.host_events(2) == [
        Event(Site.SEND, 2, 20, 21),
        Event(Site.WAIT, 2, 22, 25),
        Event(Site.RESULT, 2, 21, 25),
        Event(Site.TAKE_IN, 2, 25, 27),
        Event(Site.SEND, 3, 30, 31),
    ]
    assert log.stalled_ns[Site.WAIT] == 3


def test_as_many_steps_are_kept_as_a_trace_may_have() -> None:
    log = EventLog()
    trace = StepTrace(log)
    for number in range(1, 2 * MAX_STEPS):
        for site in (Site.SEND, Site.WAIT, Site.TAKE_IN, Site.IDLE, Site.HOLD):
            log.add(site, number, 1, 2)
        complete(trace, number)
    first = 2 * MAX_STEPS - MAX_STEPS
    numbers = list(range(first, 2 * MAX_STEPS))
    assert [step.step for step in trace.steps(first, 2 * MAX_STEPS)] == numbers
    assert [event.step for event in trace.stream_events(Role.DRAFT, first)] == numbers
    assert sorted({event.step for event in trace.host_events(first)}) == numbers
    assert len(trace.steps(0, 2 * MAX_STEPS)) < 1.1 * MAX_STEPS


def test_an_epoch_that_is_over_has_no_trace() -> None:
    trace = StepTrace(EventLog())
    complete(trace, 1)
    trace.is_closed = True
    with pytest.raises(UnavailableError, match="were lost"):
        trace.steps(1, 1)
