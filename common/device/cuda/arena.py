"""The arenas of a GPU: memory of its owner that others map by its IPC handle, and memory of the host that it writes."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from cuda.bindings import driver as cu

from slipstream.common.device.cpu.device import HostArena
from slipstream.common.device.cpu.fence import HostFence
from slipstream.common.device.cuda.fences import EventFence, EventRing, TimelineFence
from slipstream.common.device.cuda.poll_backoff import wait_for_expected
from slipstream.common.device.cuda.stream import handle_of
from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import (
    ConfigError,
    DeviceError,
    FailedPreconditionError,
    ManifestError,
    MismatchError,
    OutOfMemoryError,
)
from slipstream.common.wire.manifest import EVENT, FEWEST_EVENTS, HANDLE_BYTES, TIMELINE, FenceWord, Manifest, lay_out

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable

    from slipstream.common.device.cuda.driver import CudaDriver, CudaKernels
    from slipstream.common.device.cuda.stream import SideStream
    from slipstream.common.device.interface import PollTime, Stream
    from slipstream.common.wire.manifest import BufferSpec
    from slipstream.common.wire.step import FenceName

KIND = "cuda_ipc"
GRANULE = 2 << 20
"""The driver shares whole pieces of this size: a smaller allocation would share its neighbours in the piece too."""
_TYPES = {
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",  # the interface has no such type: seen as int16 first
}


class CudaMemory:
    """Device memory of this process or of another one. Lives as long as a tensor made by `view` does."""

    def __init__(self, address: int, give_back: Callable[[], object]) -> None:
        """Use `allocate` or `open`."""
        self.address = address
        # At the end of the process the driver gives everything back, and may be gone before this is called.
        weakref.finalize(self, ignoring_errors, give_back).atexit = False

    @classmethod
    def allocate(cls, driver: CudaDriver, size: int) -> CudaMemory:
        """Allocates outside PyTorch's allocator, whose memory cannot always be shared. Raises OutOfMemoryError."""
        size = -(-size // GRANULE) * GRANULE
        try:
            pointer = driver.call(cu.cuMemAlloc, size)
        except DeviceError as error:
            free, total = driver.call_many(cu.cuMemGetInfo)
            needed = f"{size >> 20} MiB of shared buffers; {free >> 20} of {total >> 20} MiB of the GPU are free"
            remedy = "take a smaller slots, num_draft_tokens or max_batched_tokens"
            raise OutOfMemoryError(f"{needed}: {remedy} ({error})") from error
        return cls(int(pointer), lambda: driver.call(cu.cuMemFree, pointer))

    @classmethod
    def open(cls, driver: CudaDriver, handle: bytes, size: int) -> CudaMemory:
        """Maps another process's allocation of at least `size` bytes. Raises ManifestError, DeviceError."""
        raw = cu.CUipcMemHandle()
        raw.reserved = handle
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        try:
            pointer = driver.call(cu.cuIpcOpenMemHandle, raw, flags)
        except DeviceError as error:
            if error.is_lasting:
                raise
            remedy = "its owner is gone, or cannot be seen from here: containers need the same PID namespace"
            raise ManifestError(f"the memory handle cannot be opened ({error}): {remedy}") from error
        memory = cls(int(pointer), lambda: driver.call(cu.cuIpcCloseMemHandle, pointer))
        base, length = driver.call_many(cu.cuMemGetAddressRange, pointer)
        if int(base) != int(pointer) or length < size:
            raise ManifestError(f"the memory handle is of {length} bytes, and the arena of {size}")
        return memory

    def export(self, driver: CudaDriver) -> bytes:
        """Returns the IPC handle, 64 bytes. Raises ConfigError where there is no CUDA IPC."""
        try:
            handle = bytes(driver.call(cu.cuIpcGetMemHandle, self.address).reserved)
        except DeviceError as error:
            if error.is_lasting:
                raise
            accepted = f"cpu here: this driver cannot share memory between processes ({error})"
            raise ConfigError("device", "cuda", accepted) from error
        assert len(handle) == HANDLE_BYTES, "as the driver defines it"
        return handle

    def view(self, spec: BufferSpec, offset: int) -> torch.Tensor:
        """Returns a buffer as a tensor."""
        return view(self, self.address + offset, spec)


def view(memory: object, address: int, spec: BufferSpec) -> torch.Tensor:
    """Returns a buffer at an address that the GPU can use as a tensor, which keeps `memory`."""
    tensor = torch.as_tensor(_Range(memory, address, spec), device="cuda")
    assert tensor.data_ptr() == address, "a view, not a copy"
    return tensor.view(spec.dtype)


def ignoring_errors(give_back: Callable[[], object]) -> None:
    """Calls it. A GPU that failed takes nothing back; the next call reports it."""
    with contextlib.suppress(DeviceError):
        give_back()


class _Range:
    """Memory that PyTorch can make a tensor of without a copy."""

    def __init__(self, memory: object, address: int, spec: BufferSpec) -> None:
        assert math.prod(spec.shape), "PyTorch takes the address of an empty range for none"
        self._memory = memory
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": spec.shape,
            "typestr": _TYPES[spec.dtype],
            "strides": None,
            "version": 3,
        }


