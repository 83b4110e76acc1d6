"""Signals that cancel a command's work, work that ends with a context, and work that a cancellation does not end."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.common.errors import InternalError
from slipstream.common.rpc.shutdown import on_failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

T = TypeVar("T")


def _nothing() -> None:
    """Default of the callbacks."""


class StopSignals:
    """Cancels the work on the first signal, and calls `on_second` on each further signal."""

    def __init__(self, *, on_first: Callable[[], None] = _nothing, on_second: Callable[[], None] = _nothing) -> None:
        self._on_first = on_first
        self._on_second = on_second
        self._received: list[signal.Signals] = []
        self._has_failed = False

    @property
    def exit_status(self) -> int:
        """0 after at most one signal, else 128 and the last signal's number."""
        return 128 + self._received[-1] if len(self._received) > 1 else 0

    async def cancel(self, work: Coroutine[object, object, T]) -> T | None:
        """Runs the work and returns its result. None: a signal cancelled it. Takes the main thread's signals.

        Raises InternalError when a callback of the event loop failed, which cancels the work, too.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        on_failure(loop, partial(self._on_failure, task))
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number, task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._has_failed:
                raise InternalError("this command has failed; the error above says why") from None
            if not self._received:
                raise
            return None
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_failure(self, task: asyncio.Task[T]) -> None:
        """Called after a failure on the event loop that no other code sees."""
        if not self._received:
            self._has_failed = True
            task.cancel()

    def _on_signal(self, number: signal.Signals, task: asyncio.Task[T]) -> None:
        self._received.append(number)
        if len(self._received) == 1:
            task.cancel()
            self._on_first()
        else:
            self._on_second()


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs coroutines as tasks for as long as the context, then cancels them. A task's error is its user's to read."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def shielded(
    work: Coroutine[object, object, None],
    *,
    during: BaseException | None = None,
    on_cancel: Callable[[], None] = _nothing,
) -> None:
    """Runs the work to its end, in its own task, and raises its error.

    A cancellation meanwhile calls `on_cancel`, and is raised at the end unless the caller raises `during`.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    task.result()
    if cancelled is not None and during is None:
        raise cancelled
