"""Kernels of a few instructions, as PTX, which the driver compiles: no compiler need be installed."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

from cuda.bindings import driver as cu

if TYPE_CHECKING:
    from slipstream.common.device.cuda.driver import CudaDriver

_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry stamp(.param .u64 target)
{
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [target];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u64 %rd3, %globaltimer;
    st.global.u64 [%rd2], %rd3;
    ret;
}

.visible .entry stamp_row(.param .u64 targets, .param .u64 stride, .param .u64 row)
{
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [targets];
    ld.param.u64 %rd2, [stride];
    ld.param.u64 %rd3, [row];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd3, %rd3;
    ld.global.u64 %rd4, [%rd3];
    mad.lo.u64 %rd1, %rd4, %rd2, %rd1;
    mov.u64 %rd5, %globaltimer;
    st.global.u64 [%rd1], %rd5;
    ret;
}

.visible .entry store(.param .u64 target, .param .u64 value)
{
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [target];
    ld.param.u64 %rd3, [value];
    cvta.to.global.u64 %rd2, %rd1;
    fence.acq_rel.sys;
    st.global.u64 [%rd2], %rd3;
    ret;
}

.visible .entry fetch(.param .u64 target, .param .u64 source, .param .u64 words)
{
    .reg .b64 %rd<8>;
    .reg .b32 %r<4>;
    .reg .pred %p;
    ld.param.u64 %rd1, [target];
    ld.param.u64 %rd2, [source];
    ld.param.u64 %rd3, [words];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r3, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r3;
    setp.ge.u64 %p, %rd4, %rd3;
    @%p ret;
    shl.b64 %rd5, %rd4, 3;
    add.u64 %rd1, %rd1, %rd5;
    add.u64 %rd2, %rd2, %rd5;
    ld.volatile.global.u64 %rd6, [%rd2];
    st.global.u64 [%rd1], %rd6;
    ret;
}
\0"""
WORD_BYTES = 8
_THREADS = 256


class CudaKernels:
    """Launches on streams given by their handles; addresses are the device's. They may be captured in graphs."""

    def __init__(self, driver: CudaDriver) -> None:
        """Loads and runs each kernel once: loading one later might wait for a stream that waits for another process."""
        self._driver = driver
        module = driver.call(cu.cuModuleLoadData, _PTX)
        names = (b"stamp", b"stamp_row", b"store", b"fetch")
        functions = [int(driver.call(cu.cuModuleGetFunction, module, name)) for name in names]
        self._stamp, self._stamp_row, self._store, self._fetch = functions
        self._warm_up()

    def stamp(self, stream: int, target: int) -> None:
        """Writes %globaltimer, in nanoseconds, into the 64 bits at `target`."""
        self._launch(self._stamp, stream, kernel_arguments(target))

    def stamp_row(self, stream: int, targets: int, stride_bytes: int, row: int) -> None:
        """As `stamp`, into the target whose index is in the 64 bits at `row`."""
        self._launch(self._stamp_row, stream, kernel_arguments(targets, stride_bytes, row))

    def store(self, stream: int, target: int, value: int) -> None:
        """Writes 64 bits at once. A host that sees them sees what the stream has written before."""
        self._launch(self._store, stream, _Arguments(target, value))

    def fetch(self, stream: int, target: int, source: int, num_words: int) -> None:
        """Copies words of 64 bits to the device, from pinned host memory."""
        blocks = -(-num_words // _THREADS)
        arguments = kernel_arguments(target, source, num_words)
        self._driver.streams.launch(stream, self._fetch, blocks, _THREADS, arguments.address)

    def _launch(self, function: int, stream: int, arguments: _Arguments) -> None:
        self._driver.call(cu.cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.address, 0)

    def _warm_up(self) -> None:
        scratch = int(self._driver.call(cu.cuMemAlloc, 8))
        stream = self._driver.create_stream()
        self.store(stream, scratch, 0)
        self.stamp_row(stream, scratch, 8, scratch)
        self.stamp(stream, scratch)
        self.fetch(stream, scratch, scratch, 1)
        self._driver.call(cu.cuStreamSynchronize, stream)
        self._driver.call(cu.cuStreamDestroy, stream)
        self._driver.call(cu.cuMemFree, scratch)


class _Arguments:
    """A kernel's arguments, 64 bits each, as the driver takes them. A launch copies them."""

    __slots__ = ("_pointers", "_values", "address")

    def __init__(self, *values: int) -> None:
        self._values = (ctypes.c_uint64 * len(values))(*values)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(values))(*(first + 8 * index for index in range(len(values))))
        self.address = ctypes.addressof(self._pointers)


@lru_cache(maxsize=256)
def kernel_arguments(*values: int) -> _Arguments:
    """Returns the same object for arguments that repeat."""
    return _Arguments(*values)
