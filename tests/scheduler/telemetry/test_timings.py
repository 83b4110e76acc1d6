"""The times of a step: the formulas, and that lost time shows in them."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.api.sampling import SamplingParams
from slipstream.common.api.sequence import SequenceSpec
from slipstream.common.device.cpu.arena import HostArena
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.worker.access_log import AccessLog
from slipstream.common.worker.layout import RESULT_FENCES, BufferName, DraftShape, EpochShape
from slipstream.common.worker.step import Role, StepCommand, StepKind
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.core.allocators import SlotLease
from slipstream.scheduler.core.results import Step
from slipstream.scheduler.telemetry.timings import (
    DRAFT_TO_VERIFY,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    StepRecorder,
    StepTiming,
    StepTimings,
    time_step,
)
from slipstream.scheduler.workers.attachment import DraftAttachment
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker, describe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.scheduler.workers.link import Link

DECODE, PREFILL, PLAIN = StepKind.DECODE, StepKind.PREFILL, StepKind.PLAIN


class TestFormulas:
    """wall, busy and bubbles of one step. `before`: verify's end, and the last end of both workers."""

    def test_decode(self) -> None:
        timing = time_step(DECODE, (100, 100), verify=(130, 180), draft=(107, 120))
        assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (13, 50, 80)
        assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 7, DRAFT_TO_VERIFY: 10}
        assert timing.wall_ns == timing.draft_ns + timing.verify_ns + sum(timing.bubbles_ns.values())

    def test_stamps_that_make_no_sense_make_no_bubble_longer_than_the_step(self) -> None:
        timing = time_step(DECODE, (100, 100), verify=(130, 140), draft=(135, 10))
        assert timing.wall_ns == 40
        assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 35, DRAFT_TO_VERIFY: 5}

    def test_plain(self) -> None:
        timing = time_step(PLAIN, (100, 100), verify=(111, 150), draft=None)
        assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (0, 39, 50)
        assert timing.bubbles_ns == {VERIFY_TO_VERIFY: 11}

    def test_the_first_step_after_an_idle_time_has_no_bubble_and_no_wall(self) -> None:
        timing = time_step(DECODE, None, verify=(130, 180), draft=(107, 120))
        assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (13, 50, None)
        assert timing.bubbles_ns == {}

    def test_prefill_of_both_at_the_same_time(self) -> None:
        """Draft is not on the path of the step: verify starts late only because of the host."""
        timing = time_step(PREFILL, (100, 100), verify=(104, 150), draft=(101, 190))
        assert (timing.draft_ns, timing.verify_ns, timing.wall_ns) == (89, 46, 50)
        assert timing.bubbles_ns == {VERIFY_TO_VERIFY: 4}

    def test_a_prefill_of_draft_that_outlasts_verifys_is_no_bubble(self) -> None:
        """`before`: verify was done at 150, draft not until 190. The next step starts right behind draft."""
        timing = time_step(DECODE, (150, 190), verify=(205, 240), draft=(192, 204))
        assert timing.bubbles_ns == {VERIFY_TO_DRAFT: 2, DRAFT_TO_VERIFY: 1}
        assert timing.wall_ns == 90

    def test_work_that_overlaps_is_no_bubble(self) -> None:
        timing = time_step(PREFILL, (100, 140), verify=(110, 150), draft=(141, 190))
        assert timing.bubbles_ns == {VERIFY_TO_VERIFY: 0}


SIZES = {"num_slots": 3, "run_ahead": 1, "num_draft_tokens": 2, "chunk_tokens": 8}
SHAPE = EpochShape(**SIZES)
LEASE = SlotLease(1, 1)


def made_step(number: int, kind: StepKind = DECODE) -> Step:
    """A step of one slot."""
    return Step(number=number, kind=kind, members=(LEASE,), yielding=(LEASE,))


class Stamps:
    """An arena with stamps in place of workers, and what the scheduler makes of them."""

    def __init__(self) -> None:
        self._timings: list[StepTiming] = []
        self.arena = HostArena.create(SHAPE.specs(), RESULT_FENCES)
        link = cast("Link", LocalWorker(DummyDraft(describe(Role.DRAFT), 0)))
        self.draft = DraftAttachment(
            2, link, describe(Role.DRAFT), DraftShape(**SIZES), HostDevice(), epoch=1, log=AccessLog()
        )
        self.collector = StepTimings(HostDevice(), self.arena, SHAPE, AccessLog(), self._timings.append, StepRecorder())

    @property
    def timings(self) -> list[StepTiming]:
        """The times of the steps whose stamps came in so far."""
        self.collector.report()
        return self._timings

    def send(self, number: int, kind: StepKind = DECODE) -> None:
        """A step is sent."""
        self.collector.sent(made_step(number, kind), None if kind is PLAIN else self.draft)

    def work(self, role: Role, number: int, start: int, end: int) -> None:
        """A worker does its part."""
        is_draft = role is Role.DRAFT
        stamps = self.draft.stamps if is_draft else self.arena.tensor(BufferName.VERIFY_STAMPS)
        stamps[number % SHAPE.ring, 0] = start
        stamps[number % SHAPE.ring, 1] = end
        if is_draft:
            self.draft.done.release(number)

    def come(self, number: int, *before: tuple[int, int], kind: StepKind = DECODE) -> None:
        """The result of a step comes, with the stamps of the one before."""
        self.collector.came(made_step(number, kind), before or ((0, 0), (0, 0)))


