"""Gives up on a stream whose client reads nothing."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from slipstream.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType


@asynccontextmanager
async def watching_writes(timeout_s: float, on_cut_off: Callable[[], None]) -> AsyncIterator[WriteWatch]:
    """The watch over a stream's writes. When one takes `timeout_s`, it calls `on_cut_off`, and the context ends.

    By then gRPC holds a few MiB of the stream. Raises ResourceExhaustedError.
    """
    timeout = asyncio.timeout(None)
    try:
        async with timeout:
            with WriteWatch(timeout, timeout_s) as watch:
                yield watch
    except TimeoutError:
        if not timeout.expired():
            raise
        on_cut_off()
        raise ResourceExhaustedError(f"the client read nothing for {timeout_s:g} s", retry_after_ms=0) from None


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
