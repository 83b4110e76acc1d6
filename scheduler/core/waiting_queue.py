"""The bounded queue through which the event loop hands sequences to the step loop's thread."""

from __future__ import annotations

import threading
import time
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from slipstream.common.errors import RETRY_AFTER_MS, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from slipstream.scheduler.core.sequence import Sequence

_MOST_STALE = 64
"""Entries that are not queued any more and may lie in a heap, beside as many as are queued."""


class WaitingQueue:
    """All sequences that the scheduler holds: those that wait for a slot in order, and those to cancel.

    The order is by priority, the highest first, then by arrival.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: sequences that are held at most, waiting and running."""
        self.capacity = capacity
        self.is_stopped = False
        """True once `stop` was called."""
        self._is_woken = False
        self._epoch: int | None = None
        self._held: dict[tuple[int, int], Sequence] = {}
        self._waiting: list[tuple[int, int, int, Sequence]] = []
        """A heap: negative priority, arrival, number."""
        self._deadlines: list[tuple[int, int, Sequence]] = []
        """A heap: deadline, number."""
        self._num_added = 0
        self._num_waiting = 0
        self._cancelled: list[Sequence] = []
        self._changed = threading.Condition()

    def add(self, *sequences: Sequence, epoch: int | None = None) -> bool:
        """Adds sequences, all or none. Returns False, with none added, unless `epoch` is open; None is any.

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
            self._changed.notify()
            return True

    def _add(self, sequence: Sequence) -> None:
        assert sequence.key not in self._held, "ids of a stream only grow"
        self._held[sequence.key] = sequence
        self._num_added += 1
        self._num_waiting += 1
        sequence.is_queued = True
        spec = sequence.spec
        heappush(self._waiting, (-spec.priority, spec.arrived_ns, self._num_added, sequence))
        if spec.deadline_ns:
            heappush(self._deadlines, (spec.deadline_ns, self._num_added, sequence))

    def cancel(self, stream: int, ids: Iterable[int]) -> None:
        """Asks for the end of sequences of a stream, waiting or running; no effect on those that are over."""
        with self._changed:
            self._cancelled += [found for one in ids if (found := self._held.get((stream, one))) is not None]
            self._changed.notify()

    def drop(self, stream: int) -> None:
        """Asks for the end of all sequences of a stream."""
        with self._changed:
            self._cancelled += [sequence for sequence in self._held.values() if sequence.stream == stream]
            self._changed.notify()

    def take_cancelled(self) -> list[Sequence]:
        """Returns the sequences to end since the last call, after removing those that still waited."""
        # A look without the lock, as this is called in each step: a later one finds what comes now.
        if not self._cancelled:
            return []
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            for sequence in cancelled:
                self._unqueue(sequence)
            self._compact()
            return cancelled

    def take_expired(self) -> list[Sequence]:
        """Removes and returns waiting sequences whose deadline is over. They are not held any more."""
        expired: list[Sequence] = []
        if not self._deadlines:
            return expired
        now = time.monotonic_ns()
        with self._changed:
            while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][-1].is_queued):
                sequence = heappop(self._deadlines)[-1]
                if sequence.is_queued:
                    self._unqueue(sequence)
                    del self._held[sequence.key]
                    expired.append(sequence)
            self._changed.notify_all()
        return expired

    def take_next(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Takes the first waiting sequence if `fits` says that there is room for it."""
        if not self._num_waiting:
            return None
        with self._changed:
            while self._waiting and not self._waiting[0][-1].is_queued:
                heappop(self._waiting)
            if not self._waiting or not fits(self._waiting[0][-1]):
                return None
            sequence = heappop(self._waiting)[-1]
            self._unqueue(sequence)
            return sequence

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Forgets sequences that are over."""
        with self._changed:
            for sequence in sequences:
                self._held.pop(sequence.key, None)
            self._changed.notify_all()

    def _unqueue(self, sequence: Sequence) -> None:
        if sequence.is_queued:
            sequence.is_queued = False
            self._num_waiting -= 1

    def _compact(self) -> None:
        """Drops what is not queued any more from the heaps, once it is the larger part."""
        if len(self._waiting) > 2 * self._num_waiting + _MOST_STALE:
            self._waiting = [entry for entry in self._waiting if entry[-1].is_queued]
            heapify(self._waiting)
        if len(self._deadlines) > 2 * self._num_waiting + _MOST_STALE:
            self._deadlines = [entry for entry in self._deadlines if entry[-1].is_queued]
            heapify(self._deadlines)

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleeps until there is a sequence to start or to end, `wake` or `stop` was called, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_waiting or self._cancelled or self._is_woken or self.is_stopped, timeout_s
            )
            self._is_woken = False

    def wake(self) -> None:
        """Has the step loop look around, at once if it sleeps: a draft came, or a worker is lost."""
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
            self._num_waiting = 0
            for held in (self._held, self._waiting, self._deadlines, self._cancelled):
                held.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the step loop."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    @property
    def num_held(self) -> int:
        """Sequences that wait or run."""
        return len(self._held)

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._num_waiting
