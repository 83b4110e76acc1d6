"""Lets calls and streams run a few milliseconds at a time, so that the event loop serves others in between."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SLICE_S = 0.004
"""Length of a turn of the event loop."""
WOKEN_IN_A_TURN = 32
"""Futures that are set in a turn at most."""
MANY_WAITING = 128
"""With so many, turns are a quarter as long: gRPC takes in one call a turn, and a health check may be among them."""


class LoopTurns:
    """Bounds the work in each turn of the event loop, to which it belongs."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._ends_at = 0.0
        self._num_left = WOKEN_IN_A_TURN
        self._is_counting = False
        """True if something ran in this turn, so that the next one is awaited."""

    def wake(self, waiting: Iterable[asyncio.Future[None]]) -> None:
        """Sets futures, a number of them in this turn and the others in the next ones."""
        for future in waiting:
            if future.done():
                continue
            if self._num_left:
                self._num_left -= 1
                future.set_result(None)
            else:
                self._waiting[future] = None
        self._count()

    def has_time(self) -> bool:
        """True if this turn has time left for a piece of work, which counts from now on."""
        self._count()
        return time.monotonic() < self._ends_at

    async def begin(self) -> None:
        """Returns when there is time left for a piece of work."""
        while not self.has_time():
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                await future
            finally:
                self._waiting.pop(future, None)

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._ends_at = time.monotonic() + (SLICE_S if len(self._waiting) < MANY_WAITING else SLICE_S / 4)
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Begins the next turn with those that wait for longest."""
        self._is_counting = False
        self._num_left = WOKEN_IN_A_TURN if len(self._waiting) < MANY_WAITING else WOKEN_IN_A_TURN // 4
        if self._waiting:
            self._count()
        while self._waiting and self._num_left:
            future, _ = self._waiting.popitem(last=False)
            if not future.done():
                self._num_left -= 1
                future.set_result(None)
