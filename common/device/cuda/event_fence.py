"""The fence of any GPU: a ring of IPC events, recorded by one process and waited for by others.

A wait takes the last record at the time of the call, and none at all is no wait. So a wait is enqueued only after the
signaller has acknowledged the step that signals the value: its record call has returned then. Nothing ends a wait
whose signaller died in the middle of its work: the stream of whoever waits can never be used again.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from cuda.bindings import driver as cu

from slipstream.common.device.cuda.stream import handle_of
from slipstream.common.device.cuda.word_fence import WordFence
from slipstream.common.device.manifest import EVENT, EVENTS, HANDLE_BYTES
from slipstream.common.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.cuda.kernels import CudaKernels
    from slipstream.common.device.cuda.side_stream import SideStream
    from slipstream.common.device.interface import Stream

KIND = EVENT


class EventRing:
    """The events of a fence. The process that made them exports them; others open them, and may record them too."""

    def __init__(self, driver: CudaDriver, events: list[object]) -> None:
        """Use `create` or `open`."""
        self._driver = driver
        self._events = events
        # Those that are in use end when their work does.
        weakref.finalize(self, _destroy, driver, events).atexit = False

    @classmethod
    def create(cls, driver: CudaDriver) -> EventRing:
        """All up front. Raises DeviceError."""
        flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING | cu.CUevent_flags.CU_EVENT_INTERPROCESS
        return cls(driver, [driver.call(cu.cuEventCreate, flags) for _ in range(EVENTS)])

    @classmethod
    def open(cls, driver: CudaDriver, handles: Sequence[bytes]) -> EventRing:
        """Another process's. Raises DeviceError."""
        ring = cls(driver, [])
        for handle in handles:
            ring._events.append(driver.call(cu.cuIpcOpenEventHandle, _handle(handle)))
        return ring

    def export(self) -> tuple[bytes, ...]:
        """The handles for other processes, 64 bytes each. Raises DeviceError."""
        return tuple(bytes(self._driver.call(cu.cuIpcGetEventHandle, event).reserved) for event in self._events)

    def at(self, value: int) -> object:
        """The event that stands for a value, and for those a ring before and behind it."""
        return self._events[value % len(self._events)]


class EventFence(WordFence):
    """Implements `Fence`. Its word is kept too, by a kernel, for the host to look at; no stream waits for that."""

    def __init__(
        self,
        address: int,
        ring: EventRing,
        *,
        driver: CudaDriver,
        kernels: CudaKernels,
        side: SideStream,
        memory: object,
    ) -> None:
        super().__init__(address, side, memory)
        self._ring = ring
        self._driver = driver
        self._kernels = kernels

    def signal(self, stream: Stream, value: int) -> None:
        """See `Fence.signal`."""
        stream.enqueue(lambda: self._record(handle_of(stream), value))

    def wait(self, stream: Stream, value: int) -> None:
        """See `Fence.wait`, but for this: the signal must have been enqueued, or the wait is none.

        If its event was recorded again since, the stream waits for that later signal.
        """
        if value > 0:
            stream.enqueue(lambda: self._driver.call(cu.cuStreamWaitEvent, handle_of(stream), self._ring.at(value), 0))

    @property
    def is_releasable(self) -> bool:
        """See `Fence.is_releasable`."""
        return False

    def _record(self, stream: int, value: int) -> None:
        self._kernels.store(stream, self.address, value)
        self._driver.call(cu.cuEventRecord, self._ring.at(value), stream)


def _destroy(driver: CudaDriver, events: list[object]) -> None:
    with contextlib.suppress(DeviceError):
        while events:
            driver.call(cu.cuEventDestroy, events.pop())


def _handle(raw: bytes) -> object:
    assert len(raw) == HANDLE_BYTES, "the manifest was checked"
    handle = cu.CUipcEventHandle()
    handle.reserved = raw
    return handle
