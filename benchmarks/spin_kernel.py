"""A kernel that keeps a GPU busy for a known time, as PTX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.bindings import driver as cu

from slipstream.common.device.cuda.driver import kernel_arguments

if TYPE_CHECKING:
    from slipstream.common.device.cuda.driver import CudaDriver

_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin_until(.param .u64 start, .param .u64 length)
{
    .reg .b64 %rd<6>;
    .reg .pred %p;
    ld.param.u64 %rd1, [start];
    ld.param.u64 %rd2, [length];
    cvta.to.global.u64 %rd1, %rd1;
    ld.global.u64 %rd3, [%rd1];
    add.u64 %rd3, %rd3, %rd2;
LOOK:
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p, %rd4, %rd3;
    @%p bra LOOK;
    ret;
}
\0"""


class SpinKernel:
    """Launches on streams given by their handles. May be captured in graphs."""

    def __init__(self, driver: CudaDriver) -> None:
        """Loads and runs it once: loading it later might wait for a stream that waits for another process."""
        self._driver = driver
        module = driver.call(cu.cuModuleLoadData, _PTX)
        self._spin_until = int(driver.call(cu.cuModuleGetFunction, module, b"spin_until"))
        start, stream = int(driver.call(cu.cuMemAlloc, 8)), driver.create_stream()
        driver.call(cu.cuMemsetD8Async, start, 0, 8, stream)
        self.spin_until(stream, start, 0)
        driver.call(cu.cuStreamSynchronize, stream)
        driver.call(cu.cuStreamDestroy, stream)
        driver.call(cu.cuMemFree, start)

    def spin_until(self, stream: int, start: int, length_ns: int) -> None:
        """Holds the stream until `length_ns` after the stamp, in nanoseconds of %globaltimer, at `start`."""
        arguments = kernel_arguments(start, length_ns)
        self._driver.call(cu.cuLaunchKernel, self._spin_until, 1, 1, 1, 1, 1, 1, 0, stream, arguments.address, 0)
