"""Ends a process: the first signal lets it finish its work, the second does not wait, and a failure without a caller
ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OURS = "slipstream."


def on_failure(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Has `call` called after an exception of our code in a callback of the event loop, which has no caller.

    What the callback had taken out of a queue is lost then. Failures of others are logged: gRPC has some that mean
    nothing. A task's failure counts if its callback is `raise_failure`.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        log_failure(loop, context)
        if _is_ours(context.get("exception")):
            call()

    loop.set_exception_handler(handle)


def log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles the exceptions of an event loop: logs all but two of gRPC's that mean nothing."""
    error = context.get("exception")
    if _is_ours(error) or not _is_of_grpcs_poller(error):
        loop.default_exception_handler(context)


def raise_failure(task: asyncio.Future[Any]) -> None:
    """Callback of a task that nothing awaits: raises its exception on the event loop."""
    if not task.cancelled():
        task.result()


def end_at_once() -> None:
    """Ends this process, which has lost something: what it kept for others is in a journal, or at its callers."""
    logger.critical("this process has failed, and ends at once")
    logging.shutdown()
    os._exit(1)


def _is_ours(error: BaseException | None) -> bool:
    frames = () if error is None else walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(_OURS) for frame, _ in frames)


def _is_of_grpcs_poller(error: BaseException | None) -> bool:
    # It serves all event loops of the process, and loses nothing where it reads a byte that another one has read
    # (grpc/grpc#25364), or calls one that is closed.
    return isinstance(error, BlockingIOError) or (
        isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    )


class ShutdownSignals:
    """Handles SIGTERM and SIGINT while the context is open. Enter it on the main thread in a running loop.

    The second signal ends the process at once with 128 + its number. The handlers are the interpreter's, not the event
    loop's, so that a process with a stuck loop can still be ended. A failure without a caller, of the event loop or of
    a thread, ends it at once with 1.
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._is_first = True

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        on_failure(self._loop, end_at_once)
        self._thread_hook, threading.excepthook = threading.excepthook, self._on_thread_failure
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        threading.excepthook = self._thread_hook
        self._loop.set_exception_handler(None)

    def request(self) -> None:
        """Requests the end as the first signal would; call it on the event loop."""
        self._requested.set()

    async def wait(self) -> None:
        """Returns when the process is to end."""
        await self._requested.wait()

    def _on_thread_failure(self, failure: threading.ExceptHookArgs) -> None:
        self._thread_hook(failure)
        if _is_ours(failure.exc_value):
            end_at_once()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_first:
            os._exit(128 + number)
        self._is_first = False
        self._loop.call_soon_threadsafe(self._requested.set)
        # Not here: the handler may have interrupted code that holds a lock of `logging`.
        self._loop.call_soon_threadsafe(logger.info, "%s: finishing up", signal.Signals(number).name)
