"""The fences of a GPU. Their counter is a word of the arena in device memory.

A `TimelineFence` needs 64-bit stream memory operations: streams write the word, and wait for it.

An `EventFence` works on any GPU: a ring of IPC events, recorded by one process and waited for by others. A wait takes
the last record at the time of the call, and does nothing if there is none. So it is enqueued only after the signaller
has acknowledged the step that signals the value: its record call has returned then. Nothing ends a wait whose
signaller died in the middle of its work: the waiting stream can never be used again.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING

from cuda.bindings import driver as cu

from slipstream.common.device.cuda.poll_backoff import PollBackoff
from slipstream.common.device.cuda.stream import handle_of
from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import DeviceError
from slipstream.common.wire.manifest import EVENTS, HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.device.cuda.driver import CudaDriver, CudaKernels
    from slipstream.common.device.cuda.stream import SideStream
    from slipstream.common.device.interface import PollTime, Stream


_NEGATIVE = 1 << 63
"""A stream that waits for a value compares the word as a signed number. No producer gets so far, but a word may hold
anything that a broken one writes: the host must not take for done what a stream still waits for."""


class WordFence:
    """The host's side of a GPU's fence."""

    def __init__(self, address: int, driver: CudaDriver, side: SideStream, memory: object) -> None:
        """`address`: of the counter, on the device; `memory` is kept for as long as the fence is."""
        self.address = address
        self._driver = driver
        self._side = side
        self._memory = memory

    def poll(self) -> int:
        """Copies the word from the device, which takes about 10 us. From 2^63 on it is negative, as waits have it."""
        word = self._side.read_word(self.address)
        return word if word < _NEGATIVE else word - 2 * _NEGATIVE

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        return PollBackoff().wait(lambda: self.poll() >= value, time.monotonic() + timeout_s)

    def release(self, value: int) -> None:
        """Written from a stream that never waits."""
        if self.poll() < value:
            self._side.write_word(self.address, value)


class TimelineFence(WordFence):
    """Implements `Fence`. A wait may be enqueued before its signal; any process may release a dead producer's waits."""

    is_releasable = True

    def signal(self, stream: Stream, value: int) -> None:
        stream.enqueue(lambda: self._driver.streams.write(handle_of(stream), self.address, value))

    def wait(self, stream: Stream, value: int) -> None:
        stream.enqueue(lambda: self._driver.streams.wait_at_least(handle_of(stream), self.address, value))


def has_timelines(driver: CudaDriver, side: SideStream) -> bool:
    """Tries whether streams can wait for words: the driver's attribute may read 0 where the calls work."""
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


class EventRing:
    """The events of a fence. The process that made them exports them; others open them, and may record them too."""

    def __init__(self, driver: CudaDriver, events: list[object]) -> None:
        """Use `create` or `open`."""
        self._driver = driver
        self._events = events
        # An event that is in use ends when its work does.
        weakref.finalize(self, _destroy, driver, events).atexit = False

    @classmethod
    def create(cls, driver: CudaDriver) -> EventRing:
        """Makes all events. Raises DeviceError."""
        flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING | cu.CUevent_flags.CU_EVENT_INTERPROCESS
        return cls(driver, [driver.call(cu.cuEventCreate, flags) for _ in range(EVENTS)])

    @classmethod
    def open(cls, driver: CudaDriver, handles: Sequence[bytes]) -> EventRing:
        """Opens another process's events. Raises DeviceError."""
        ring = cls(driver, [])
        for raw in handles:
            assert len(raw) == HANDLE_BYTES, "the manifest was checked"
            handle = cu.CUipcEventHandle()
            handle.reserved = raw
            ring._events.append(driver.call(cu.cuIpcOpenEventHandle, handle))
        return ring

    def export(self) -> tuple[bytes, ...]:
        """Returns the IPC handles, 64 bytes each. Raises DeviceError."""
        return tuple(bytes(self._driver.call(cu.cuIpcGetEventHandle, event).reserved) for event in self._events)

    def at(self, value: int) -> object:
        """Returns the event of a value, which it shares with values a ring before and after."""
        return self._events[value % len(self._events)]


def _destroy(driver: CudaDriver, events: list[object]) -> None:
    with contextlib.suppress(DeviceError):
        while events:
            driver.call(cu.cuEventDestroy, events.pop())


class EventFence(WordFence):
    """Implements `Fence`. A kernel keeps the word up to date too, for the host to read; no stream waits for that."""

    is_releasable = False

    def __init__(
        self,
        address: int,
        driver: CudaDriver,
        side: SideStream,
        memory: object,
        *,
        ring: EventRing,
        kernels: CudaKernels,
    ) -> None:
        super().__init__(address, driver, side, memory)
        self._ring = ring
        self._kernels = kernels

    def signal(self, stream: Stream, value: int) -> None:
        stream.enqueue(lambda: self._record(handle_of(stream), value))

    def wait(self, stream: Stream, value: int) -> None:
        """See `Fence.wait`; but the signal must have been enqueued before.

        If its event was recorded again since, the stream waits for that later signal.
        """
        if value > 0:
            stream.enqueue(lambda: self._driver.call(cu.cuStreamWaitEvent, handle_of(stream), self._ring.at(value), 0))

    def _record(self, stream: int, value: int) -> None:
        self._kernels.store(stream, self.address, value)
        self._driver.call(cu.cuEventRecord, self._ring.at(value), stream)