@pytest.fixture
def stamps() -> Iterator[Stamps]:
    """Three rows of stamps."""
    made = Stamps()
    yield made
    cast("LocalWorker", made.draft.link).close()
    made.draft.close()
    made.arena.close()


class TestStepTimings:
    """Stamps are read when it is sure that they are there, once, in order."""

    def test_stamps_come_with_the_next_result(self, stamps: Stamps) -> None:
        """No fence is polled: all of them are at zero here."""
        stamps.send(1)
        stamps.come(1)
        stamps.send(2)
        stamps.come(2, (30, 60), (10, 20))
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(10, 30)]

    def test_a_draft_that_no_step_waited_for_is_polled(self, stamps: Stamps) -> None:
        stamps.send(1, PREFILL)
        stamps.send(2, PREFILL)
        stamps.work(Role.VERIFY, 1, 30, 60)
        stamps.come(2, (30, 60), (10, 0), kind=PREFILL)
        assert stamps.timings == []
        stamps.work(Role.DRAFT, 1, 10, 20)
        stamps.send(3)
        stamps.come(3, (70, 80), (21, 30))
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(10, 30), (9, 10)]

    def test_a_step_waits_for_those_before_it(self, stamps: Stamps) -> None:
        stamps.send(1, PREFILL)
        stamps.send(2, PLAIN)
        stamps.send(3, PLAIN)
        stamps.work(Role.VERIFY, 1, 10, 20)
        stamps.work(Role.VERIFY, 2, 25, 40)
        stamps.come(3, (25, 40), (0, 0), kind=PLAIN)
        assert stamps.timings == []
        stamps.work(Role.DRAFT, 1, 11, 22)
        stamps.collector.collect(2)
        assert [(timing.kind, timing.wall_ns) for timing in stamps.timings] == [(PREFILL, None), (PLAIN, 20)]
        assert stamps.timings[1].bubbles_ns == {VERIFY_TO_VERIFY: 3}

    def test_verifys_stamps_are_not_read_before_the_next_result(self, stamps: Stamps) -> None:
        stamps.send(1, PLAIN)
        stamps.come(1, kind=PLAIN)
        stamps.collector.collect(1)
        assert stamps.timings == []

    def test_a_draft_that_was_lost_leaves_no_stamps(self, stamps: Stamps) -> None:
        stamps.send(1)
        stamps.draft.release(1)
        stamps.come(1)
        stamps.send(2, PLAIN)
        stamps.come(2, (30, 60), (10, 20), kind=PLAIN)
        assert [(timing.draft_ns, timing.verify_ns) for timing in stamps.timings] == [(0, 30)]

    @pytest.mark.parametrize(
        "hostile", [(20, 10), (10, 2**62), (-(2**63), 2**63 - 1), (2**62, 2**62 + 1), (31, 5_000_000)]
    )
    def test_stamps_that_no_work_left_are_left_out(self, stamps: Stamps, hostile: tuple[int, int]) -> None:
        stamps.send(1)
        stamps.come(1)
        stamps.send(2)
        stamps.come(2, (30, 60), hostile)
        stamps.send(3)
        stamps.come(3, (90, 100), hostile)
        assert [timing.draft_ns for timing in stamps.timings] == [0, 0]
        assert all(bubble >= 0 for timing in stamps.timings for bubble in timing.bubbles_ns.values())

    def test_idle_time_is_not_counted(self, stamps: Stamps) -> None:
        before: tuple[tuple[int, int], ...] = ()
        for number, start in ((1, 100), (2, 200), (3, 90_000), (4, 90_100), (5, 90_200)):
            if number == 3:
                stamps.collector.idle()
            stamps.send(number)
            stamps.come(number, *before)
            before = ((start + 10, start + 90), (start, start + 10))
        assert [timing.wall_ns for timing in stamps.timings] == [None, 100, None, 100]
        assert [sum(timing.bubbles_ns.values()) for timing in stamps.timings] == [0, 10, 0, 10]


DRAFT_MS, VERIFY_MS, DELAY_S = 0.5, 2.0, 0.002
NUM_STEPS = 160


