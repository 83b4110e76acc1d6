"""How long a stream's writes may take."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class WriteWatch:
    """Lets a timeout expire when one of a stream's writes takes too long; a context manager.

    One timer for all of them, which looks at what is under way: most writes end long before a timer of their own would
    be worth its price.
    """

    def __init__(self, timeout: asyncio.Timeout, timeout_s: float) -> None:
        """`timeout`: has been entered, and expires when a write has taken `timeout_s`."""
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
        """A write begins."""
        self._begun_at = self._loop.time()

    def end(self) -> None:
        """It is done."""
        self._begun_at = None

    def _look(self) -> None:
        now = self._loop.time()
        begun_at = now if self._begun_at is None else self._begun_at
        if now - begun_at >= self._timeout_s:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(begun_at + self._timeout_s, self._look)
