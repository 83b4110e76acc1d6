"""Ctrl-C, and what else ends a command that has services to stop: once politely, twice at once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


def _nothing() -> None:
    """For a signal that nothing else has to be done about."""


class StopSignals:
    """Turns the first signal into the cancellation of the work, and any further one into a call of `on_second`."""

    def __init__(self, *, on_first: Callable[[], None] = _nothing, on_second: Callable[[], None] = _nothing) -> None:
        """Both are called on the event loop."""
        self._on_first = on_first
        self._on_second = on_second
        self._received: list[signal.Signals] = []

    @property
    def exit_status(self) -> int:
        """0 when the end was asked for politely, 128 and the signal's number when it was not waited for."""
        return 128 + self._received[-1] if len(self._received) > 1 else 0

    async def cancel(self, work: Coroutine[object, object, T]) -> T | None:
        """Runs the work and gives its result, or None when a signal cancelled it. Has the main thread's signals."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number, task)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._received:
                raise
            return None
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals, task: asyncio.Task[T]) -> None:
        self._received.append(number)
        if len(self._received) == 1:
            task.cancel()
            self._on_first()
        else:
            self._on_second()
