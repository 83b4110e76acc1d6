"""The fence of a GPU with 64-bit stream memory operations: streams write the word, and wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.bindings import driver as cu

from slipstream.common.device.cuda.stream import handle_of
from slipstream.common.device.cuda.word_fence import WordFence
from slipstream.common.device.manifest import TIMELINE
from slipstream.common.errors import DeviceError

if TYPE_CHECKING:
    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.cuda.side_stream import SideStream
    from slipstream.common.device.interface import Stream

KIND = TIMELINE


class TimelineFence(WordFence):
    """Implements `Fence`. A wait may be enqueued before its signal; a dead producer is released by anybody."""

    def __init__(self, address: int, driver: CudaDriver, side: SideStream, memory: object) -> None:
        super().__init__(address, side, memory)
        self._driver = driver

    def signal(self, stream: Stream, value: int) -> None:
        """See `Fence.signal`."""
        stream.enqueue(lambda: self._driver.streams.write(handle_of(stream), self.address, value))

    def wait(self, stream: Stream, value: int) -> None:
        """See `Fence.wait`."""
        stream.enqueue(lambda: self.hold(handle_of(stream), value))

    @property
    def is_releasable(self) -> bool:
        """See `Fence.is_releasable`."""
        return True

    def hold(self, stream: int, value: int) -> None:
        """The same for a stream given by its handle."""
        self._driver.streams.wait_at_least(stream, self.address, value)


def works(driver: CudaDriver, side: SideStream) -> bool:
    """Whether streams can do this here. Tried, because the driver's attribute may read 0 where the calls work."""
    word = driver.call(cu.cuMemAlloc, 8)
    try:
        side.zero(int(word), 8)
        driver.streams.write(side.handle, int(word), 1)
        driver.streams.wait_at_least(side.handle, int(word), 1)
        side.finish()
        return side.read_word(int(word)) == 1
    except DeviceError:
        return False
    finally:
        driver.call(cu.cuMemFree, word)
