"""A 64-bit word in shared memory that threads of any process sleep on (Linux, x86-64).

The kernel compares 32 bits, so it watches the word's low half; x86-64 stores eight aligned bytes at once
and in order, so a reader that sees the new value sees what was written before it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 2**31 - 1

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
# Waking takes no time, and a thread that let go of the interpreter for it might wait to get it back.
_syscall_holding_interpreter = ctypes.PyDLL(None).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexWord:
    """A counter at a place in a writable buffer."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        """`offset`: bytes, a multiple of 8."""
        self._word = ctypes.c_uint64.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    def load(self) -> int:
        """The counter now."""
        return self._word.value

    def store(self, value: int) -> None:
        """Sets the counter and wakes all who sleep on it."""
        self._word.value = value
        address = ctypes.c_void_p(self._address)
        _syscall_holding_interpreter(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wait(self, value: int, timeout_s: float) -> bool:
        """Sleeps until the counter is at least `value`; False if the time is over first."""
        if self._word.value >= value:
            return True
        deadline = time.monotonic() + timeout_s
        while (now := self._word.value) < value:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._sleep_while(now, left)
        return True

    def _sleep_while(self, seen: int, timeout_s: float) -> None:
        """Returns when the counter differs from `seen`, or for no reason, or when the time is over."""
        seconds = int(timeout_s)
        timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        expected = ctypes.c_uint32(seen & 0xFFFFFFFF)
        address = ctypes.c_void_p(self._address)
        if _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(timeout), None, 0) < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, os.strerror(code))
