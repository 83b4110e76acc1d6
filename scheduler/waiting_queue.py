"""The bounded queue through which the event loop hands sequences to the step loop's thread."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from slipstream.common.errors import RETRY_AFTER_MS, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from slipstream.scheduler.records import Sequence

MOST_OVERTAKING = 16
"""Most sequences that may be started before an earlier one for which there is no room."""
MOST_HELD = 32
"""Sequences that wait for a grammar to be compiled and are asked about in one turn."""
_MOST_STALE = 64
"""Deadlines of sequences that are not queued any more and may be kept, beside as many as are queued."""


class WaitingQueue:
    """All sequences that the scheduler holds: those that wait for a slot in order, and those to cancel.

    The order is by priority, the highest first, then by arrival. Where there is no room for a sequence, up to
    MOST_OVERTAKING after it may be started first; then none is until it was.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: sequences that are held at most, waiting and running."""
        self.capacity = capacity
        self.is_stopped = False
        """True once `stop` was called."""
        self._is_woken = False
        self._are_all_held = False
        """True if all that wait were last found to be held."""
        self._epoch: int | None = None
        self._held: dict[tuple[int, int], Sequence] = {}
        self._waiting: list[Sequence] = []
        """By rank."""
        self.deadlines: list[tuple[int, int, Sequence]] = []
        """A heap: deadline, number."""
        self._num_added = 0
        self.cancelled: list[Sequence] = []
        """Sequences to end, for `take_cancelled`. It and `deadlines` are for a look without the lock, as in each step:
        a later one finds what arrives now."""
        self._changed = threading.Condition()

    def add(self, *sequences: Sequence, epoch: int | None = None) -> bool:
        """Adds sequences, all or none. Returns False, with none added, unless `epoch` is open; None: any epoch.

        Raises ResourceExhaustedError.
        """
        with self._changed:
            if self._epoch is None or epoch not in (None, self._epoch):
                return False
            if len(self._held) + len(sequences) > self.capacity:
                message = f"the scheduler is full: it has {len(self._held)} sequences, of at most {self.capacity}"
                raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
            for sequence in sequences:
                self._add(sequence)
            self._changed.notify_all()
            return True

    def _add(self, sequence: Sequence) -> None:
        assert sequence.key not in self._held, "ids of a stream only grow"
        self._held[sequence.key] = sequence
        self._num_added += 1
        spec = sequence.spec
        sequence.rank = (-spec.priority, spec.arrival, self._num_added)
        self._queue(sequence)
        if spec.deadline_ns:
            heappush(self.deadlines, (spec.deadline_ns, self._num_added, sequence))

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Has sequences that were taken wait again, where they did before. Their deadlines count no more."""
        with self._changed:
            for sequence in sequences:
                if self._held.get(sequence.key) is sequence:
                    self._queue(sequence)

    def cancel(self, stream: int, ids: Iterable[int]) -> None:
        """Asks for the end of sequences of a stream, waiting or running; no effect on those that are over."""
        with self._changed:
            self.cancelled += [found for one in ids if (found := self._held.get((stream, one))) is not None]
            self._changed.notify_all()

    def drop(self, stream: int) -> None:
        """Asks for the end of all sequences of a stream."""
        with self._changed:
            self.cancelled += [sequence for sequence in self._held.values() if sequence.stream == stream]
            self._changed.notify_all()

    def take_cancelled(self) -> list[Sequence]:
        """Returns the sequences to end since the last call, after removing those that still waited."""
        with self._changed:
            cancelled, self.cancelled = self.cancelled, []
            for sequence in cancelled:
                self._unqueue(sequence)
            self._compact()
            return cancelled

    def take_expired(self) -> list[Sequence]:
        """Removes and returns waiting sequences whose deadline is over. They are not held any more."""
        expired: list[Sequence] = []
        now = time.monotonic_ns()
        with self._changed:
            while self.deadlines and (self.deadlines[0][0] <= now or not self.deadlines[0][-1].is_queued):
                sequence = heappop(self.deadlines)[-1]
                if sequence.is_queued and not sequence.was_preempted:
                    self._unqueue(sequence)
                    del self._held[sequence.key]
                    expired.append(sequence)
            self._changed.notify_all()
        return expired

    def take_next(
        self, fits: Callable[[Sequence], bool], holds: Callable[[Sequence], bool] | None = None
    ) -> Sequence | None:
        """Takes the first waiting sequence for which `fits` says that there is room, and that may overtake the others.

        Returns None if there is none among the first MOST_OVERTAKING + 1. `holds`: says of those with a constraint
        which must wait, and are as if they were not there; None if none has any.
        """
        if not self._waiting:
            return None
        with self._changed:
            waiting = self._waiting[: MOST_OVERTAKING + 1] if holds is None else self._not_held(holds)
            for place, sequence in enumerate(waiting):
                if fits(sequence):
                    for overtaken in waiting[:place]:
                        overtaken.num_overtaken += 1
                    self._unqueue(sequence)
                    return sequence
                if sequence.num_overtaken == MOST_OVERTAKING:
                    return None
        return None

    def _not_held(self, holds: Callable[[Sequence], bool]) -> list[Sequence]:
        free: list[Sequence] = []
        num_held = 0
        for sequence in self._waiting:
            if sequence.spec.grammar and (num_held == MOST_HELD or holds(sequence)):
                num_held = min(num_held + 1, MOST_HELD)
            elif len(free) <= MOST_OVERTAKING:
                free.append(sequence)
            else:
                break
        self._are_all_held = not free
        return free

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Forgets sequences that are over."""
        with self._changed:
            for sequence in sequences:
                self._held.pop(sequence.key, None)
            self._changed.notify_all()

    def _queue(self, sequence: Sequence) -> None:
        sequence.is_queued, self._are_all_held = True, False
        insort(self._waiting, sequence, key=_rank)

    def _unqueue(self, sequence: Sequence) -> None:
        if sequence.is_queued:
            sequence.is_queued = False
            del self._waiting[bisect_left(self._waiting, sequence.rank, key=_rank)]

    def _compact(self) -> None:
        """Drops the deadlines of what is not queued any more, once they are the larger part."""
        if len(self.deadlines) > 2 * len(self._waiting) + _MOST_STALE:
            self.deadlines = [entry for entry in self.deadlines if entry[-1].is_queued]
            heapify(self.deadlines)

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleeps until there is a sequence to start or to end, `wake` or `stop` was called, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    (self._waiting and not self._are_all_held) or self.cancelled or self._is_woken or self.is_stopped
                ),
                timeout_s,
            )
            self._is_woken = False

    def wake(self) -> None:
        """Has the step loop look around, at once if it sleeps: a draft arrived, or a worker is lost."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def wait_for_stop(self, timeout_s: float) -> None:
        """Sleeps until the queue is stopped or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopped, timeout_s)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Sleeps until no sequence is held; False if the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def open(self, epoch: int) -> None:
        """Lets sequences of this epoch in."""
        with self._changed:
            self._epoch = epoch

    def close(self) -> None:
        """Forgets all sequences, and lets none in until it is opened again."""
        with self._changed:
            self._epoch = None
            for held in (self._held, self._waiting, self.deadlines, self.cancelled):
                held.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the step loop."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def holds_any(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self._held)

    @property
    def num_held(self) -> int:
        """Sequences that wait or run."""
        return len(self._held)

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
