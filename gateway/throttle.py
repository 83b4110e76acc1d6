"""Brings progress from the loop's thread to the clients' event loop: some jobs' with each step, in turn."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from slipstream.scheduler.core.batch import Delivery
    from slipstream.scheduler.core.sequence import Sequence, SequenceOutput

Bundle = dict["Sequence", list["SequenceOutput"]]
"""What steps brought each job, in order."""

MESSAGE_S = 0.001
"""Between messages on average, of all streams together: the step loop needs the interpreter, too."""
PATIENCE = 2
"""Turns that a job waits for when no more steps come that would bring it its own."""


class _Waiting(NamedTuple):
    """What there is to tell of a job."""

    since: float
    steps: list[SequenceOutput]


class OutputThrottle:
    """Hands over at once, but no job's more often than every interval, and of all jobs only so many at a time.

    Steps may be faster than messages should be, and messages to dozens of streams at once would hold up several short
    steps: so jobs take turns, those first that have waited the longest. Steps that are longer than that are handed
    over one by one, without delay. What somebody waits for, the first tokens of a job and its end, is never kept back.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval_s: float,
        receive: Callable[[Bundle], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`receive` is called on `loop`."""
        self._loop = loop
        self._interval_s = interval_s
        self._receive = receive
        self._clock = clock
        self._lock = threading.Lock()
        self._box: dict[Sequence, _Waiting] = {}
        """In the order of their turns."""
        self._told_at: dict[Sequence, float] = {}
        self._outgoing: Bundle = {}
        self._credit = 0.0
        """Messages that may go out."""
        self._credited_at = 0.0
        self._is_woken = False
        self._is_timed = False

    def put(self, deliveries: list[Delivery]) -> None:
        """Adds deliveries, from the thread that counts the jobs' tokens; the order of each job's stays."""
        if not deliveries:
            return
        now = self._clock()
        box, told_at = self._box, self._told_at
        with self._lock:
            for job, progress in deliveries:
                if job in box:
                    box[job].steps.append(progress)
                else:
                    box[job] = _Waiting(now, [progress])
                if progress.is_last:
                    self._take(job, now)
                    del told_at[job]
                elif job not in told_at:
                    self._take(job, now)
            self._take_due(now)
            has_no_timer = bool(self._box) and not self._is_timed
            if self._is_woken or not (self._outgoing or has_no_timer):
                return
            self._is_woken = True
        self._loop.call_soon_threadsafe(self._wake)

    def _take_due(self, now: float) -> None:
        self._credit = min(self._credit + (now - self._credited_at) / MESSAGE_S, len(self._box))
        self._credited_at = now
        if self._credit < 1:
            return
        latest = now - self._interval_s
        due = [job for job in self._box if self._told_at[job] <= latest][: int(self._credit)]
        self._credit -= len(due)
        for job in due:
            self._take(job, now)

    def _take(self, job: Sequence, now: float) -> None:
        steps = self._box.pop(job).steps
        self._told_at[job] = now
        if job in self._outgoing:
            self._outgoing[job] += steps
        else:
            self._outgoing[job] = steps

    def _wake(self) -> None:
        with self._lock:
            self._is_woken = False
            bundle, self._outgoing = self._outgoing, {}
            if self._box and not self._is_timed:
                self._start_timer()
        if bundle:
            self._receive(bundle)

    def _start_timer(self) -> None:
        self._is_timed = True
        self._loop.call_later(self._patience_s, self._look_for_the_late)

    @property
    def _patience_s(self) -> float:
        return PATIENCE * max(self._interval_s, MESSAGE_S * len(self._box))

    def _look_for_the_late(self) -> None:
        """Nobody's last words stay here because others' steps take long, or bring nobody anything."""
        now = self._clock()
        with self._lock:
            self._is_timed = False
            latest = now - self._patience_s
            for job in [job for job, waiting in self._box.items() if waiting.since <= latest]:
                self._take(job, now)
            bundle, self._outgoing = self._outgoing, {}
            if self._box:
                self._start_timer()
        if bundle:
            self._receive(bundle)
