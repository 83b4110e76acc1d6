"""Where the event loop hands jobs to the scheduler's loop: a bounded queue that two threads share."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from slipstream.common.errors import ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.scheduler.core.sequence import Sequence

RETRY_AFTER_MS = 500


class WaitingQueue:
    """Jobs that wait for a slot, first come first served, and the wish to end some of them."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: jobs that may wait at the same time."""
        self.capacity = capacity
        self._waiting: deque[Sequence] = deque()
        self._cancelled: list[Sequence] = []
        self._closed_by: str | None = "the scheduler has not started yet"
        self._is_stopped = False
        self._is_shut = False
        self._changed = threading.Condition()

    def submit(self, *jobs: Sequence) -> None:
        """Adds jobs, all or none. Raises ResourceExhaustedError when the queue is full, UnavailableError if closed."""
        with self._changed:
            self.check_room(len(jobs))
            self._waiting.extend(jobs)
            self._changed.notify()

    def check_room(self, num_jobs: int = 1) -> None:
        """Raises what `submit` would raise for so many jobs now."""
        with self._changed:
            if self._closed_by is not None:
                raise UnavailableError(self._closed_by)
            if len(self._waiting) + num_jobs > self.capacity:
                few = "full" if num_jobs == 1 else f"too full for {num_jobs} more"
                message = f"the queue is {few}: {len(self._waiting)} jobs are waiting, of at most {self.capacity}"
                raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)

    def cancel(self, job: Sequence) -> None:
        """Asks for the end of a job, waiting or running; no effect on one that is over."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    def take_cancelled(self) -> list[Sequence]:
        """The jobs to end since the last call; those that still waited are taken out of the queue."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            for job in cancelled:
                if job in self._waiting:
                    self._waiting.remove(job)
            return cancelled

    def take_next(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The oldest waiting job, if `fits` says that there is room for it."""
        with self._changed:
            if self._waiting and fits(self._waiting[0]):
                return self._waiting.popleft()
            return None

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleeps until there is a job to start or to end, the queue is stopped, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._cancelled or self._is_stopped, timeout_s)

    def wait_for_stop(self, timeout_s: float) -> None:
        """Sleeps until the queue is stopped or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped, timeout_s)

    def open(self) -> None:
        """Lets jobs in, unless the queue was shut."""
        with self._changed:
            if not self._is_shut:
                self._closed_by = None

    def close(self, reason: str) -> None:
        """Refuses new jobs with `reason`; those that wait stay."""
        with self._changed:
            if not self._is_shut:
                self._closed_by = reason

    def shut(self, reason: str) -> None:
        """Closes it for good: workers that come back do not open it again."""
        with self._changed:
            self._closed_by, self._is_shut = reason, True

    def stop(self) -> None:
        """Wakes the scheduler's loop for good."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def take_all(self) -> list[Sequence]:
        """Empties the queue."""
        with self._changed:
            jobs, self._waiting = list(self._waiting), deque()
            return jobs

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called."""
        return self._is_shut

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopped

    def __len__(self) -> int:
        return len(self._waiting)
