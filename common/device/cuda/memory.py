"""Device memory that lives as long as somebody has a view of it: allocated here, or another process's."""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.common.device.manifest import HANDLE_BYTES
from slipstream.common.errors import ConfigError, DeviceError, ManifestError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.manifest import BufferSpec

GRANULE = 2 << 20
"""The driver shares whole pieces of this size: less would share what else lies in the piece."""
_TYPES = {
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",  # the interface has no such type: seen as int16 first
}


class CudaMemory:
    """A range of device memory. Tensors made by `view` keep it."""

    def __init__(self, address: int, give_back: Callable[[], object]) -> None:
        """Use `allocate` or `open`."""
        self.address = address
        # At the end of the process the driver gives everything back, and may not be there any more to be asked.
        weakref.finalize(self, _without_complaint, give_back).atexit = False

    @classmethod
    def allocate(cls, driver: CudaDriver, size: int) -> CudaMemory:
        """Plainly, outside PyTorch's allocator, whose memory cannot always be shared. Raises OutOfMemoryError."""
        size = -(-size // GRANULE) * GRANULE
        try:
            pointer = driver.call(cu.cuMemAlloc, size)
        except DeviceError as error:
            free, total = driver.call_many(cu.cuMemGetInfo)
            needed = f"{size >> 20} MiB of shared buffers; {free >> 20} of {total >> 20} MiB of the GPU are free"
            raise OutOfMemoryError(f"{needed}: take fewer slots or shorter chunks ({error})") from error
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
        """The IPC handle, 64 bytes. Raises ConfigError where there is no CUDA IPC: nothing but another device helps."""
        try:
            handle = bytes(driver.call(cu.cuIpcGetMemHandle, self.address).reserved)
        except DeviceError as error:
            if error.is_lasting:
                raise
            raise ConfigError(
                "device", "cuda", f"cpu here: this driver cannot share memory between processes ({error})"
            ) from error
        assert len(handle) == HANDLE_BYTES, "as the driver defines it"
        return handle

    def view(self, spec: BufferSpec, offset: int) -> torch.Tensor:
        """A buffer as a tensor."""
        tensor = torch.as_tensor(_Range(self, self.address + offset, spec), device="cuda")
        assert tensor.data_ptr() == self.address + offset, "a view, not a copy"
        return tensor.view(spec.dtype)


def _without_complaint(give_back: Callable[[], object]) -> None:
    # A GPU that failed takes nothing back; whoever uses it next hears of that.
    with contextlib.suppress(DeviceError):
        give_back()


class _Range:
    """What PyTorch makes a tensor of, without copying it."""

    def __init__(self, memory: CudaMemory, address: int, spec: BufferSpec) -> None:
        assert math.prod(spec.shape), "PyTorch takes the address of an empty range for none"
        self._memory = memory
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": spec.shape,
            "typestr": _TYPES[spec.dtype],
            "strides": None,
            "version": 3,
        }
