"""The bounded queue through which the gateway's event loop hands sequences to the step loop's thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from slipstream.common.errors import RETRY_AFTER_MS, ResourceExhaustedError, UnavailableError
from slipstream.scheduler.core.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.api.sequence import SequenceSpec, SubmittedSequence


class WaitingQueue:
    """Sequences that wait for a slot, first come first served, and those to cancel. Implements `Core`."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: sequences that may wait at the same time."""
        self.capacity = capacity
        self._waiting: deque[Sequence] = deque()
        self._cancelled: list[Sequence] = []
        self._closed_by: str | None = "the scheduler has not started yet"
        self._is_stopped = False
        self._is_shut = False
        self._changed = threading.Condition()

    def submit(self, *specs: SequenceSpec) -> tuple[Sequence, ...]:
        """See `Core.submit`."""
        sequences = tuple([Sequence(spec) for spec in specs])
        self.add(*sequences)
        return sequences

    def add(self, *sequences: Sequence) -> None:
        """Adds sequences, all or none. Raises ResourceExhaustedError, or UnavailableError if it is closed."""
        with self._changed:
            self.check_room(len(sequences))
            self._waiting.extend(sequences)
            self._changed.notify()

    def check_room(self, num_sequences: int = 1) -> None:
        """See `Core.check_room`."""
        with self._changed:
            if self._closed_by is not None:
                raise UnavailableError(self._closed_by, retry_after_ms=RETRY_AFTER_MS)
            if len(self._waiting) + num_sequences > self.capacity:
                few = "full" if num_sequences == 1 else f"too full for {num_sequences} more"
                message = f"the queue is {few}: {len(self._waiting)} jobs are waiting, of at most {self.capacity}"
                raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)

    def cancel(self, sequence: SubmittedSequence) -> None:
        """See `Core.cancel`."""
        assert isinstance(sequence, Sequence), "a sequence that `submit` returned"
        with self._changed:
            self._cancelled.append(sequence)
            self._changed.notify()

    def take_cancelled(self) -> list[Sequence]:
        """Returns the sequences to end since the last call, after removing those that still waited."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            for sequence in cancelled:
                if sequence in self._waiting:
                    self._waiting.remove(sequence)
            return cancelled

    def take_next(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Takes the oldest waiting sequence if `fits` says that there is room for it."""
        with self._changed:
            if self._waiting and fits(self._waiting[0]):
                return self._waiting.popleft()
            return None

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleeps until there is a sequence to start or to end, the queue is stopped, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._cancelled or self._is_stopped, timeout_s)

    def wait_for_stop(self, timeout_s: float) -> None:
        """Sleeps until the queue is stopped or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped, timeout_s)

    def open(self) -> None:
        """Lets sequences in, unless the queue was shut."""
        with self._changed:
            if not self._is_shut:
                self._closed_by = None

    def close(self, reason: str) -> None:
        """Refuses new sequences with `reason`; those that wait stay."""
        with self._changed:
            if not self._is_shut:
                self._closed_by = reason

    def shut(self, reason: str) -> None:
        """Closes it for good: `open` has no effect any more."""
        with self._changed:
            self._closed_by, self._is_shut = reason, True

    def stop(self) -> None:
        """Ends the step loop."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def take_all(self) -> list[Sequence]:
        """Empties the queue."""
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            return waiting

    @property
    def is_shut(self) -> bool:
        """True once `shut` was called."""
        return self._is_shut

    @property
    def is_stopped(self) -> bool:
        """True once `stop` was called."""
        return self._is_stopped

    def __len__(self) -> int:
        return len(self._waiting)
