"""An engine's waits, stamps, work and signals are enqueued in their places."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.common.errors import (
    DeadlineExceededError,
)
from slipstream.common.wire.events import EventLog, LogOp, StreamName
from slipstream.common.wire.layout import DECODE_PART, BufferName
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import FenceOps, FenceWait, Role, SlotUpdate, StepCommand, WaitPlace
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.epoch import EpochState
from tests.harness.recording_role import PROPOSED, PUBLISH, STASH, Recorder, attached
from tests.harness.waiting import block_until
from tests.harness.workers import LocalWorker, SharedArenas, attach, decode
from tests.ordering.replay import read_log

pytestmark = pytest.mark.usefixtures("clean")


def test_waits_come_first_and_every_signal_behind_its_phase(tmp_path: Path) -> None:
    role, arena = Recorder(Role.VERIFY), SharedArenas()
    log = EventLog(StreamName.VERIFY, tmp_path / "verify.jsonl")
    worker = LocalWorker(role, log)
    attach(worker, arena)
    worker.send(decode(1, 1, role=Role.VERIFY, waits=1))
    with pytest.raises(DeadlineExceededError):
        worker.stream.synchronize(0.02)
    assert role.done == []
    arena.fence(PROPOSED).release(1)
    worker.stream.synchronize(5.0)
    worker.close()
    log.close()
    lines = [(line.op.value, (line.fence or line.buffer or line.op).name) for line in read_log(log_path(tmp_path))]
    assert lines == [
        ("recv", "RECV"),
        ("wait", "DRAFT_PROPOSED"),
        ("signal", "VERIFY_PUBLISH"),
        ("write", "VERIFY_STAMPS"),
        ("signal", "VERIFY_STASH"),
    ]
    assert role.done == ["1 VERIFY_PUBLISH", "1 VERIFY_STASH"]
    assert [arena.fence(name).poll() for name in (PROPOSED, PUBLISH, STASH)] == [1, 1, 1]
    arena.close()


def test_a_wait_stands_before_the_phase_at_its_place(tmp_path: Path) -> None:
    class Phased(Recorder):
        def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
            return [
                Phase(self._does("forward"), place=WaitPlace.START),
                Phase(self._does("sample"), (PUBLISH, STASH), WaitPlace.SAMPLING),
            ]

    role = Phased(Role.VERIFY)
    with attached(role) as (worker, arena):
        command = decode(1, 1, role=Role.VERIFY)
        waits = (FenceWait(PROPOSED, 1, WaitPlace.SAMPLING),)
        worker.send(replace(command, num_draft_tokens=(), ops=FenceOps(waits, command.ops.signals)))
        block_until(lambda: role.done == ["forward"])
        with pytest.raises(DeadlineExceededError):
            worker.stream.synchronize(0.1)
        assert role.done == ["forward"]
        arena.fence(PROPOSED).release(1)
        worker.stream.synchronize(5.0)
    assert role.done == ["forward", "sample"]


def test_a_phase_signals_in_its_own_order(tmp_path: Path) -> None:
    """Whatever the order in the command."""

    class OnePhase(Recorder):
        def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
            return [Phase(lambda: None, (STASH, PUBLISH))]

    arena, log = SharedArenas(), EventLog(StreamName.VERIFY, tmp_path / "verify.jsonl")
    worker = LocalWorker(OnePhase(Role.VERIFY), log)
    attach(worker, arena)
    command = decode(1, 1, role=Role.VERIFY)
    assert [point.fence for point in command.ops.signals] == [PUBLISH, STASH]
    worker.send(command)
    worker.stream.synchronize(5.0)
    worker.close()
    log.close()
    arena.close()
    signals = [line.fence for line in read_log(log_path(tmp_path)) if line.op is LogOp.SIGNAL]
    assert signals == [STASH, PUBLISH]


def test_the_stamps_do_not_count_the_wait(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        worker.send(decode(2, 1, waits=1))
        with pytest.raises(DeadlineExceededError):
            worker.stream.synchronize(0.02)
        released_ns = time.monotonic_ns()
        arena.fence(STASH).release(1)
        worker.stream.synchronize(5.0)
        start_ns, end_ns = arena.tensor(BufferName.DRAFT_STAMPS)[2, DECODE_PART].tolist()
        assert released_ns <= start_ns <= end_ns <= time.monotonic_ns()


def test_updates_are_taken_over_in_the_order_of_the_stream() -> None:
    """A step that is enqueued earlier still finds the pages that it came with."""
    seen: list[tuple[int, list[int], int]] = []

    class Reader(Recorder):
        def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
            def look() -> None:
                pages = state.slots.page_table[1].tolist()
                seen.append((command.step, pages, int(state.slots.limits[1])))

            return [Phase(look, (PROPOSED,), WaitPlace.START)]

    with attached(Reader()) as (worker, arena):
        first = SlotUpdate(slot=1, generation=1, pages=(3, 4), limit_tokens=20, sampling=SamplingParams())
        more = SlotUpdate(slot=1, generation=1, first_page_index=2, pages=(5,), limit_tokens=30)
        other = SlotUpdate(slot=1, generation=2, pages=(7,), limit_tokens=9)
        worker.send(replace(decode(1, 1, waits=1), updates=(first,)))
        worker.send(replace(decode(2, 1), updates=(more,)))
        worker.send(replace(decode(3, 1), updates=(other,)))
        arena.fence(STASH).release(1)
        worker.stream.synchronize(5.0)
    assert seen == [(1, [3, 4, 0, 0, 0], 20), (2, [3, 4, 5, 0, 0], 30), (3, [7, 0, 0, 0, 0], 9)]


def log_path(folder: Path) -> Path:
    """The only log there."""
    (path,) = folder.glob("*.jsonl")
    return path