class LateSend:
    """Puts a delay before the commands of every second step, and measures how long it was."""

    def __init__(self) -> None:
        self.delays_s: dict[int, float] = {}

    def __call__(self, command: StepCommand) -> StepCommand:
        """The command is about to be sent."""
        if command.kind is not PREFILL and command.step % 2 == 0:
            started = time.monotonic()
            time.sleep(DELAY_S)
            self.delays_s[command.step] = time.monotonic() - started
        return command


@pytest.fixture(autouse=True)
def prompt_threads() -> Iterator[None]:
    """As in a worker: a thread that is woken need not wait 5 ms for the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


def _measure(late: LateSend, *, late_role: Role, run_ahead: int, has_draft: bool = True) -> list[StepTiming]:
    """The times of decode steps, by dummies, one of whose commands are sent late in every second step."""
    verify = LocalWorker(
        DummyVerify(describe(Role.VERIFY), VERIFY_MS), before_send=late if late_role is Role.VERIFY else None
    )
    workers = [verify]
    if has_draft:
        drafting = DummyDraft(describe(Role.DRAFT), DRAFT_MS)
        workers.append(LocalWorker(drafting, before_send=late if late_role is Role.DRAFT else None))
    config = SchedulerConfig(
        verify="unix:/none", run_ahead=run_ahead, num_draft_tokens=1, slots=1, context_tokens=512, page_tokens=16
    )
    epoch = LocalEpoch(1, config, workers)
    per_step = 2 if has_draft else 1
    spec = SequenceSpec(
        job_id="job",
        prompt=(1, 2, 3),
        max_new_tokens=NUM_STEPS * per_step + 1,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )
    epoch.run([Job(spec)])
    for worker in workers:
        worker.close()
    # Step 1 is the prefill; the last step's stamps are not read any more.
    assert epoch.metrics.timings[0].kind is PREFILL
    return epoch.metrics.timings


@dataclass(frozen=True, slots=True)
class Lateness:
    """The effect of a delay of this length on a bubble, in seconds."""

    put_s: float
    shown_s: float

    @classmethod
    def measure(cls, edge: str, *, late_role: Role, run_ahead: int, has_draft: bool = True) -> Lateness:
        """Compares late steps with those between them. Other load on the machine only ever adds to a bubble, and
        not to all of them: so the lower quartile of each is taken."""
        late = LateSend()
        timings = _measure(late, late_role=late_role, run_ahead=run_ahead, has_draft=has_draft)
        bubbles = {
            number: timing.bubbles_ns[edge] / 1e9 for number, timing in enumerate(timings, start=1) if number > 4
        }
        on_time = _lower_quartile([bubble for number, bubble in bubbles.items() if number not in late.delays_s])
        put_s = statistics.median(late.delays_s.values())
        more = [bubble - late.delays_s[number] for number, bubble in bubbles.items() if number in late.delays_s]
        measured = cls(put_s, put_s + _lower_quartile(more) - on_time)
        print(f"{1e3 * measured.put_s:.3f} ms late, {1e3 * measured.shown_s:.3f} ms more of bubble")
        return measured


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


NUM_TRIES = 12
"""An error of the system shows every time."""


@pytest.mark.parametrize(
    ("late_role", "has_draft", "edge"),
    [
        (Role.DRAFT, True, VERIFY_TO_DRAFT),
        (Role.VERIFY, False, VERIFY_TO_VERIFY),
    ],
)
def test_a_delay_before_a_send_is_a_bubble_of_its_length(late_role: Role, has_draft: bool, edge: str) -> None:
    for _ in range(NUM_TRIES):
        lateness = Lateness.measure(edge, late_role=late_role, run_ahead=0, has_draft=has_draft)
        if lateness.shown_s == pytest.approx(lateness.put_s, rel=0.1):
            return
    pytest.fail(f"{lateness}: not within 10 %")


def test_a_delay_while_draft_works_is_a_bubble_by_as_much_as_it_outlasts_draft() -> None:
    for _ in range(NUM_TRIES):
        lateness = Lateness.measure(DRAFT_TO_VERIFY, late_role=Role.VERIFY, run_ahead=0)
        if lateness.shown_s == pytest.approx(lateness.put_s - DRAFT_MS / 1e3, rel=0.15):
            return
    pytest.fail(f"{lateness}: not within 15 % of what is left of the delay")


def test_running_ahead_hides_the_delay() -> None:
    for _ in range(NUM_TRIES):
        lateness = Lateness.measure(VERIFY_TO_DRAFT, late_role=Role.DRAFT, run_ahead=1)
        if lateness.shown_s < 0.25 * lateness.put_s:
            return
    pytest.fail(f"{lateness}: not hidden")
