"""Ends a process: the first signal lets it finish its work, the second does not wait."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownSignals:
    """Handles SIGTERM and SIGINT while the context is open. Enter it on the main thread in a running loop.

    The second signal ends the process at once with 128 + its number. The handlers are the interpreter's, not the event
    loop's, so that a process with a stuck loop can still be ended.
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._is_first = True

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Requests the end as the first signal would; call it on the event loop."""
        self._requested.set()

    async def wait(self) -> None:
        """Returns when the process is to end."""
        await self._requested.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_first:
            os._exit(128 + number)
        self._is_first = False
        self._loop.call_soon_threadsafe(self._requested.set)
        # Not here: the handler may have interrupted code that holds a lock of `logging`.
        self._loop.call_soon_threadsafe(logger.info, "%s: finishing up", signal.Signals(number).name)
