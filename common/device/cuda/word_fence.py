"""What the fences of a GPU have in common: their counter is a word of the arena, in device memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slipstream.common.device.cuda.poll_backoff import PollBackoff

if TYPE_CHECKING:
    from slipstream.common.device.cuda.side_stream import SideStream


class WordFence:
    """The host's side of a `Fence`; how streams signal and wait is up to the kinds."""

    def __init__(self, address: int, side: SideStream, memory: object) -> None:
        """`address`: of the counter, on the device; `memory` is kept for as long as the fence is."""
        self.address = address
        self._side = side
        self._memory = memory

    def poll(self) -> int:
        """See `Fence.poll`. Takes a copy from the device, about 10 us."""
        return self._side.read_word(self.address)

    def wait_on_host(self, value: int, timeout_s: float) -> bool:
        """See `Fence.wait_on_host`."""
        deadline = time.monotonic() + timeout_s
        naps = PollBackoff()
        while self.poll() < value:
            if time.monotonic() >= deadline:
                return False
            naps.take(deadline)
        return True

    def release(self, value: int) -> None:
        """See `Fence.release`. Written from a stream that never waits."""
        if self.poll() < value:
            self._side.write_word(self.address, value)
