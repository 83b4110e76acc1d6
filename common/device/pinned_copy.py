"""Results on the host: copies into pinned memory, on a stream of their own."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.common.device import timeline_fence
from slipstream.common.device.cuda_side import MemoryCopy
from slipstream.common.device.naps import Naps, Rhythm, sleep_precisely

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.device.cuda_driver import CudaDriver
    from slipstream.common.device.cuda_side import SideStream
    from slipstream.common.device.timeline_fence import TimelineFence
    from slipstream.common.device.word_fence import WordFence

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
_given_up: list[PinnedCopy] = []
"""They may still be written to."""


class PinnedRows:
    """Rows of shared buffers, and their mirrors in pinned memory."""

    def __init__(self, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        """`sources`: the rows of each buffer, contiguous, of the device."""
        self._sources = sources
        mirrors = [
            torch.zeros((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True).unbind() for rows in sources
        ]
        self.mirrors = [list(row) for row in zip(*mirrors, strict=True)]
        """By row."""
        self.copies = [
            [MemoryCopy(s.data_ptr(), m.data_ptr(), s.nbytes) for s, m in zip(row, mirror, strict=True)]
            for row, mirror in zip(zip(*sources, strict=True), self.mirrors, strict=True)
        ]
        """By row: what brings it to its mirror."""


class PinnedCopy:
    """Implements `HostCopy` behind a timeline fence.

    The stream waits for the fence, copies, and then says so in a word of pinned memory, which the host looks at when
    the rhythm of the steps so far lets it be expected: an interrupt would come later.
    """

    def __init__(self, driver: CudaDriver, fence: TimelineFence, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        """`sources`: the rows of each buffer, contiguous, of the device."""
        self._driver = driver
        self._fence = fence
        self._stream = driver.create_stream()
        self._rows = PinnedRows(sources)
        self._landed_word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._landed = ctypes.c_int64.from_address(self._landed_word.data_ptr())
        self._started = 0
        self._rhythm = Rhythm()

    def start(self, value: int, row: int) -> None:
        """See `HostCopy.start`."""
        self._started = value
        self._fence.hold(self._stream, value)
        for copy in self._rows.copies[row]:
            self._driver.call(cu.cuMemcpyDtoHAsync, copy.target, copy.source, copy.size, self._stream)
        timeline_fence.write(self._driver, self._stream, self._landed_word.data_ptr(), value)

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        """See `HostCopy.finish`. The rows are those of the mirror: they stay until the row's next copy."""
        if not self._wait(value, timeout_s):
            return None
        self._rhythm.came(time.monotonic())
        return self._rows.mirrors[row]

    def close(self) -> None:
        """See `HostCopy.close`."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        naps = Naps()
        # Repeated: a producer that is late may set the word back.
        while self._landed.value < self._started:
            if time.monotonic() > deadline:
                logger.warning("the copy stream does not come to its end: it is given up")
                _given_up.append(self)
                return
            self._fence.release(self._started)
            naps.take(deadline)
        self._driver.call(cu.cuStreamDestroy, self._stream)

    def _wait(self, value: int, timeout_s: float) -> bool:
        if self._landed.value >= value:
            return True
        now = time.monotonic()
        deadline = now + timeout_s
        sleep_precisely(min(self._rhythm.not_before(now), deadline) - now)
        naps = Naps()
        while self._landed.value < value:
            if time.monotonic() >= deadline:
                return False
            naps.take(deadline)
        return True


class LatePinnedCopy:
    """Implements `HostCopy` behind an event fence: no stream waits for it, so that a dead producer holds up none."""

    def __init__(self, side: SideStream, fence: WordFence, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        self._side = side
        self._fence = fence
        self._rows = PinnedRows(sources)

    def start(self, value: int, row: int) -> None:
        """Nothing to do ahead of time."""

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        """See `HostCopy.finish`."""
        if not self._fence.wait_on_host(value, timeout_s):
            return None
        self._side.copy_all(self._rows.copies[row])
        return self._rows.mirrors[row]

    def close(self) -> None:
        """Nothing is under way between two calls."""
