"""Runs Python's garbage collector when the process is idle, so that it does not interrupt steps, and gives memory back.

A full collection looks at every object and stops all threads for tens of milliseconds. Reference counts free nearly
all of what a step leaves behind; cycles can wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

CHECK_INTERVAL_S = 0.1
IDLE_S = 0.25
"""The process counts as idle after this time without work: several looks in a row find none."""
MIN_NEW_OBJECTS = 1000
"""Without work, a collection needs at least this many new objects."""
BUSY_S = 60.0
"""A process that is never idle collects its younger generations this often; few of their objects are in cycles."""

NEVER = 2**30
"""Collections of the younger generations before one of all objects."""


class IdleCollection:
    """Decides when to collect."""

    def __init__(self, *, keeps_young: bool = False) -> None:
        """With `keeps_young`, Python goes on to collect the younger generations by itself: a few milliseconds each."""
        self._keeps_young = keeps_young
        self._worked_at = time.monotonic()
        self._collected_at = time.monotonic()
        self._give_back: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        """Of glibc, which keeps what was freed between other blocks."""

    def worked(self) -> None:
        """Called from any thread after each piece of work: the process is not idle."""
        self._worked_at = time.monotonic()

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Turns automatic collection off until the context ends, and never looks at earlier objects again."""
        gc.collect()
        gc.freeze()
        before = gc.get_threshold()
        if self._keeps_young:
            gc.set_threshold(*before[:2], NEVER)
        else:
            gc.disable()
        try:
            yield
        finally:
            gc.set_threshold(*before)
            gc.enable()
            gc.unfreeze()

    async def run(self, is_busy: Callable[[], bool] = lambda: False) -> NoReturn:
        """Collects when it is time, until it is cancelled. `is_busy`: True while there is work that nobody reports."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if is_busy():
                self.worked()
            self.collect_if_due()

    def collect_if_due(self) -> None:
        """Collects everything in an idle process, and the younger generations in one that has been busy for long.

        An idle process gives the system its free memory back.
        """
        now = time.monotonic()
        if self._worked_at <= self._collected_at and gc.get_count()[0] < MIN_NEW_OBJECTS:
            return
        if now - self._worked_at >= IDLE_S:
            gc.collect()
            self._give_back(0)
        elif now - self._collected_at >= BUSY_S:
            gc.collect(1)
        else:
            return
        self._collected_at = time.monotonic()
