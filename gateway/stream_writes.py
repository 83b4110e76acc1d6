"""The writes to the streams of a gateway's clients: few are under way at a time, and none takes too long."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable

    Write = Callable[[Any], Awaitable[None]]

MAX_PENDING = 64
LONGEST_S = 0.02
"""A write that takes longer waits for its client, and leaves its place to another stream."""


class StreamWrites:
    """Bounds the writes of all streams of a gateway, those included that it forwards. Belongs to the event loop."""

    def __init__(self, timeout_s: float, on_cut_off: Callable[[], None]) -> None:
        """A stream is cut off when one of its writes takes `timeout_s`; `on_cut_off` is called then."""
        self._timeout_s = timeout_s
        self._on_cut_off = on_cut_off
        self._pending = PendingWrites()

    @asynccontextmanager
    async def bounding(self, write: Write) -> AsyncIterator[Write]:
        """Yields what writes the messages of one stream, by `write`.

        Raises ResourceExhaustedError if the client reads nothing. By then gRPC holds a few MiB of the stream.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                with WriteWatch(timeout, self._timeout_s) as watch:

                    async def write_in_turn(message: Any) -> None:
                        await self._pending.begin(watch)
                        watch.begin()
                        await write(message)
                        watch.end()
                        self._pending.end(watch)

                    try:
                        yield write_in_turn
                    finally:
                        self._pending.forget(watch)
        except TimeoutError:
            if not timeout.expired():
                raise
            self._on_cut_off()
            message = f"the client read nothing for {self._timeout_s:g} s"
            raise ResourceExhaustedError(message, retry_after_ms=0) from None


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


class WriteWatch:
    """Lets a timeout expire when one of a stream's writes takes too long; a context manager.

    It has one timer for all writes, because most end long before a timer of their own would be worth its price.
    """

    def __init__(self, timeout: asyncio.Timeout, timeout_s: float) -> None:
        """`timeout` was entered before; it expires when a write has taken `timeout_s`."""
        self._timeout = timeout
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._begun_at: float | None = None

    def __enter__(self) -> WriteWatch:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def begin(self) -> None:
        """Called when a write begins."""
        self._begun_at = self._loop.time()

    def end(self) -> None:
        """Called when it is done."""
        self._begun_at = None

    def _look(self) -> None:
        now = self._loop.time()
        begun_at = now if self._begun_at is None else self._begun_at
        if now - begun_at >= self._timeout_s:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(begun_at + self._timeout_s, self._look)
