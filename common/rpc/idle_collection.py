"""Python's garbage collector, kept out of the way of steps: it runs when there is nothing to do.

A full collection looks at every object of the process, and nothing else of it moves meanwhile: tens of milliseconds.
Reference counts free nearly all of what a step leaves behind; what refers to itself can wait.
"""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK_S = 0.5
IDLE_S = 0.25
"""Without work for so long, the process is idle."""
MANY_OBJECTS = 1000
"""So many more than after the last collection are looked at even where none of the work that is told was done."""
BUSY_S = 60.0
"""A process that never is looks at its youngest objects this often: those that most of it could be are few."""


class IdleCollection:
    """Says when to collect. `worked` is called from any thread, for each piece of work."""

    def __init__(self) -> None:
        self._worked_at = time.monotonic()
        self._collected_at = time.monotonic()

    def worked(self) -> None:
        """Something was just done: not now."""
        self._worked_at = time.monotonic()

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """While this is open the collector does not run by itself. What is there already is never looked at again."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    async def run(self) -> None:
        """Collects, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Collects if this is the moment."""
        now = time.monotonic()
        if self._worked_at <= self._collected_at and gc.get_count()[0] < MANY_OBJECTS:
            return
        if now - self._worked_at >= IDLE_S:
            gc.collect()
        elif now - self._collected_at >= BUSY_S:
            gc.collect(1)
        else:
            return
        self._collected_at = time.monotonic()
