"""The happens-before checker: names every two accesses to a shared buffer that nothing orders.

It shares no logic with the plan. Each stream has a vector clock. A signal carries the clock of its stream, a wait
joins it, a poll that was seen true does the same, and a command carries the clock of the scheduler when it was sent.
Two accesses to the same row conflict unless both are reads; they are ordered when the later one's stream has come to
know the earlier one's time. Per row it keeps the last write and the reads since then, each with one number for its
time (Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", 2009).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.common.wire.events import LogOp, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName, Role

Clock = tuple[int, ...]
"""For each lane, the latest time of it that is known."""


class Operation(NamedTuple):
    """One operation of a stream. Which of the last fields mean something depends on `op`."""

    op: LogOp
    stream: StreamName
    step: int
    epoch: int = 0
    buffer: BufferName | None = None
    rows: tuple[int, ...] = ()
    fence: FenceName | None = None
    value: int = 0
    role: Role | None = None

    def __str__(self) -> str:
        if self.buffer is not None:
            rows = ", ".join(map(str, self.rows))
            what = f"{self.op.value} of {self.buffer.value} [{rows}]"
        elif self.fence is not None:
            what = f"{self.op.value} of {self.fence.name} {self.value}"
        else:
            what = self.op.value
        return f"{self.stream.value}'s {what} in step {self.step}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that conflict, and nothing orders them."""

    first: Operation
    second: Operation
    rows: tuple[int, ...]
    """The rows that both touch."""

    def __str__(self) -> str:
        return f"{self.first} and {self.second} collide in {list(self.rows)}: nothing orders them"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A lane that cannot go on, and the operation that it stands before."""

    lane: int
    operation: Operation

    def __str__(self) -> str:
        return f"{self.operation} never ends: it was never signalled or sent"


_Touch = tuple[int, int, Operation]
"""The lane of an access, its time there, and the access."""

_Cell = tuple[_Touch | None, tuple[_Touch, ...]]
"""A row of a buffer: its last write, and the last read of each lane since then."""

_UNTOUCHED: _Cell = (None, ())


class Checker:
    """Takes the operations of the lanes in any order in which they may have happened, and collects the races.

    A *lane* is one stream of one process, by its number.
    """

    def __init__(self, num_lanes: int) -> None:
        self.races: list[Race] = []
        self.num_accesses = 0
        """Rows accessed."""
        self.num_ordered = 0
        """Pairs of conflicting accesses on different lanes that were found in order."""
        self._clocks: list[Clock] = [
            tuple(1 if number == lane else 0 for number in range(num_lanes)) for lane in range(num_lanes)
        ]
        self._signals: dict[tuple[int, FenceName], list[tuple[int, Clock]]] = {}
        self._sends: dict[tuple[int, Role, int], Clock] = {}
        self._cells: dict[tuple[int, str, int], _Cell] = {}

    def apply(self, lane: int, operation: Operation) -> bool:
        """The lane does the operation; False, with nothing done, if that has to wait for another lane."""
        if operation.buffer is not None:
            self._access(lane, operation)
            return True
        match operation.op:
            case LogOp.SIGNAL | LogOp.RELEASE:
                assert operation.fence is not None, "a signal names the fence"
                signals = self._signals.setdefault((operation.epoch, operation.fence), [])
                insort(signals, (operation.value, self._tick(lane)))
            case LogOp.WAIT | LogOp.POLL:
                return self._join(lane, self._signalled(operation))
            case LogOp.SEND:
                assert operation.role is not None, "a send names the role"
                self._sends[operation.epoch, operation.role, operation.step] = self._tick(lane)
            case LogOp.RECV:
                return self._join(lane, self._sends.get((operation.epoch, Role(operation.stream), operation.step)))
        return True

    def restart(self, lane: int) -> None:
        """Another process takes the lane's place: what the lane did is forgotten, and it knows nothing."""
        for key, (write, reads) in self._cells.items():
            kept_write = None if write is not None and write[0] == lane else write
            self._cells[key] = kept_write, tuple(touch for touch in reads if touch[0] != lane)
        own_time = self._clocks[lane][lane]
        self._clocks[lane] = (*(0,) * lane, own_time, *(0,) * (len(self._clocks) - lane - 1))

    def _signalled(self, wait: Operation) -> Clock | None:
        """The clock of the first signal that ends the wait, if there is one by now."""
        assert wait.fence is not None, "a wait names the fence"
        signals = self._signals.get((wait.epoch, wait.fence), [])
        index = bisect_left(signals, (wait.value,))
        return signals[index][1] if index < len(signals) else None

    def _join(self, lane: int, clock: Clock | None) -> bool:
        if clock is None:
            return False
        self._clocks[lane] = joined(self._clocks[lane], clock)
        return True

    def _tick(self, lane: int) -> Clock:
        """The lane's clock, to be carried; what the lane does afterwards is later than it."""
        carried = self._clocks[lane]
        self._clocks[lane] = (*carried[:lane], carried[lane] + 1, *carried[lane + 1 :])
        return carried

    def _access(self, lane: int, operation: Operation) -> None:
        cells, clock = self._cells, self._clocks[lane]
        touch = lane, clock[lane], operation
        is_write = operation.op is LogOp.WRITE
        epoch, buffer = operation.epoch, operation.buffer
        assert buffer is not None, "an access names the buffer"
        collisions: dict[Operation, list[int]] = {}
        for row in operation.rows:
            key = epoch, buffer, row
            write, reads = cells.get(key, _UNTOUCHED)
            if write is not None and write[0] != lane:
                self._compare(write, clock, row, collisions)
            if is_write:
                for read in reads:
                    if read[0] != lane:
                        self._compare(read, clock, row, collisions)
                cells[key] = touch, ()
            elif not reads or (len(reads) == 1 and reads[0][0] == lane):
                cells[key] = write, (touch,)
            else:
                cells[key] = write, (*(read for read in reads if read[0] != lane), touch)
        self.num_accesses += len(operation.rows)
        if collisions:
            self.races.extend(Race(first, operation, tuple(rows)) for first, rows in collisions.items())

    def _compare(self, earlier: _Touch, clock: Clock, row: int, collisions: dict[Operation, list[int]]) -> None:
        lane, time, operation = earlier
        if time > clock[lane]:
            collisions.setdefault(operation, []).append(row)
        else:
            self.num_ordered += 1


def run(checker: Checker, lanes: Sequence[Iterable[Operation]]) -> list[Stuck]:
    """Runs every lane as far as it comes; returns those that do not come to their end.

    Whatever order the lanes really ran in, the outcome is the same: a fence only grows, so what a lane
    waits for stays true.
    """
    remaining = [iter(lane) for lane in lanes]
    heads = [next(lane, None) for lane in remaining]
    apply = checker.apply
    has_moved = True
    while has_moved:
        has_moved = False
        for number, lane in enumerate(remaining):
            head = heads[number]
            while head is not None and apply(number, head):
                head = next(lane, None)
                has_moved = True
            heads[number] = head
    return [Stuck(number, head) for number, head in enumerate(heads) if head is not None]


def joined(left: Clock, right: Clock) -> Clock:
    """The clock of a lane that knows both."""
    return tuple(map(max, left, right))
