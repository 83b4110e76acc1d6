"""The CUDA driver: calls with the context current, and its errors as DeviceError."""

from __future__ import annotations

import ctypes
import threading
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
        """Makes a stream that does not wait for the default one, and returns its handle."""
        return int(self.call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

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
