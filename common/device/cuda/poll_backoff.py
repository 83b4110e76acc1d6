"""Waiting for a GPU on the host: sleeps that end on time, and when to begin looking.

Interrupts do not help: where this was measured (H200, virtual machine), a thread that the driver wakes comes 105 us
late at the median and 640 us in one of a hundred, one that looks every 20 us comes 19 us and 30 us late.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.interface import PollTime

MIN_SLEEP_S = 0.00002
MAX_SLEEP_S = 0.001
GROWTH = 0.04
"""The next sleep as a part of the time waited so far: what took long may be seen a little later."""
MIN_SLEEP_PART = 0.03
"""The first sleep between looks at an expected end, as a part of the usual time. Half of it is how late the end is
seen, which the next step hides when it runs already; each look wakes the loop's thread once more."""
EXPECTED_GROWTH = 0.1
"""As `GROWTH`, for looks at an expected end."""

_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None)
_thread = threading.local()


def sleep_precisely(seconds: float) -> None:
    """Sleeps without the kernel's timer slack, which delays a thread's wake-ups by up to 50 us."""
    if not hasattr(_thread, "is_precise"):
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _thread.is_precise = True
    time.sleep(seconds)


class PollBackoff:
    """Sleeps between looks at something that should come soon; each sleep is longer than the one before."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_precisely,
        *,
        min_sleep_s: float = MIN_SLEEP_S,
        growth: float = GROWTH,
        spin_s: float = 0.0,
    ) -> None:
        """`min_sleep_s`: length of the first sleep; none before `spin_s` has passed. `growth`: see `GROWTH`."""
        self._clock = clock
        self._sleep = sleep
        self._min_sleep_s = min_sleep_s
        self._growth = growth
        self._spin_s = spin_s
        self._started = clock()

    def wait(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Sleeps between calls of `is_done` until it returns True. Returns False at `deadline` of the clock."""
        while not is_done():
            if self._clock() >= deadline:
                return False
            self.sleep(deadline)
        return True

    def sleep(self, deadline: float) -> None:
        """Sleeps once, at most until `deadline` of the clock."""
        now = self._clock()
        if now - self._started < self._spin_s:
            return
        seconds = min(MAX_SLEEP_S, self._min_sleep_s + self._growth * (now - self._started))
        self._sleep(max(0.0, min(seconds, deadline - now)))


def wait_for_expected(is_done: Callable[[], bool], deadline: float, poll_time: PollTime) -> bool:
    """Looks at something that is expected until `is_done`. The longer it takes, the less a late look matters.

    Returns False at `deadline` of `time.monotonic`.
    """
    if (early_s := min(poll_time.first_s, deadline) - time.monotonic()) > 0:
        sleep_precisely(early_s)
    if is_done():
        return True  # as a rule
    min_sleep_s = min(MAX_SLEEP_S, max(MIN_SLEEP_S, MIN_SLEEP_PART * poll_time.usual_s))
    backoff = PollBackoff(time.monotonic, sleep_precisely, min_sleep_s=min_sleep_s, growth=EXPECTED_GROWTH)
    return backoff.wait(is_done, deadline)
