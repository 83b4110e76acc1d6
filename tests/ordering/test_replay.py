"""Logs of whole runs, written by the processes' own logger and joined again."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.common.errors import ConfigError
from slipstream.common.wire.events import EventLog, LogOp, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.plan import consume, initial_state, last_consumed
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import Command
from tests.ordering.checker import Operation
from tests.ordering.model import plan_all
from tests.ordering.replay import Replay, main, read_log
from tests.ordering.step_operations import StepOperations, step_operations

HEAD = DraftTraits(is_present=True, reads_hidden=True)
STAMPS = (BufferName.VERIFY_STAMPS, BufferName.DRAFT_STAMPS)
RUN_AHEAD = 1
EPOCH = 3
"""The draft's attachment has the number behind it."""
SLOTS = 0b110
PREFILL, DECODE, PLAIN = Command(0, prompts=SLOTS), Command(0, SLOTS, kept=SLOTS, is_drafted=True), Command(0, SLOTS)
"""Steps of these slots, whose numbers are given when they are sent."""

Filter = Callable[[Operation], bool]


def write_run(
    folder: Path,
    commands: list[Command],
    *,
    keeps: Filter = lambda _: True,
    is_hasty: bool = False,
    epoch: int = EPOCH,
) -> None:
    """Logs a run of the four processes, consumed as late as possible.

    Without the operations that `keeps` rejects; when hasty, each step is sent before the consumption that it needs.
    """
    logs = {stream: EventLog(stream, folder / f"{stream.value}.{epoch}.jsonl") for stream in StreamName}
    state = initial_state(HEAD, RUN_AHEAD)
    steps: dict[int, StepOperations] = {}

    def write(operations: tuple[Operation, ...]) -> None:
        for operation in filter(keeps, operations):
            write_operation(logs[operation.stream], operation, epoch)

    def write_consumption(step: int) -> None:
        write(steps[step].consume)
        if step > 1:
            write(steps.pop(step - 1).consume_next)

    for step, each in enumerate(commands, start=1):
        command, consumed = each._replace(step=step), last_consumed(step, RUN_AHEAD)
        state = consume(state, consumed) if consumed > 0 else state
        draft, verify, grammar, state = plan_all(state, command)
        planned = draft, verify, grammar
        steps[step] = step_operations(command, planned, HEAD, RUN_AHEAD, state.consumed, epoch + 1, epoch + 2)
        if is_hasty:
            write(steps[step].sends)
        if consumed > 0:
            write_consumption(consumed)
        if not is_hasty:
            write(steps[step].sends)
        write(steps[step].draft)
        # No wait holds a log up: the replay puts the operations in order.
        write(steps[step].verify)
        write(steps[step].grammar)
    for step in range(state.consumed + 1, state.step + 1):
        write_consumption(step)
    for log in logs.values():
        log.close()


def write_operation(log: EventLog, operation: Operation, epoch: int = EPOCH) -> None:
    # Of a grammar worker the results are not its own memory.
    attachment = operation.epoch or (epoch if operation.stream is StreamName.GRAMMAR else 0)
    match operation.op:
        case LogOp.SEND:
            assert operation.role is not None
            log.send(operation.role, epoch=operation.epoch or epoch, step=operation.step)
        case LogOp.RECV:
            log.recv(epoch=operation.epoch or epoch, step=operation.step)
        case LogOp.READ | LogOp.WRITE:
            assert operation.buffer is not None
            is_write = operation.op is LogOp.WRITE
            log.access(operation.buffer, operation.rows, is_write=is_write, step=operation.step, attachment=attachment)
        case LogOp.SIGNAL | LogOp.WAIT | LogOp.POLL:
            assert operation.fence is not None
            log.fence(operation.op, operation.fence, operation.value, step=operation.step, attachment=attachment)


def random_commands(num_steps: int, num_slots: int) -> list[Command]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    randomness = random.Random(seed)
    slots = ((1 << num_slots) - 1) << 1

    def some() -> int:
        return randomness.randrange(1, slots) & slots or 2

    def command() -> Command:
        prompts = some() if randomness.random() < 0.2 else 0
        rows = some() & ~prompts
        kept = rows if randomness.random() < 0.9 else 0
        masked = rows & randomness.randrange(slots) if randomness.random() < 0.5 else 0
        return Command(0, rows, prompts, kept, bool(kept) and randomness.random() < 0.9, masked)

    return [Command(0, prompts=slots), *(command() for _ in range(num_steps - 1))]


