"""The fence of the CPU: a word in shared memory that the waiting stream's own thread sleeps on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.common.device.cpu.futex import FutexWord
    from slipstream.common.device.interface import Stream

# A stream's thread wakes this often only so that a debugger or a core dump finds it at home.
_NAP_S = 60.0


class HostFence:
    """Implements `Fence`. A wait may be enqueued before its signal; a dead producer is released by anybody."""

    def __init__(self, word: FutexWord) -> None:
        self._word = word

    def signal(self, stream: Stream, value: int) -> None:
        """See `Fence.signal`."""
        stream.enqueue(lambda: self._word.store(value))

    def wait(self, stream: Stream, value: int) -> None:
        """See `Fence.wait`."""
        stream.enqueue(lambda: self._sleep_until(value))

    def poll(self) -> int:
        """See `Fence.poll`."""
        return self._word.load()

    def wait_on_host(self, value: int, timeout_s: float) -> bool:
        """See `Fence.wait_on_host`."""
        return self._word.wait(value, timeout_s)

    def release(self, value: int) -> None:
        """See `Fence.release`."""
        if self._word.load() < value:
            self._word.store(value)

    @property
    def is_releasable(self) -> bool:
        """See `Fence.is_releasable`."""
        return True

    def _sleep_until(self, value: int) -> None:
        while not self._word.wait(value, _NAP_S):
            pass
