"""The thread that owns a worker's device: its pieces of work, and between them the commands of the steps."""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from slipstream.common.wire.command_socket import CommandReader

NUM_CALLS = 5
"""How many of a hanging thread's last calls are named."""
T = TypeVar("T")
P = ParamSpec("P")


class DeviceThread(ThreadPoolExecutor):
    """The one thread that owns the device. Knows how long its piece of work has taken so far.

    While it has none, it reads commands.
    """

    def __init__(self, initializer: Callable[[], None] = lambda: None) -> None:
        super().__init__(1, "device", initializer)
        self._begun_at = math.inf
        self._ident = 0
        self._has_work = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends the wait for commands; negative when it is closed."""
        self._interrupting = threading.Lock()

    @property
    def place(self) -> str:
        """The last calls that its piece of work is in."""
        stack = traceback.walk_stack(sys._current_frames().get(self._ident))
        calls = [f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})" for frame, line in stack]
        return " in ".join(calls[:NUM_CALLS])

    @property
    def busy_s(self) -> float:
        """Time since the piece of work began; 0 without one."""
        return max(0.0, time.monotonic() - self._begun_at)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        submitted = super().submit(self._timed(partial(fn, *args, **kwargs)))
        self._interrupt()
        return submitted

    def serve(self, reader: CommandReader) -> Callable[[], None]:
        """See `Serve`: reads here, between pieces of work."""
        is_over = threading.Event()

        def stop() -> None:
            is_over.set()
            self._interrupt()

        ThreadPoolExecutor.submit(self, self._serve, reader, is_over)
        return stop

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        self._interrupt()
        if wait:
            super().shutdown(wait=True)
            with self._interrupting:
                if self._has_work >= 0:
                    os.close(self._has_work)
                self._has_work = -1

    def _interrupt(self) -> None:
        """Ends a wait for commands."""
        with self._interrupting:
            if self._has_work >= 0:
                os.eventfd_write(self._has_work, 1)

    def _serve(self, reader: CommandReader, is_over: threading.Event) -> None:
        wait, read = select.poll(), self._timed(reader.read)
        wait.register(self._has_work, select.POLLIN)
        wait.register(reader, select.POLLIN)
        while not is_over.is_set():
            ready = dict(wait.poll())
            # Commands first: a Drain that came behind them finishes them, too.
            if reader.fileno() in ready and not read():
                break
            if self._has_work in ready:
                os.eventfd_read(self._has_work)
                with suppress(RuntimeError):  # shut down
                    # Behind the work that has come.
                    ThreadPoolExecutor.submit(self, self._serve, reader, is_over)
                    return
                break
        reader.close()

    def _timed(self, work: Callable[[], T]) -> Callable[[], T]:
        def timed() -> T:
            self._begun_at, self._ident = time.monotonic(), threading.get_ident()
            try:
                return work()
            finally:
                self._begun_at = math.inf

        return timed
