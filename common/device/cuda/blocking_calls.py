"""Calls of the driver that wait for all streams of this process, kept apart from streams that wait for other processes.

Taking memory, giving it back and destroying events may wait until every stream of the process is idle, and until then
other threads' calls of the driver do not return. The step loop's calls keep the interpreter (`StreamCalls`). So where a
copy waits for a step whose command a thread of this process has yet to send, no thread could go on any more. Worse, the
garbage collector gives back on any thread, at any time. So what is spent is noted, and these calls are made while no
stream waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.common.device.cuda.poll_backoff import PollBackoff
from slipstream.common.errors import DeadlineExceededError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.common.device.cuda.driver import CudaDriver

AT_REST_TIMEOUT_S = 2.0
"""Far more than the steps under way take. The step loop may be held up for as long, where verify hangs."""


class WaitingStream(Protocol):
    """A stream that waits for other processes at times."""

    def is_at_rest(self) -> bool:
        """Returns whether it waits for nothing."""
        ...


class BlockingCalls:
    """Keeps the streams that wait, and what is to be given back. Any thread may call."""

    def __init__(self, driver: CudaDriver) -> None:
        self.lock = threading.Lock()
        """Held while a stream is made to wait, and while none may be."""
        self._driver = driver
        self._streams: set[WaitingStream] = set()
        self._spent: deque[tuple[Callable[..., Any], object]] = deque()
        """A function of the driver for each, and its argument."""

    def watch(self, stream: WaitingStream) -> None:
        """A stream begins that waits at times; it is made to under `lock`."""
        self._streams.add(stream)

    def forget(self, stream: WaitingStream) -> None:
        """The stream is closed, or given up."""
        self._streams.discard(stream)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Gives back what is spent, and has no stream wait for another process until the context ends.

        Raises DeadlineExceededError if one does not come to rest.
        """
        with self.lock:
            deadline = time.monotonic() + AT_REST_TIMEOUT_S
            for stream in tuple(self._streams):
                if not PollBackoff().wait(stream.is_at_rest, deadline):
                    raise DeadlineExceededError(f"steps under way have not ended within {AT_REST_TIMEOUT_S:.1f} s")
            while self._spent:
                function, argument = self._spent.popleft()
                # A GPU that failed takes nothing back; the next call reports it.
                with contextlib.suppress(DeviceError):
                    self._driver.call(function, argument)
            yield

    def spend(self, function: Callable[..., Any], argument: object) -> None:
        """Notes a call of the driver that gives something back."""
        self._spent.append((function, argument))

    def give_back(self) -> None:
        """Gives back what is spent. Leaves it for the next time if a stream does not come to rest."""
        if self._spent:
            with contextlib.suppress(DeadlineExceededError), self.at_rest():
                pass
