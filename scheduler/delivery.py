"""Brings progress from the loop's thread to the clients' event loop, in bundles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from slipstream.scheduler.batch import Delivery
    from slipstream.scheduler.jobs import Job, Progress

Bundle = dict["Job", list["Progress"]]
"""What steps brought each job, in order."""

MESSAGE_S = 0.001
"""Between messages on average, of all streams together. One costs 0.1 to 0.2 ms of the interpreter's time, which the
step loop needs, too."""


class DeliveryBox:
    """Hands over at once, but not more often than every interval: steps may be faster than messages should be.

    The more jobs a bundle is for, the longer until the next: a message to each of dozens of streams costs more than a
    short step. Steps that are longer than that are handed over one by one, without delay. What somebody waits for,
    the first tokens of a job and its end, is never kept back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float, receive: Callable[[Bundle], None]) -> None:
        """`receive` is called on `loop`."""
        self._loop = loop
        self._interval_s = interval_s
        self._receive = receive
        self._lock = threading.Lock()
        self._box: Bundle = {}
        self._urgent: dict[Job, None] = {}
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0

    def put(self, deliveries: list[Delivery]) -> None:
        """Adds deliveries, from the thread that counts the jobs' tokens; the order of each job's stays."""
        if not deliveries:
            return
        with self._lock:
            box = self._box
            for job, progress in deliveries:
                if job in box:
                    box[job].append(progress)
                    is_urgent = progress.is_last
                else:
                    box[job] = [progress]
                    is_urgent = progress.is_last or job.counts.num_output_tokens == len(progress.token_ids)
                if is_urgent:
                    self._urgent[job] = None
            if self._is_woken or (self._timer is not None and not self._urgent):
                return
            self._is_woken = True
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            self._is_woken = False
            urgent = {job: self._box.pop(job) for job in self._urgent}
            self._urgent.clear()
            if self._box and self._timer is None:
                self._timer = self._loop.call_at(self._next_at, self._hand_over)
            elif not self._box and self._timer is not None:
                # Nobody's turn would be an interval that somebody has to wait.
                self._timer.cancel()
                self._timer = None
        if urgent:
            self._receive(urgent)

    def _hand_over(self) -> None:
        with self._lock:
            box, self._box = self._box, {}
            self._urgent.clear()
            self._timer = None
        self._next_at = self._loop.time() + max(self._interval_s, MESSAGE_S * len(box))
        self._receive(box)
