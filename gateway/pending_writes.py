"""Bounds the messages that gRPC has been given and has not passed on yet, of all streams together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

MAX_PENDING = 64
LONGEST_S = 0.02
"""A write that takes longer waits for its client, and leaves its place to another stream."""


class PendingWrites:
    """Lets a number of streams write at a time. Belongs to the event loop.

    gRPC reports the end of each write, and of each part of any other call, in one queue. If a thousand streams wrote at
    the same time, a health check would wait behind them all several times.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_PENDING)
        self._begun: dict[Hashable, float] = {}
        """The streams that have a place, with the times at which their writes began, the earliest first."""
        self._slow: dict[Hashable, float] = {}
        """The same for streams whose last write took too long: they get no place, and need none."""
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, stream: Hashable) -> None:
        """Returns when the stream may write."""
        loop = asyncio.get_running_loop()
        if stream in self._slow:
            self._slow[stream] = loop.time()
            return
        await self._room.acquire()
        self._begun[stream] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(LONGEST_S, self._look)

    def end(self, stream: Hashable) -> None:
        """Called when its write is over."""
        if self._begun.pop(stream, None) is not None:
            self._room.release()
        elif asyncio.get_running_loop().time() - self._slow[stream] < LONGEST_S:
            del self._slow[stream]

    def forget(self, stream: Hashable) -> None:
        """Called when the stream is over, in the midst of a write or not."""
        self._slow.pop(stream, None)
        if self._begun.pop(stream, None) is not None:
            self._room.release()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() - LONGEST_S
        for stream in [stream for stream, begun_at in self._begun.items() if begun_at <= latest]:
            self._slow[stream] = self._begun.pop(stream)
            self._room.release()
        self._timer = loop.call_later(LONGEST_S, self._look) if self._begun else None
