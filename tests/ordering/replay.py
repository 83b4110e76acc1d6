"""Checks a real run: joins the logs that the processes wrote and names what nothing ordered.

    python -m tests.ordering.replay DIR

DIR holds one `*.jsonl` file for each stream of each process, as `EventLog` writes them.
Prints a summary, and exits with 1 if two accesses collided or a stream waited for what never came.

The padding row of the slot buffers is left out: every padded batch touches it. Faults that the system tolerates are
not reported: accesses of a draft or a grammar worker in a step whose wait the scheduler released (verify uses only a
checked copy, and masks with the step's stamp), and
the end of the log of a process that was replaced, or whose epoch is over.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.errors import ConfigError
from slipstream.common.wire.events import LogOp, StreamName
from slipstream.common.wire.layout import PADDING_SLOT, SLOT_BUFFERS, BufferName
from slipstream.common.wire.step import FenceName, Role
from tests.ordering.checker import Checker, Operation, Race, Stuck, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a replay."""

    num_logs: int
    num_operations: int
    num_accesses: int
    """Rows read or written."""
    num_fence_operations: int
    num_ordered: int
    """Conflicting accesses of two streams that were in order."""
    num_excused: int
    """Races with a draft whose step was released."""
    races: tuple[Race, ...]
    stuck: tuple[Stuck, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.num_logs} logs, {self.num_operations} operations: {self.num_accesses} rows accessed, "
            f"{self.num_fence_operations} fence operations",
            f"{self.num_ordered} conflicting pairs in order, {len(self.races)} races "
            f"({self.num_excused} more with a released draft), {len(self.stuck)} streams stuck",
        ]
        lines.extend(map(str, (*self.races, *self.stuck)))
        return "\n".join(lines)


class _Log:
    """One log, and counts of what was read of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first = next(read_log(path), None)
        self.num_operations = 0
        self.num_fence_operations = 0
        self.is_superseded = False

    def operations(self) -> Iterator[Operation]:
        """The operations in order; once it is superseded, without the accesses."""
        for operation in read_log(self.path):
            self.num_operations += 1
            if operation.fence is not None:
                self.num_fence_operations += 1
            if operation.buffer is None or not self.is_superseded:
                yield operation


class Replay:
    """A run, joined from its logs."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if there are no logs."""
        logs = [_Log(path) for path in sorted(folder.glob("*.jsonl"))]
        self._logs = sorted((log for log in logs if log.first is not None), key=_beginning)
        if not self._logs:
            raise ConfigError("DIR", str(folder), "a folder with logs of accesses (*.jsonl)")
        self._checker = Checker(len(self._logs))
        self._last_epoch = 0
        self._released: dict[int, int] = {}
        self._released_masks = 0

    def report(self) -> Report:
        """Carries the run out again. Raises ConfigError if a log is broken."""
        lanes = [self._lane(number) for number in range(len(self._logs))]
        stuck = run(self._checker, lanes)
        races = self._checker.races
        unexcused = tuple(race for race in races if not self._is_excused(race))
        return Report(
            num_logs=len(self._logs),
            num_operations=sum(log.num_operations for log in self._logs),
            num_accesses=self._checker.num_accesses,
            num_fence_operations=sum(log.num_fence_operations for log in self._logs),
            num_ordered=self._checker.num_ordered,
            num_excused=len(races) - len(unexcused),
            races=unexcused,
            stuck=tuple(one for one in stuck if self._is_expected_to_go_on(one, lanes[one.lane])),
        )

    def _lane(self, number: int) -> Iterator[Operation]:
        for index, operation in enumerate(self._logs[number].operations()):
            if index == 1:
                self._supersede_drafts_before(number)
            if operation.op is LogOp.SEND and operation.role is Role.VERIFY:
                self._last_epoch = max(self._last_epoch, operation.epoch)
            if operation.fence is FenceName.GRAMMAR_READY and operation.op is LogOp.RELEASE:
                self._released_masks = max(self._released_masks, operation.value)
            if operation.op is LogOp.RELEASE:
                self._released[operation.epoch] = max(self._released.get(operation.epoch, 0), operation.value)
            yield operation

    def _supersede_drafts_before(self, number: int) -> None:
        # Called when the log's first command has come. Each attachment of a draft has rows of its own, so
        # accesses of an older one conflict with nothing any more.
        if _stream(self._logs[number]) is StreamName.DRAFT:
            for earlier in range(number):
                log = self._logs[earlier]
                if _stream(log) is StreamName.DRAFT and not log.is_superseded:
                    log.is_superseded = True
                    self._checker.restart(earlier)

    def _is_excused(self, race: Race) -> bool:
        return any(
            (operation.stream is StreamName.DRAFT and operation.step <= self._released.get(operation.epoch, 0))
            or (operation.stream is StreamName.GRAMMAR and operation.step <= self._released_masks)
            for operation in (race.first, race.second)
        )

    def _is_expected_to_go_on(self, stuck: Stuck, rest: Iterator[Operation]) -> bool:
        if self._logs[stuck.lane].is_superseded:
            return False
        epoch = stuck.operation.epoch
        return epoch >= self._last_epoch or any(operation.epoch > epoch for operation in rest)


def read_log(path: Path) -> Iterator[Operation]:
    """The operations of one log. A last line that was cut off is left out; any other broken line is a ConfigError."""
    with path.open(encoding="utf-8") as file:
        for seq, line in enumerate(file):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                operation = _operation(record)
                is_next = record["seq"] == seq
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path.name}:{seq + 1}", line, "a line of a log of accesses") from error
            if not is_next:
                raise ConfigError(f"{path.name}:{seq + 1}", record["seq"], f"seq {seq}")
            yield operation


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="replay", description="Checks the order of a real run from its logs.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with the logs (*.jsonl)")
    try:
        report = Replay(parser.parse_args(arguments).folder).report()
    except ConfigError as error:
        parser.error(str(error))
    print(report)
    return 1 if report.races or report.stuck else 0


def _operation(record: dict[str, Any]) -> Operation:
    fence, buffer, role = record.get("fence"), record.get("buffer"), record.get("role")
    rows = record.get("rows", ())
    if buffer in SLOT_BUFFERS:
        rows = (row for row in rows if row != PADDING_SLOT)
    return Operation(
        op=LogOp(record["op"]),
        stream=StreamName(record["stream"]),
        step=int(record["step"]),
        # An attachment's memory is apart from all else; its number is no epoch's.
        epoch=int(record.get("attachment") or record["epoch"]),
        buffer=None if buffer is None else BufferName(buffer),
        rows=tuple(rows),
        fence=None if fence is None else FenceName[fence],
        value=int(record.get("value", 0)),
        role=None if role is None else Role(role),
    )


def _beginning(log: _Log) -> tuple[int, int]:
    assert log.first is not None, "empty logs are left out"
    return log.first.epoch, log.first.step


def _stream(log: _Log) -> StreamName:
    assert log.first is not None, "empty logs are left out"
    return log.first.stream


if __name__ == "__main__":
    sys.exit(main())
