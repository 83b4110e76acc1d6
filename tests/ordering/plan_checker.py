"""The happens-before checker as a plan needs it: polls may be false, the state can be copied, and waits weakened."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slipstream.common.wire.events import LogOp
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName
from tests.ordering.checker import Checker, Clock, Operation, joined, run

_STASH = {BufferName.SEQ_LENS, BufferName.BONUS_TOKENS, BufferName.NUM_NEW, BufferName.LAST_TOKENS}


class Unwritten(NamedTuple):
    """A read of a stash that verify has never written for this draft."""

    operation: Operation

    def __str__(self) -> str:
        return f"{self.operation}: nothing was stashed there for this draft"


class PlanChecker(Checker):
    """A plan must hold whether or not a poll was seen true: a poll orders only the reads that follow it at once."""

    def __init__(self, num_lanes: int) -> None:
        super().__init__(num_lanes)
        self._polled: dict[int, Clock] = {}
        """For a lane whose last fence operation was a poll, what it may look at."""
        self.unwritten: list[Unwritten] = []

    def apply(self, lane: int, operation: Operation) -> bool:
        """The lane does the operation; False, with nothing done, if that has to wait for another lane."""
        if operation.op is LogOp.POLL:
            clock = self._signalled(operation)
            if clock is not None:
                self._polled[lane] = joined(self._polled.get(lane, self._clocks[lane]), clock)
            return clock is not None
        if operation.buffer is None:
            self._polled.pop(lane, None)
            return super().apply(lane, operation)
        self._check_written(operation)
        own = self._clocks[lane]
        self._clocks[lane] = self._polled.get(lane, own)
        super().apply(lane, operation)
        self._clocks[lane] = own
        return True

    def _check_written(self, operation: Operation) -> None:
        if operation.op is LogOp.READ and operation.buffer in _STASH:
            cells = (self._cells.get((operation.epoch, operation.buffer, row)) for row in operation.rows)
            if not all(cell is not None and cell[0] is not None for cell in cells):
                self.unwritten.append(Unwritten(operation))

    def restart(self, lane: int) -> None:
        """Another process takes the lane's place: what the lane did is forgotten, and it knows nothing."""
        super().restart(lane)
        self._polled.pop(lane, None)

    def copy(self) -> PlanChecker:
        """An independent checker in the same state."""
        twin = PlanChecker(0)
        twin.races = self.races.copy()
        twin.num_accesses = self.num_accesses
        twin.num_ordered = self.num_ordered
        twin._clocks = self._clocks.copy()
        twin._polled = self._polled.copy()
        twin.unwritten = self.unwritten.copy()
        twin._signals = {key: signals.copy() for key, signals in self._signals.items()}
        twin._sends = self._sends.copy()
        twin._cells = self._cells.copy()
        return twin

    def signalled_before(self, epoch: int, fence: FenceName, value: int) -> int | None:
        """The highest value below `value` that the fence was signalled with so far."""
        signals = self._signals.get((epoch, fence), [])
        index = bisect_left(signals, (value,))
        return signals[index - 1][0] if index else None


def needless_waits(checker: PlanChecker, lanes: Sequence[Sequence[Operation]]) -> list[Operation]:
    """The waits in what the lanes are about to do that a weaker one, or none, could stand in for without a race.

    For a checker that has found none so far.
    """
    waits = [operation for lane in lanes for operation in lane if operation.op is LogOp.WAIT]
    return [wait for wait in waits if not _has_race_without(checker, lanes, wait)]


def _has_race_without(checker: PlanChecker, lanes: Sequence[Sequence[Operation]], wait: Operation) -> bool:
    assert wait.fence is not None, "a wait names the fence"
    value = checker.signalled_before(wait.epoch, wait.fence, wait.value)
    weaker = None if value is None else wait._replace(value=value)
    twin = checker.copy()
    run(twin, [_weakened(twin, lane, wait, weaker) for lane in lanes])
    return bool(twin.races)


def _weakened(
    checker: PlanChecker, lane: Sequence[Operation], wait: Operation, weaker: Operation | None
) -> Iterator[Operation]:
    for operation in lane:
        if checker.races:
            return
        if operation is not wait:
            yield operation
        elif weaker is not None:
            yield weaker
