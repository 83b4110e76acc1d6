"""Brings progress from the loop's thread to the clients' event loop, in bundles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from slipstream.scheduler.batch import Delivery


class DeliveryBox:
    """Hands over at once, but not more often than every interval: steps may be faster than messages should be.

    A message to each of dozens of streams costs more than a short step. Steps that are longer than the
    interval are handed over one by one, without delay.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, receive: Callable[[list[Delivery]], None]
    ) -> None:
        """`receive` is called on `loop`."""
        self._loop = loop
        self._interval_s = interval_s
        self._receive = receive
        self._lock = threading.Lock()
        self._box: list[Delivery] = []
        self._is_scheduled = False
        self._next_at = 0.0

    def put(self, deliveries: list[Delivery]) -> None:
        """Adds deliveries, from any thread; their order stays."""
        if not deliveries:
            return
        with self._lock:
            self._box += deliveries
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        if self._loop.time() >= self._next_at:
            self._hand_over()
        else:
            self._loop.call_at(self._next_at, self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            deliveries, self._box = self._box, []
            self._is_scheduled = False
        self._next_at = self._loop.time() + self._interval_s
        self._receive(deliveries)
