"""The arena of a GPU: one plain allocation of its owner, which other processes map by its IPC handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from slipstream.common.device.cuda.fences import EventFence, EventRing, TimelineFence
from slipstream.common.device.cuda.memory import CudaMemory
from slipstream.common.device.manifest import EVENT, FEWEST_EVENTS, TIMELINE, FenceWord, Manifest, lay_out
from slipstream.common.errors import ConfigError, DeviceError, ManifestError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.cuda.kernels import CudaKernels
    from slipstream.common.device.cuda.side_stream import SideStream
    from slipstream.common.device.manifest import BufferSpec
    from slipstream.common.worker.step import FenceName

KIND = "cuda_ipc"


class Gpu(Protocol):
    """What an arena needs of its device."""

    @property
    def driver(self) -> CudaDriver: ...

    @property
    def kernels(self) -> CudaKernels: ...

    @property
    def side(self) -> SideStream: ...

    @property
    def has_timelines(self) -> bool:
        """Whether streams can wait for words."""
        ...


class CudaArena:
    """Implements `Arena`. Tensors keep the memory; fences keep it too."""

    def __init__(self, manifest: Manifest, memory: CudaMemory, rings: dict[FenceName, EventRing], gpu: Gpu) -> None:
        """Use `create` or `open`."""
        self.manifest = manifest
        self.memory: CudaMemory | None = memory
        self._places = {placed.spec.name: placed for placed in manifest.buffers}
        self._rings = rings
        self._fences = {word.fence: self._make_fence(word, memory, gpu) for word in manifest.fences}

    @classmethod
    def create(cls, specs: Iterable[BufferSpec], fences: Iterable[FenceName], fence_kind: str, gpu: Gpu) -> CudaArena:
        """A new arena, all zero. Raises OutOfMemoryError, or ConfigError where there is no CUDA IPC."""
        buffers, words, size = lay_out(specs, fences, fence_kind)
        memory = CudaMemory.allocate(gpu.driver, size)
        gpu.side.zero(memory.address, size)
        rings: dict[FenceName, EventRing] = {}
        if fence_kind == EVENT:
            rings = {word.fence: EventRing.create(gpu.driver) for word in words}
            words = tuple(FenceWord(w.fence, w.kind, w.offset, _exported(rings[w.fence])) for w in words)
        manifest = Manifest(KIND, "", size, buffers, words, memory.export(gpu.driver))
        manifest.check()
        return cls(manifest, memory, rings, gpu)

    @classmethod
    def open(cls, manifest: Manifest, gpu: Gpu, *, own: CudaMemory | None = None) -> CudaArena:
        """Maps another process's arena; `own` is its memory if it is this one's after all.

        Raises ManifestError if it is not what the manifest says, MismatchError for a fence that this GPU has not.
        """
        _check(manifest)
        if any(word.kind == TIMELINE for word in manifest.fences) and not gpu.has_timelines:
            raise MismatchError(["fence: scheduler has 'timeline', this worker can do 'event' alone (--fence event)"])
        memory = own or CudaMemory.open(gpu.driver, manifest.handle, manifest.size)
        rings: dict[FenceName, EventRing] = {}
        for word in manifest.fences:
            if word.events:
                rings[word.fence] = _open_ring(word, gpu.driver)
        return cls(manifest, memory, rings, gpu)

    def tensor(self, name: str) -> torch.Tensor:
        placed = self._places.get(name)
        if placed is None or self.memory is None:
            raise ManifestError(f"the arena has no buffer {name}")
        return self.memory.view(placed.spec, placed.offset)

    def fence(self, name: FenceName) -> TimelineFence | EventFence:
        fence = self._fences.get(name)
        if fence is None:
            raise ManifestError(f"the arena has no fence {name.name}")
        return fence

    def seal(self) -> None:
        """Nothing to do: CUDA keeps no name, and whoever has the handle can open it while the memory lives."""

    def close(self) -> None:
        self._fences.clear()
        self._rings.clear()
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
