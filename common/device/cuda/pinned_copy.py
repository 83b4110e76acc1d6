"""Results on the host: copies into pinned memory, on a stream of their own."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.common.device.cuda.poll_backoff import PollBackoff, wait_for_expected
from slipstream.common.device.cuda.side_stream import MemoryCopy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.device.cuda.blocking_calls import BlockingCalls
    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.cuda.fences import TimelineFence, WordFence
    from slipstream.common.device.cuda.side_stream import SideStream

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
MAX_GAP_BYTES = 32 << 10
"""Rows at most this far apart are copied in one go, with what lies between: it costs less than one more copy."""
_ALIGNMENT_BYTES = 16
_given_up: list[PinnedCopy] = []
"""Copies whose stream did not end: their memory may still be written to."""


class PinnedRow:
    """A row of each of several shared buffers, and their mirrors in pinned memory."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        """`sources`: contiguous, of one allocation on the device."""
        spans = _spans(sources)
        pinned = [torch.zeros(end - begin, dtype=torch.uint8, pin_memory=True) for begin, end in spans]
        self.copies = [
            MemoryCopy(begin, block.data_ptr(), end - begin) for (begin, end), block in zip(spans, pinned, strict=True)
        ]
        """The copies that fill the mirrors."""
        self.mirrors = [_mirror(source, spans, pinned) for source in sources]
        """The host's tensors, in the order of `sources`."""


def _spans(sources: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns the address ranges to copy that contain all sources; neighbours share one."""
    spans: list[tuple[int, int]] = []
    addresses = [(source.data_ptr(), source.data_ptr() + source.nbytes) for source in sources]
    # Begins are rounded down, so that tensors are aligned in the mirror as they are here.
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
    return [PinnedRow(row) for row in zip(*sources, strict=True)]


class PinnedCopy:
    """Implements `HostCopy` behind a timeline fence.

    The stream waits for the fence, copies, and then writes a word of pinned memory. The host begins to poll that word
    shortly before the result is expected: an interrupt would come later.
    """

    def __init__(
        self,
        driver: CudaDriver,
        calls: BlockingCalls,
        fence: TimelineFence,
        sources: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """`sources`: for each buffer its rows, contiguous, on the device."""
        self._driver = driver
        self._calls = calls
        self._fence = fence
        self._stream = driver.create_stream()
        self._rows = _pinned_rows(sources)
        self._landed_word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._landed_address = self._landed_word.data_ptr()
        self._landed = ctypes.c_int64.from_address(self._landed_address)
        self._started = 0
        calls.watch(self)

    def is_at_rest(self) -> bool:
        """Returns whether every copy that was started has landed."""
        return self._landed.value >= self._started

    def start(self, value: int, row: int) -> None:
        with self._calls.lock:
            self._started = value
            self._fence.wait_on_stream(self._stream, value)
            streams = self._driver.streams
            for copy in self._rows[row].copies:
                streams.copy_to_host(self._stream, copy.target, copy.source, copy.size)
            streams.write(self._stream, self._landed_address, value)

    def finish(
        self, value: int, row: int, timeout_s: float, *, since: float = 0.0, usual_s: float = 0.0
    ) -> list[torch.Tensor] | None:
        """The rows are those of the mirror, valid until the row's next copy."""
        if self._landed.value < value:
            deadline = time.monotonic() + timeout_s
            if not wait_for_expected(lambda: self._landed.value >= value, deadline, since=since, usual_s=usual_s):
                return None
        return self._rows[row].mirrors

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        backoff = PollBackoff()
        # Repeated, because a late producer may set the word back.
        while not (has_ended := self.is_at_rest()) and time.monotonic() <= deadline:
            self._fence.release(self._started)
            backoff.sleep(deadline)
        self._calls.forget(self)
        if has_ended:
            self._driver.call(cu.cuStreamDestroy, self._stream)
        else:
            logger.warning("the copy stream does not come to its end: it is given up")
            _given_up.append(self)


class LatePinnedCopy:
    """Implements `HostCopy` behind an event fence. No stream waits, so that a dead producer holds up none."""

    def __init__(self, side: SideStream, fence: WordFence, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        self._side = side
        self._fence = fence
        self._rows = _pinned_rows(sources)

    def start(self, value: int, row: int) -> None:
        """Does nothing: `finish` copies."""

    def finish(
        self, value: int, row: int, timeout_s: float, *, since: float = 0.0, usual_s: float = 0.0
    ) -> list[torch.Tensor] | None:
        if not self._fence.wait_on_host(value, timeout_s):
            return None
        self._side.copy_all(self._rows[row].copies)
        return self._rows[row].mirrors

    def close(self) -> None:
        """Does nothing: no copy is under way between two calls."""
