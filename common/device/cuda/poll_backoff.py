"""Waiting for a GPU on the host: sleeps that end on time, in a rhythm that is learned.

Interrupts are no help: where this was measured (H200, virtual machine), a thread that the driver wakes comes 105 us
late at the median and 640 us in one of a hundred, one that looks every 20 us comes 19 us and 30 us late.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT_S = 0.00002
LONG_S = 0.001
GROWTH = 0.04
"""The next nap as a part of the time waited so far: what took long may be seen a little later."""
RHYTHM = 4
MARGIN = 0.04
LEAST_MARGIN_S = 0.00006
"""Of an interval, and at least: how long before its expected end the looks begin. Each takes the interpreter from the
thread that has it."""
SHORT_PART = 0.01
"""Of an interval: between looks at its end, at least."""

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None)
_thread = threading.local()


def sleep_precisely(seconds: float) -> None:
    """Sleeps; the kernel else bundles a thread's wake-ups with others' up to 50 us later."""
    if not hasattr(_thread, "is_precise"):
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _thread.is_precise = True
    time.sleep(seconds)


class PollBackoff:
    """Sleeps between looks at something that should come soon."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_precisely,
        *,
        shortest_s: float = SHORT_S,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self.shortest_s = shortest_s
        """Of the first nap."""
        self._started = clock()

    def take(self, deadline: float) -> None:
        """Sleeps for a bit, at most until `deadline` of the clock."""
        now = self._clock()
        nap = min(LONG_S, self.shortest_s + GROWTH * (now - self._started))
        self._sleep(max(0.0, min(nap, deadline - now)))


class CompletionPredictor:
    """When the next of things that come one after the other is not to be expected yet."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._intervals: deque[float] = deque(maxlen=RHYTHM)

    def came(self, now: float) -> None:
        """One came."""
        if self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now

    def not_before(self, now: float) -> float:
        """No look is worth while before this time: a bit before the shortest of the last intervals is over."""
        if self._last is None or not self._intervals:
            return now
        interval = min(self._intervals)
        return max(now, self._last + interval - max(MARGIN * interval, LEAST_MARGIN_S))

    def naps(self) -> PollBackoff:
        """Between looks at what is expected: the longer the intervals, the less a late look matters."""
        interval = min(self._intervals, default=0.0)
        return PollBackoff(shortest_s=min(LONG_S, max(SHORT_S, SHORT_PART * interval)))
