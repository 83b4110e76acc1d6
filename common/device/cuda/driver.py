"""The CUDA driver: calls with the context current, and its errors as ours."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver as cu

from slipstream.common.device.cuda.stream_calls import StreamCalls
from slipstream.common.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY


class CudaDriver:
    """One GPU, in the context that PyTorch uses too. Any thread may call."""

    def __init__(self, ordinal: int) -> None:
        """`ordinal`: the GPU's number, as PyTorch has it. Raises DeviceError."""
        try:
            # PyTorch makes the context: its allocator and libraries come with it.
            torch.zeros(1, device=torch.device("cuda", ordinal))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DeviceError(f"the GPU cannot be used: {reason}; nvidia-smi shows who has it, and its mode") from error
        self.gpu = _value(cu.cuDeviceGet, cu.cuDeviceGet(ordinal))
        self._context = _value(cu.cuDevicePrimaryCtxRetain, cu.cuDevicePrimaryCtxRetain(self.gpu))
        self._bound = threading.local()

    @property
    def streams(self) -> StreamCalls:
        """What every step does to a stream, with the context current on this thread."""
        self._bind()
        return self._stream_calls

    @cached_property
    def _stream_calls(self) -> StreamCalls:
        return StreamCalls(_check)

    def call(self, function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
        """Calls a function of the driver and returns what it gives. Raises DeviceError."""
        self._bind()
        return _value(function, function(*arguments))

    def call_many(self, function: Callable[..., tuple[Any, ...]], *arguments: object) -> tuple[Any, ...]:
        """The same for a function that gives more than one value."""
        self._bind()
        answer = function(*arguments)
        _value(function, answer)
        return answer[1:]

    def is_idle(self, stream: int) -> bool:
        """Whether a stream has done all that was enqueued. Raises DeviceError if the GPU failed."""
        self._bind()
        answer = cu.cuStreamQuery(stream)
        if answer[0] == _NOT_READY:
            return False
        _value(cu.cuStreamQuery, answer)
        return True

    def create_stream(self) -> int:
        """A stream that does not wait for the default one; returns its handle."""
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
    try:
        result = cu.CUresult(status)
    except ValueError:
        raise DeviceError(f"{name}: status {status}, which these bindings do not know") from None
    if result != _SUCCESS:
        _, text = cu.cuGetErrorString(result)
        message = f"{name}: {result.name}: {text.decode() if text else 'unknown to the driver'}"
        raise DeviceError(message, result.name)