class Gpu(Protocol):
    """The parts of a device that an arena needs."""

    driver: CudaDriver
    kernels: CudaKernels
    side: SideStream

    @property
    def has_timelines(self) -> bool:
        """True if streams can wait for the value of a word in memory."""


class CudaArena:
    """Implements `Arena`. Its tensors and fences keep the memory mapped.

    Memory that another process still maps must not be freed. A lost worker may still be on its way down, so the owner
    keeps a closed arena in `retired` until the next one is sealed: all processes have attached to that one then, and
    have left this one.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: CudaMemory,
        rings: dict[FenceName, EventRing],
        gpu: Gpu,
        retired: list[object] | None = None,
    ) -> None:
        """Use `create` or `open`. `retired`: the owner's closed arenas; None for another process's arena."""
        self.manifest = manifest
        self.memory: CudaMemory | None = memory
        self._places = {placed.spec.name: placed for placed in manifest.buffers}
        self._rings = rings
        self._retired = retired
        self._fences = {word.fence: self._make_fence(word, memory, gpu) for word in manifest.fences}

    @classmethod
    def create(
        cls, specs: Iterable[BufferSpec], fences: Iterable[FenceName], fence_kind: str, gpu: Gpu, retired: list[object]
    ) -> CudaArena:
        """Makes an arena, all zero. Raises as `CudaMemory.allocate`, and ConfigError where there is no CUDA IPC."""
        buffers, words, size = lay_out(specs, fences, fence_kind)
        memory = CudaMemory.allocate(gpu.driver, size)
        gpu.side.zero(memory.address, size)
        rings: dict[FenceName, EventRing] = {}
        if fence_kind == EVENT:
            rings = {word.fence: EventRing.create(gpu.driver) for word in words}
            words = tuple(FenceWord(w.fence, w.kind, w.offset, _exported(rings[w.fence])) for w in words)
        manifest = Manifest(KIND, "", size, buffers, words, memory.export(gpu.driver))
        manifest.check()
        return cls(manifest, memory, rings, gpu, retired)

    @classmethod
    def open(cls, manifest: Manifest, gpu: Gpu, *, own: CudaMemory | None = None) -> CudaArena:
        """Maps another process's arena; `own` is its memory if this process allocated it after all.

        Raises ManifestError if it is not what the manifest says, MismatchError for a fence that this GPU does not have.
        """
        _check(manifest)
        if any(word.kind == TIMELINE for word in manifest.fences) and not gpu.has_timelines:
            raise MismatchError(["fence: scheduler has 'timeline', this worker can only do 'event' (--fence event)"])
        memory = own or CudaMemory.open(gpu.driver, manifest.handle, manifest.size)
        rings = {word.fence: _open_ring(word, gpu.driver) for word in manifest.fences if word.events}
        return cls(manifest, memory, rings, gpu)

    def tensor(self, name: str) -> torch.Tensor:
        placed = self._places.get(name)
        if placed is None or self.memory is None:
            raise ManifestError(f"the arena has no buffer {name}")
        return self.memory.view(placed.spec, placed.offset)

    def fence(self, name: FenceName) -> TimelineFence | EventFence:
        if name not in self._fences:
            raise ManifestError(f"the arena has no fence {name.name}")
        return self._fences[name]

    def seal(self) -> None:
        """Frees earlier arenas. This one can still be opened by a process that has the handle: CUDA keeps no name."""
        if self._retired:
            self._retired.clear()

    def close(self) -> None:
        if self._retired is not None and self.memory is not None:
            self._retired.append((self.memory, self._rings))
        self._fences.clear()
        self._rings = {}
        self.memory = None

    def _make_fence(self, word: FenceWord, memory: CudaMemory, gpu: Gpu) -> TimelineFence | EventFence:
        address = memory.address + word.offset
        if word.fence not in self._rings:
            return TimelineFence(address, gpu.driver, gpu.side, memory)
        ring = self._rings[word.fence]
        return EventFence(address, gpu.driver, gpu.side, memory, ring=ring, kernels=gpu.kernels)


def _check(manifest: Manifest) -> None:
    """Raises ManifestError unless it can be an arena of a GPU."""
    if manifest.kind != KIND:
        raise ManifestError(f"arena kind {manifest.kind!r}: this worker opens {KIND!r}")
    if not manifest.handle:
        raise ManifestError("the arena has no memory handle")
    for word in manifest.fences:
        if word.kind not in (TIMELINE, EVENT):
            accepted = f"{TIMELINE!r} and {EVENT!r}"
            raise ManifestError(f"fence {word.fence.name} of kind {word.kind!r}: this worker opens {accepted}")
        if (word.kind == EVENT) is not (len(word.events) >= FEWEST_EVENTS):
            count = len(word.events)
            raise ManifestError(f"fence {word.fence.name} of kind {word.kind!r} with {count} events")
    manifest.check()


def _exported(ring: EventRing) -> tuple[bytes, ...]:
    try:
        return ring.export()
    except DeviceError as error:
        if error.is_lasting:
            raise
        accepted = f"timeline, or device cpu: this driver cannot share events between processes ({error})"
        raise ConfigError("fence", EVENT, accepted) from error


def _open_ring(word: FenceWord, driver: CudaDriver) -> EventRing:
    try:
        return EventRing.open(driver, word.events)
    except DeviceError as error:
        if error.is_lasting:
            raise
        remedy = "containers need the same IPC namespace (a shared /dev/shm)"
        raise ManifestError(f"fence {word.fence.name}: an event handle cannot be opened ({error}): {remedy}") from error


class PolledFence(HostFence):
    """A word that a GPU sets, which wakes nobody: the host looks at it again and again."""

    def wait(self, stream: Stream, value: int) -> None:
        """Raises FailedPreconditionError: a stream cannot wait for it."""
        raise FailedPreconditionError(f"stream {stream.name}: a fence that is only for the host cannot be waited for")

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        if self._word.value >= value:
            return True
        deadline = time.monotonic() + timeout_s
        return wait_for_expected(lambda: self._word.value >= value, deadline, poll_time)


class PolledArena(HostArena):
    """The end of who made it and reads it. Needs nothing of a GPU."""

    fence_class = PolledFence


class _WrittenFence(PolledFence):
    """The end of who sets it by a stream, or waits for it with a stream."""

    def __init__(
        self,
        memory: memoryview,
        offset: int,
        store: Callable[[int, int], None],
        wait: Callable[[int, int], None] | None,
    ) -> None:
        """`store`, `wait`: are called with a stream's handle and the value; None where streams cannot wait."""
        super().__init__(memory, offset)
        self._store_on = store
        self._wait_on = wait

    def signal(self, stream: Stream, value: int) -> None:
        """Sets the word when the stream gets there; a host that sees it sees all that the stream has written before."""
        stream.enqueue(lambda: self._store_on(handle_of(stream), value))

    def wait(self, stream: Stream, value: int) -> None:
        """See `Fence.wait`. Raises FailedPreconditionError on a GPU whose streams cannot wait for words."""
        if (wait := self._wait_on) is None:
            super().wait(stream, value)
        else:
            stream.enqueue(lambda: wait(handle_of(stream), value))


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
    """The end of who uses it on a GPU: its tensors are the device's, and streams can wait for words that it reads."""

    def __init__(self, manifest: Manifest, memory: mmap.mmap, gpu: Gpu) -> None:
        """Use `of`."""
        super().__init__(manifest, memory)
        self._registered = registered = _Registered(memory, gpu.driver)
        words = memoryview(memory)

        def fence_at(offset: int) -> HostFence:
            write = gpu.driver.streams.write if gpu.has_timelines else gpu.kernels.store

            # Both keep the memory registered for as long as a stream may use it.
            def store(handle: int, value: int) -> None:
                write(handle, registered.address + offset, value)

            def wait(handle: int, value: int) -> None:
                gpu.driver.streams.wait_at_least(handle, registered.address + offset, value)

            return _WrittenFence(words, offset, store, wait if gpu.has_timelines else None)

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