def test_a_run_without_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, random_commands(300, 8))
    assert main([str(tmp_path)]) == 0
    report = Replay(tmp_path).report()
    assert (report.num_logs, report.races, report.stuck, report.num_excused) == (4, (), (), 0)
    assert report.num_ordered > 300
    assert report.num_accesses > 10 * 300
    assert capsys.readouterr().out.splitlines()[-2:] == str(report).splitlines()


def test_the_log_says_what_was_written(tmp_path: Path) -> None:
    operations = [
        Operation(LogOp.RECV, StreamName.DRAFT, 5, EPOCH),
        Operation(LogOp.WAIT, StreamName.DRAFT, 5, EPOCH, fence=FenceName.VERIFY_STASH, value=4),
        Operation(LogOp.READ, StreamName.DRAFT, 5, EPOCH, buffer=BufferName.PREFILL_HIDDEN, rows=(0,)),
        Operation(LogOp.WRITE, StreamName.DRAFT, 5, EPOCH, buffer=BufferName.DRAFT_TOKENS, rows=(1, 2)),
        Operation(LogOp.SIGNAL, StreamName.DRAFT, 5, EPOCH, fence=FenceName.DRAFT_PROPOSED, value=5),
    ]
    log = EventLog(StreamName.DRAFT, tmp_path / "draft.jsonl")
    for operation in operations:
        write_operation(log, operation)
    log.close()
    assert list(read_log(tmp_path / "draft.jsonl")) == operations


