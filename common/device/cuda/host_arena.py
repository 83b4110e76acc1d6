"""An arena in memory of the host that a GPU writes through its bus: no copy brings what lies there to the host."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Self

import numpy as np
from cuda.bindings import driver as cu

from slipstream.common.device.cpu.device import KIND as FILE
from slipstream.common.device.cpu.device import HostArena, HostFence
from slipstream.common.device.cuda.arena import ignoring_errors, view
from slipstream.common.device.cuda.poll_backoff import wait_for_expected
from slipstream.common.device.cuda.stream import handle_of
from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import FailedPreconditionError, ManifestError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    import torch

    from slipstream.common.device.cuda.arena import Gpu
    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.interface import Look, Stream
    from slipstream.common.wire.manifest import Manifest

__all__ = ["FILE", "PolledArena", "WrittenArena"]


class PolledFence(HostFence):
    """A word that a GPU sets, which wakes nobody: the host looks at it again and again."""

    def wait(self, stream: Stream, value: int) -> None:
        """Raises FailedPreconditionError: a stream cannot wait for it."""
        raise FailedPreconditionError(f"stream {stream.name}: a fence for the host alone cannot be waited for")

    def wait_on_host(self, value: int, timeout_s: float, look: Look = ANY_TIME) -> bool:
        if self._word.value >= value:
            return True
        deadline = time.monotonic() + timeout_s
        return wait_for_expected(lambda: self._word.value >= value, deadline, look)


class PolledArena(HostArena):
    """The end of who made it and reads it. Needs nothing of a GPU."""

    fence_class = PolledFence


class _WrittenFence(PolledFence):
    """The end of who sets it, by a stream."""

    def __init__(self, memory: memoryview, offset: int, store: Callable[[int, int], None]) -> None:
        """`store`: is called with a stream's handle and the value."""
        super().__init__(memory, offset)
        self._store_on = store

    def signal(self, stream: Stream, value: int) -> None:
        """Sets the word when the stream gets there; a host that sees it sees all that the stream has written before."""
        stream.enqueue(lambda: self._store_on(handle_of(stream), value))


class _Registered:
    """A mapping that the GPU can use, for as long as this object lives."""

    def __init__(self, memory: mmap.mmap, driver: CudaDriver) -> None:
        mapped = np.frombuffer(memory, np.uint8)
        start = mapped.ctypes.data

        def give_back() -> None:
            # The mapping, too, lives until then.
            driver.call(cu.cuMemHostUnregister, start)
            _ = mapped

        driver.call(cu.cuMemHostRegister, start, len(mapped), cu.CU_MEMHOSTREGISTER_DEVICEMAP)
        weakref.finalize(self, ignoring_errors, give_back).atexit = False
        self.address = int(driver.call(cu.cuMemHostGetDevicePointer, start, 0))
        """Where the GPU has it."""


class WrittenArena(HostArena):
    """The end of who writes it, on a GPU: its tensors are the device's."""

    def __init__(self, manifest: Manifest, memory: mmap.mmap, gpu: Gpu) -> None:
        """Use `of`."""
        super().__init__(manifest, memory)
        self._registered = registered = _Registered(memory, gpu.driver)
        words = memoryview(memory)

        def fence_at(offset: int) -> HostFence:
            write = gpu.driver.streams.write if gpu.has_timelines else gpu.kernels.store
            # Keeps the memory registered for as long as a stream may write there.
            return _WrittenFence(words, offset, lambda handle, value: write(handle, registered.address + offset, value))

        self._fences = {word.fence: fence_at(word.offset) for word in manifest.fences}

    @classmethod
    def of(cls, manifest: Manifest, gpu: Gpu) -> Self:
        """Maps another process's memory. Raises ManifestError if it is not what the manifest says, DeviceError."""
        return cls(manifest, cls._mapped(manifest), gpu)

    def tensor(self, name: str) -> torch.Tensor:
        placed = self._places.get(name)
        if placed is None:
            raise ManifestError(f"the arena has no buffer {name}")
        return view(self._registered, self._registered.address + placed.offset, placed.spec)
