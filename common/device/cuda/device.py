"""A GPU as a device: CUDA streams, one shared allocation, fences on streams."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.common.device.cpu.device import KIND as FILE
from slipstream.common.device.cuda.arena import CudaArena, PolledArena, WrittenArena
from slipstream.common.device.cuda.driver import WORD_BYTES, CudaDriver, CudaKernels
from slipstream.common.device.cuda.fences import has_timelines
from slipstream.common.device.cuda.stream import CudaStream, SideStream, handle_of
from slipstream.common.errors import ConfigError
from slipstream.common.wire.manifest import EVENT, TIMELINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from slipstream.common.device.cuda.arena import CudaMemory
    from slipstream.common.device.interface import Stream
    from slipstream.common.wire.manifest import BufferSpec, Manifest
    from slipstream.common.wire.step import FenceName
    from slipstream.common.wire.trace import ClockSample

AUTO = "auto"
_MPS_ENABLED = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED


class CudaDevice:
    """Implements `Device`."""

    has_stream_threads = False

    def __init__(self, fence: str = AUTO, ordinal: int = 0) -> None:
        """`fence`: "timeline", "event" or "auto", the first of these that works. Raises DeviceError, ConfigError.

        `ordinal`: number of the GPU among those that CUDA_VISIBLE_DEVICES shows.
        """
        self.torch_device = torch.device("cuda", ordinal)
        if ordinal:
            torch.cuda.set_device(ordinal)
        self.driver = CudaDriver(ordinal)
        self.kernels = CudaKernels(self.driver)
        self.side = SideStream(self.driver, self.kernels)
        self.identity = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
        self.fence_kind = self._fence_kind(fence)
        self._own: weakref.WeakValueDictionary[bytes, CudaMemory] = weakref.WeakValueDictionary()
        self._retired: list[object] = []

    @cached_property
    def under_mps(self) -> bool:
        return bool(self.driver.call(cu.cuDeviceGetAttribute, _MPS_ENABLED, self.driver.gpu))

    @cached_property
    def has_timelines(self) -> bool:
        """True if streams can wait for the value of a word in memory."""
        return has_timelines(self.driver, self.side)

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> CudaStream:
        return CudaStream(name, self.driver, self.torch_device, on_failure)

    def create_arena(
        self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False
    ) -> CudaArena | PolledArena:
        """Raises as `CudaArena.create` does, or `HostArena.create`."""
        if on_host:
            return PolledArena.create(specs, fences)
        arena = CudaArena.create(specs, fences, self.fence_kind, self, self._retired)
        assert arena.memory is not None, "it is open"
        self._own[arena.manifest.handle] = arena.memory
        return arena

    def open_arena(self, manifest: Manifest, *, read_only: bool = False) -> CudaArena | WrittenArena:
        """An allocation of this process is used as it is: it cannot be mapped twice.

        `read_only` changes nothing: CUDA maps another process's memory for reading and writing.
        """
        if manifest.kind == FILE:
            return WrittenArena.of(manifest, self)
        return CudaArena.open(manifest, self, own=self._own.get(manifest.handle))

    def stamp(self, stream: Stream, target: torch.Tensor) -> None:
        """Writes %globaltimer, which all processes on the GPU share."""
        handle, address = handle_of(stream), target.data_ptr()
        stream.enqueue(lambda: self.kernels.stamp(handle, address))

    def stamp_row(self, stream: Stream, targets: torch.Tensor, row: torch.Tensor) -> None:
        handle, stride = handle_of(stream), targets.stride(0) * targets.element_size()
        stream.enqueue(lambda: self.kernels.stamp_row(handle, targets.data_ptr(), stride, row.data_ptr()))

    def fetch(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        num_words = source.nbytes // WORD_BYTES
        self.kernels.fetch(handle_of(stream), target.data_ptr(), source.data_ptr(), num_words)

    def sample_clock(self) -> ClockSample:
        """Takes about 10 us a reading, more while another process has the GPU to itself."""
        return self.side.sample_clock()

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.side.to_host(tensors)

    def _fence_kind(self, wanted: str) -> str:
        if wanted == AUTO:
            return TIMELINE if self.has_timelines else EVENT
        if wanted == TIMELINE and not self.has_timelines:
            raise ConfigError("fence", wanted, "event: this GPU or driver has no 64-bit stream memory operations")
        return wanted