HOLES: dict[str, tuple[Filter, str]] = {
    "draft does not wait": (
        lambda op: (op.op, op.stream) != (LogOp.WAIT, StreamName.DRAFT),
        r"(draft's read|verify's write) of (seq_lens|prefill_hidden) ",
    ),
    "verify does not wait": (
        lambda op: (op.op, op.stream) != (LogOp.WAIT, StreamName.VERIFY),
        r"(draft's write|verify's read) of draft_tokens ",
    ),
    "the scheduler does not wait": (
        lambda op: (op.op, op.stream) != (LogOp.WAIT, StreamName.SCHEDULER),
        r"(verify's write|scheduler's read) of num_accepted ",
    ),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_run_with_a_hole_names_the_accesses(hole: str, tmp_path: Path) -> None:
    keeps, expected = HOLES[hole]
    write_run(tmp_path, [PREFILL, *[DECODE] * 20], keeps=keeps)
    assert re.search(expected, replayed(tmp_path, status=1))


def test_a_step_that_is_sent_before_a_consumption_names_the_accesses(tmp_path: Path) -> None:
    write_run(tmp_path, [PREFILL, *[DECODE] * 20], is_hasty=True)
    output = replayed(tmp_path, status=1)
    assert re.search(r"(scheduler's read|verify's write) of new_seq_lens \[\d\] in step", output)


def test_the_command(tmp_path: Path) -> None:
    write_run(tmp_path, [PREFILL, *[DECODE] * 5], keeps=lambda op: op.op is not LogOp.WAIT)
    command = [sys.executable, "-m", "tests.ordering.replay", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1, result.stderr
    assert "races" in result.stdout


def test_a_wait_for_what_never_came_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, [PREFILL, DECODE], keeps=lambda op: (op.op, op.stream) != (LogOp.SIGNAL, StreamName.DRAFT))
    assert "verify's wait of DRAFT_PROPOSED 2 in step 2 never ends" in replayed(tmp_path, status=1)


class TestFaults:
    def test_a_process_that_is_killed_leaves_half_a_line(self, tmp_path: Path) -> None:
        write_run(tmp_path, [PREFILL, DECODE])
        path = tmp_path / f"scheduler.{EPOCH}.jsonl"
        path.write_text(path.read_text()[:-10])
        assert main([str(tmp_path)]) == 0

    def test_an_epoch_that_is_over_may_end_anywhere(self, tmp_path: Path) -> None:
        def keeps(operation: Operation) -> bool:
            """Verify ends in step 4. Draft has begun with the steps after it, whose results are never consumed."""
            if operation.stream is StreamName.SCHEDULER and operation.step == 3:
                # Stamps are read when the next step is consumed.
                return operation.buffer not in STAMPS
            return operation.step < 4 or operation.stream is StreamName.DRAFT or operation.op is LogOp.SEND

        write_run(tmp_path, [PREFILL, *[DECODE] * 5], keeps=keeps)
        later = tmp_path / "later"
        later.mkdir()
        write_run(later, [PREFILL, *[DECODE] * 5], epoch=EPOCH + 2)
        append_logs(later, tmp_path)
        assert "draft's wait of VERIFY_STASH 4 in step 5 never ends" in replayed(tmp_path, status=1)
        write_release(tmp_path, FenceName.VERIFY_STASH, 6)
        replayed(tmp_path, status=0)

    def test_a_draft_whose_step_was_released_is_excused(self, tmp_path: Path) -> None:
        write_run(
            tmp_path,
            [PREFILL, *[DECODE] * 3, *[PLAIN] * 3],
            keeps=lambda op: (op.op, op.fence, op.value) != (LogOp.SIGNAL, FenceName.DRAFT_PROPOSED, 4),
        )
        assert "verify's wait of DRAFT_PROPOSED 4 in step 4 never ends" in replayed(tmp_path, status=1)
        write_release(tmp_path, FenceName.DRAFT_PROPOSED, 4)
        report = Replay(tmp_path).report()
        assert (report.races, report.stuck) == ((), ())
        assert report.num_excused > 0

    def test_another_draft_takes_the_place_of_one_that_is_gone(self, tmp_path: Path) -> None:
        write_run(tmp_path, [PREFILL, *[DECODE] * 6])
        first = tmp_path / f"draft.{EPOCH}.jsonl"
        lines = first.read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        begins, ends = steps.index(5), steps.index(6)
        # The first one was in step 5 when it was lost; the other one begins with that step, in rows of its own.
        write_lines(first, lines[: ends - 1])
        write_lines(tmp_path / "another.jsonl", lines[begins:])
        replayed(tmp_path, status=0)


class TestBrokenLogs:
    def test_no_logs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path)])
        assert "accepted: a folder with logs of accesses" in capsys.readouterr().err

    @pytest.mark.parametrize("line", ["what", "{}", "[]", '{"stream":"draft","seq":0,"op":"fly","step":1,"epoch":1}'])
    def test_a_line_that_is_none(self, line: str, tmp_path: Path) -> None:
        (tmp_path / "draft.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError, match=r"draft.jsonl:1: .* a line of a log of accesses"):
            Replay(tmp_path)

    def test_a_line_that_is_lost(self, tmp_path: Path) -> None:
        write_run(tmp_path, [PREFILL, DECODE])
        path = tmp_path / f"verify.{EPOCH}.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:3], *lines[4:]]) + "\n")
        with pytest.raises(ConfigError, match=r"verify.*\.jsonl:4: got 4, accepted: seq 3"):
            Replay(tmp_path).report()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_10000_steps(tmp_path: Path) -> None:
    write_run(tmp_path, random_commands(10_000, 64))
    started = time.perf_counter()
    report = Replay(tmp_path).report()
    print(f"{time.perf_counter() - started:.1f} s: {report}")
    assert (report.races, report.stuck) == ((), ())


def replayed(folder: Path, *, status: int) -> str:
    """The output of the command, which ends with this status."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main([str(folder)]) == status
    return output.getvalue()


def write_release(folder: Path, fence: FenceName, value: int) -> None:
    """The scheduler releases a fence, in a log of its own."""
    log = EventLog(StreamName.SCHEDULER, folder / "watchdog.jsonl")
    log.release(fence, value, epoch=EPOCH, attachment=EPOCH + 1)
    log.close()


def append_logs(source: Path, target: Path) -> None:
    """Appends the log of each stream in one folder to that in another."""
    for path in source.iterdir():
        stream, _ = path.name.split(".", 1)
        (earlier,) = target.glob(f"{stream}.*.jsonl")
        write_lines(earlier, [*earlier.read_text().splitlines(), *path.read_text().splitlines()])


def write_lines(path: Path, lines: list[str]) -> None:
    """Writes a log, numbered anew."""
    records = [json.loads(line) | {"seq": seq} for seq, line in enumerate(lines)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
