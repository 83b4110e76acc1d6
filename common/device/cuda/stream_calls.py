"""The driver's calls that every step makes on a stream, as short as they can be.

`cuda.bindings` gives the interpreter away in each call. That is right for what may take long. These take no longer
than it takes to get the interpreter back from other threads that want it: so here it is kept.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY = "libcuda.so.1"
_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""
_PLAIN = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT."""
_ADDRESS, _STREAM, _WORD = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64


class StreamCalls:
    """Enqueues on streams given by their handles. The calling thread must have the context current."""

    def __init__(self, check: Callable[[str, int], None]) -> None:
        """`check` is told each function's name and status, and raises for those that are errors."""
        library = ctypes.PyDLL(_LIBRARY)
        self._check = check
        self._wait_value = library.cuStreamWaitValue64_v2
        self._wait_value.argtypes = (_STREAM, _ADDRESS, _WORD, ctypes.c_uint)
        self._write_value = library.cuStreamWriteValue64_v2
        self._write_value.argtypes = (_STREAM, _ADDRESS, _WORD, ctypes.c_uint)
        self._copy_to_host = library.cuMemcpyDtoHAsync_v2
        self._copy_to_host.argtypes = (ctypes.c_void_p, _ADDRESS, ctypes.c_size_t, _STREAM)
        self._launch = library.cuLaunchKernel
        sizes = (ctypes.c_uint,) * 7
        self._launch.argtypes = (ctypes.c_void_p, *sizes, _STREAM, ctypes.c_void_p, ctypes.c_void_p)

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        """The stream waits until the 64 bits at an address of the device are `value` or more."""
        status = self._wait_value(stream, address, value, _AT_LEAST)
        if status:
            self._check("cuStreamWaitValue64", status)

    def write(self, stream: int, address: int, value: int) -> None:
        """The stream sets 64 bits when it gets there: of the device, or of pinned host memory."""
        status = self._write_value(stream, address, value, _PLAIN)
        if status:
            self._check("cuStreamWriteValue64", status)

    def copy_to_host(self, stream: int, target: int, source: int, size: int) -> None:
        """The stream copies `size` bytes from the device to pinned host memory."""
        status = self._copy_to_host(target, source, size, stream)
        if status:
            self._check("cuMemcpyDtoHAsync", status)

    def launch(self, stream: int, function: int, blocks: int, threads: int, arguments: int) -> None:
        """The stream runs a kernel: `blocks` of `threads`. `arguments` is where the pointers to its arguments lie."""
        status = self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        if status:
            self._check("cuLaunchKernel", status)
