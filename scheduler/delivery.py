"""Brings progress from the loop's thread to the clients' event loop, in bundles."""

from __future__ import annotations

import threading
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from slipstream.scheduler.batch import Delivery
    from slipstream.scheduler.jobs import Job


MESSAGE_S = 0.001
"""Between messages, of all streams together. One costs 0.1 to 0.2 ms of the interpreter's time, which the step loop
needs, too."""


class DeliveryBox:
    """Hands over what came for one job after the other, in turns.

    Steps may be faster than messages should be: a message to each of dozens of streams costs more than a short step. So
    each job has its turn once an interval, or less often where there are many. What somebody waits for, the first
    tokens of a job and its end, is handed over at once.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, receive: Callable[[list[Delivery]], None]
    ) -> None:
        """`receive` is called on `loop`."""
        self._loop = loop
        self._interval_s = interval_s
        self._receive = receive
        self._lock = threading.Lock()
        self._box: dict[Job, list[Delivery]] = {}
        self._urgent: dict[Job, None] = {}
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._turns: dict[Job, float] = {}
        """When each job had its last one."""
        self._last_turn = -inf

    def put(self, deliveries: list[Delivery]) -> None:
        """Adds deliveries, from the thread that counts the jobs' tokens; the order of each job's stays."""
        if not deliveries:
            return
        with self._lock:
            for delivery in deliveries:
                job, progress = delivery
                self._box.setdefault(job, []).append(delivery)
                if progress.is_last or job.counts.num_output_tokens == len(progress.token_ids):
                    self._urgent[job] = None
            if self._is_woken or (self._timer is not None and not self._urgent):
                return
            self._is_woken = True
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            self._is_woken = False
            urgent = [delivery for job in self._urgent for delivery in self._box.pop(job)]
            self._urgent.clear()
            self._plan_turn()
        for job, progress in urgent:
            if progress.is_last:
                self._turns.pop(job, None)
        if urgent:
            self._receive(urgent)

    def _turn(self) -> None:
        """For the job that waits longest."""
        now = self._loop.time()
        with self._lock:
            self._timer = None
            if not self._box:
                return
            job = next(iter(self._box))
            deliveries = self._box.pop(job)
            self._urgent.pop(job, None)
            self._last_turn = now
            self._plan_turn()
        if deliveries[-1][1].is_last:
            self._turns.pop(job, None)
        else:
            self._turns[job] = now
        self._receive(deliveries)

    def _plan_turn(self) -> None:
        if self._box and self._timer is None:
            own = self._turns.get(next(iter(self._box)), -inf) + self._interval_s
            self._timer = self._loop.call_at(max(self._last_turn + MESSAGE_S, own), self._turn)
