"""The CUDA driver: calls with the context current, its errors as DeviceError, and kernels of a few instructions."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver as cu

from slipstream.common.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
_WAIT_VALUE_GEQ = 0
_WRITE_VALUE_DEFAULT = 0
_ADDRESS, _STREAM, _WORD = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64


class StreamCalls:
    """The calls that every step makes on streams, given by their handles. The thread must have the context current.

    `cuda.bindings` releases the interpreter in each call, which is right for calls that may take long. These take no
    longer than getting the interpreter back from other threads would, so here it is kept.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL("libcuda.so.1")
        self._wait_value = library.cuStreamWaitValue64_v2
        self._wait_value.argtypes = (_STREAM, _ADDRESS, _WORD, ctypes.c_uint)
        self._write_value = library.cuStreamWriteValue64_v2
        self._write_value.argtypes = (_STREAM, _ADDRESS, _WORD, ctypes.c_uint)
        self._launch = library.cuLaunchKernel
        sizes = (ctypes.c_uint,) * 7
        self._launch.argtypes = (ctypes.c_void_p, *sizes, _STREAM, ctypes.c_void_p, ctypes.c_void_p)

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        """Makes the stream wait until the 64 bits at an address of the device are `value` or more."""
        _check("cuStreamWaitValue64", self._wait_value(stream, address, value, _WAIT_VALUE_GEQ))

    def write(self, stream: int, address: int, value: int) -> None:
        """Writes 64 bits, of the device or of pinned host memory, when the stream gets there."""
        _check("cuStreamWriteValue64", self._write_value(stream, address, value, _WRITE_VALUE_DEFAULT))

    def launch(self, stream: int, function: int, blocks: int, threads: int, arguments: int) -> None:
        """Runs a kernel: `blocks` of `threads`. `arguments`: the address of the pointers to its arguments."""
        _check("cuLaunchKernel", self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None))


class CudaDriver:
    """One GPU, in PyTorch's context. Any thread may call."""

    def __init__(self, ordinal: int) -> None:
        """`ordinal`: the GPU's number, as PyTorch has it. Raises DeviceError."""
        try:
            # PyTorch makes the context, with its allocator and libraries.
            torch.zeros(1, device=torch.device("cuda", ordinal))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DeviceError(f"the GPU cannot be used: {reason}; nvidia-smi shows who has it, and its mode") from error
        self.gpu = _value(cu.cuDeviceGet, cu.cuDeviceGet(ordinal))
        self._context = _value(cu.cuDevicePrimaryCtxRetain, cu.cuDevicePrimaryCtxRetain(self.gpu))
        self._bound = threading.local()
        self._stream_calls = StreamCalls()
        self._idle_streams: list[int] = []

    @property
    def streams(self) -> StreamCalls:
        """The calls that every step makes, with the context current on this thread."""
        self._bind()
        return self._stream_calls

    def call(self, function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
        """Calls a function of the driver and returns its value. Raises DeviceError."""
        self._bind()
        return _value(function, function(*arguments))

    def call_many(self, function: Callable[..., tuple[Any, ...]], *arguments: object) -> tuple[Any, ...]:
        """As `call`, for a function that returns more than one value."""
        self._bind()
        answer = function(*arguments)
        _value(function, answer)
        return answer[1:]

    def is_idle(self, stream: int) -> bool:
        """Returns whether a stream has done all that was enqueued. Raises DeviceError if the GPU failed."""
        self._bind()
        answer = cu.cuStreamQuery(stream)
        if answer[0] == _NOT_READY:
            return False
        _value(cu.cuStreamQuery, answer)
        return True

    def create_stream(self) -> int:
        """Returns the handle of a stream that does not wait for the default one: a new one, or one given back.

        A context has few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). Where it has more streams, two of them share a
        queue, and work of one waits for what the other waits for.
        """
        if self._idle_streams:
            return self._idle_streams.pop()
        return int(self.call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def give_back_stream(self, stream: int) -> None:
        """Takes an idle stream for `create_stream`. It is not destroyed: PyTorch keeps memory by stream."""
        self._idle_streams.append(stream)

    def _bind(self) -> None:
        if not hasattr(self._bound, "here"):
            _value(cu.cuCtxSetCurrent, cu.cuCtxSetCurrent(self._context))
            self._bound.here = True


def _value(function: Callable[..., object], answer: tuple[Any, ...]) -> Any:
    if answer[0] != _SUCCESS:
        _check(function.__name__, answer[0])
    return answer[1] if len(answer) > 1 else None


def _check(name: str, status: int) -> None:
    """Raises DeviceError unless the function succeeded."""
    if not status:
        return
    try:
        result = cu.CUresult(status)
    except ValueError:
        raise DeviceError(f"{name}: status {status}, which these bindings do not know") from None
    _, text = cu.cuGetErrorString(result)
    message = f"{name}: {result.name}: {text.decode() if text else 'unknown to the driver'}"
    raise DeviceError(message, result.name)


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
"""The driver compiles it: no compiler need be installed."""
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
