"""Results on the host: copies into pinned memory, on a stream of their own."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.common.device.cuda.poll_backoff import CompletionPredictor, PollBackoff, sleep_precisely
from slipstream.common.device.cuda.side_stream import MemoryCopy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.cuda.fences import TimelineFence, WordFence
    from slipstream.common.device.cuda.side_stream import SideStream

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
MAX_GAP_BYTES = 32 << 10
"""What lies between two rows and is copied with them, at most: takes less than a copy more."""
_ALIGNMENT_BYTES = 16
_given_up: list[PinnedCopy] = []
"""They may still be written to."""


class PinnedRow:
    """A row of each of several shared buffers, and their mirrors in pinned memory."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        """`sources`: contiguous, of one allocation on the device."""
        spans = _spans(sources)
        # What lies between the sources comes along, and nobody looks at it.
        pinned = [torch.zeros(end - begin, dtype=torch.uint8, pin_memory=True) for begin, end in spans]
        self.copies = [
            MemoryCopy(begin, block.data_ptr(), end - begin) for (begin, end), block in zip(spans, pinned, strict=True)
        ]
        """What brings the row to its mirrors."""
        self.mirrors = [_mirror(source, spans, pinned) for source in sources]
        """In the order of `sources`."""


def _spans(sources: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Addresses from and up to which to copy, so that all sources are in it: neighbours in one go."""
    spans: list[tuple[int, int]] = []
    addresses = [(source.data_ptr(), source.data_ptr() + source.nbytes) for source in sources]
    # From where whatever follows is aligned in the mirror as it is here.
    for begin, end in sorted((begin - begin % _ALIGNMENT_BYTES, end) for begin, end in addresses):
        if spans and begin - spans[-1][1] <= MAX_GAP_BYTES:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _mirror(source: torch.Tensor, spans: list[tuple[int, int]], pinned: list[torch.Tensor]) -> torch.Tensor:
    address = source.data_ptr()
    index = next(index for index, (begin, end) in enumerate(spans) if begin <= address < end)
    offset = address - spans[index][0]
    return pinned[index][offset : offset + source.nbytes].view(source.dtype).view(source.shape)


def _pinned_rows(sources: Sequence[Sequence[torch.Tensor]]) -> list[PinnedRow]:
    """`sources`: the rows of each buffer."""
    return [PinnedRow(row) for row in zip(*sources, strict=True)]


class PinnedCopy:
    """Implements `HostCopy` behind a timeline fence.

    The stream waits for the fence, copies, and then says so in a word of pinned memory, which the host looks at when
    the steps so far let it be expected: an interrupt would come later.
    """

    def __init__(self, driver: CudaDriver, fence: TimelineFence, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        """`sources`: the rows of each buffer, contiguous, of the device."""
        self._driver = driver
        self._fence = fence
        self._stream = driver.create_stream()
        self._rows = _pinned_rows(sources)
        self._landed_word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._landed_address = self._landed_word.data_ptr()
        self._landed = ctypes.c_int64.from_address(self._landed_address)
        self._started = 0
        self._predictor = CompletionPredictor()

    def start(self, value: int, row: int) -> None:
        self._started = value
        self._fence.wait_on_stream(self._stream, value)
        streams = self._driver.streams
        for copy in self._rows[row].copies:
            streams.copy_to_host(self._stream, copy.target, copy.source, copy.size)
        streams.write(self._stream, self._landed_address, value)

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        """The rows are those of the mirror: they stay until the row's next copy."""
        if not self._wait(value, timeout_s):
            return None
        self._predictor.completed(time.monotonic())
        return self._rows[row].mirrors

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        backoff = PollBackoff()
        # Repeated: a producer that is late may set the word back.
        while self._landed.value < self._started:
            if time.monotonic() > deadline:
                logger.warning("the copy stream does not come to its end: it is given up")
                _given_up.append(self)
                return
            self._fence.release(self._started)
            backoff.sleep(deadline)
        self._driver.call(cu.cuStreamDestroy, self._stream)

    def _wait(self, value: int, timeout_s: float) -> bool:
        if self._landed.value >= value:
            return True
        now = time.monotonic()
        deadline = now + timeout_s
        sleep_precisely(min(self._predictor.earliest(now), deadline) - now)
        backoff = self._predictor.backoff()
        while self._landed.value < value:
            if time.monotonic() >= deadline:
                return False
            backoff.sleep(deadline)
        return True


class LatePinnedCopy:
    """Implements `HostCopy` behind an event fence: no stream waits for it, so that a dead producer holds up none."""

    def __init__(self, side: SideStream, fence: WordFence, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        self._side = side
        self._fence = fence
        self._rows = _pinned_rows(sources)

    def start(self, value: int, row: int) -> None:
        """Nothing to do ahead of time."""

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        if not self._fence.wait_on_host(value, timeout_s):
            return None
        self._side.copy_all(self._rows[row].copies)
        return self._rows[row].mirrors

    def close(self) -> None:
        """Nothing is under way between two calls."""
