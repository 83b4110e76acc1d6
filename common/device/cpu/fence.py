"""Fences on a CPU: words of shared memory with a futex. Imports no torch, for processes that have none."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    import mmap

    from slipstream.common.device.interface import PollTime, Stream

_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_WAITERS = 2**31 - 1
# How often a waiting stream's thread returns to Python, where a debugger finds it.
_WAIT_S = 60.0
_LOCAL_RELEASE_S = 0.02
"""The longest time in which a wait on a word that this process cannot write finds out that it was released here."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
# Waking takes no time, and a thread that let go of the interpreter for it might wait to get it back.
_syscall_holding_interpreter = ctypes.PyDLL(None).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class HostFence:
    """Implements `Fence`. A wait may be enqueued before its signal; any process may release a dead producer's waits.

    It is a 64-bit word in shared memory that threads of any process sleep on (Linux, x86-64). The kernel compares 32
    bits, so a waiter watches the word's low half; x86-64 stores eight aligned bytes at once and in order, so a reader
    that sees the new value sees what was written before it.
    """

    is_releasable = True

    def __init__(self, memory: memoryview, offset: int) -> None:
        """The counter is the word of the writable `memory` at `offset`: bytes, a multiple of 8."""
        self._word = ctypes.c_uint64.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    def signal(self, stream: Stream, value: int) -> None:
        stream.enqueue(lambda: self.store(value))

    def wait(self, stream: Stream, value: int) -> None:
        stream.enqueue(lambda: self._sleep_until(value))

    def poll(self) -> int:
        return self._word.value

    def store(self, value: int) -> None:
        """Sets the counter and wakes all waiters."""
        self._word.value = value
        address = ctypes.c_void_p(self._address)
        _syscall_holding_interpreter(_SYS_FUTEX, address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        if self._word.value >= value:
            return True
        deadline = time.monotonic() + timeout_s
        while (now := self._word.value) < value:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._sleep_while(now, left)
        return True

    def release(self, value: int) -> None:
        if self._word.value < value:
            self.store(value)

    def _sleep_until(self, value: int) -> None:
        while not self.wait_on_host(value, _WAIT_S):
            pass

    def _sleep_while(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the counter differs from `seen`, or the time is over; may wake up early."""
        seconds = int(timeout_s)
        timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        expected = ctypes.c_uint32(seen & 0xFFFFFFFF)
        address = ctypes.c_void_p(self._address)
        if _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(timeout), None, 0) < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, os.strerror(code))


class ReadOnlyFence(HostFence):
    """A fence whose word this process can only read: it waits, and `release` ends only the waits of this process."""

    def __init__(self, memory: memoryview, offset: int, *, look_s: float = _LOCAL_RELEASE_S) -> None:
        """`look_s`: longest time between two looks at the word, in a wait: a GPU that sets it wakes nobody."""
        super().__init__(memory, offset)
        self._floor = 0
        self._look_s = look_s

    def signal(self, stream: Stream, value: int) -> None:
        """Raises FailedPreconditionError."""
        self.store(value)

    def store(self, value: int) -> None:
        """Raises FailedPreconditionError."""
        raise FailedPreconditionError(f"a fence that this process maps only for reading cannot be set to {value}")

    def poll(self) -> int:
        return max(self._word.value, self._floor)

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        deadline = time.monotonic() + timeout_s
        # The word is read once: one that changes after that must end the sleep.
        while max(now := self._word.value, self._floor) < value:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._sleep_while(now, min(left, self._look_s))
        return True

    def release(self, value: int) -> None:
        """Raises the counter as this process sees it."""
        self._floor = max(self._floor, value)


def without_its_flag(memory: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    """Returns a buffer of the same memory that does not say that it cannot be written.

    PyTorch and ctypes know no tensors and words that are only read: PyTorch warns of them, ctypes refuses.
    """
    view = np.frombuffer(memory, np.uint8)
    array = (ctypes.c_char * len(view)).from_address(view.ctypes.data)
    array.mapped = view  # type: ignore[attr-defined]  # keeps the memory mapped for as long as the array lives
    return array
