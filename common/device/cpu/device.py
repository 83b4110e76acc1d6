"""The CPU as a device: threads as streams, shared files as arenas, futexes as fences."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from slipstream.common.device.cpu.shared_file import create_mapped, new_path, open_mapped
from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import DeadlineExceededError, FailedPreconditionError, ManifestError
from slipstream.common.host import work_as_stream
from slipstream.common.wire.manifest import HOST, Manifest, lay_out
from slipstream.common.wire.trace import ClockSample

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable

    from slipstream.common.device.interface import Look, Stream
    from slipstream.common.wire.manifest import BufferSpec
    from slipstream.common.wire.step import FenceName

KIND = "file"
FENCE_KIND = HOST
CLOSE_TIMEOUT_S = 10.0

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
# Waking takes no time, and a thread that released the interpreter for it might wait to get it back.
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

    def wait_on_host(self, value: int, timeout_s: float, look: Look = ANY_TIME) -> bool:
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

    def __init__(self, memory: memoryview, offset: int) -> None:
        super().__init__(memory, offset)
        self._floor = 0

    def signal(self, stream: Stream, value: int) -> None:
        """Raises FailedPreconditionError."""
        self.store(value)

    def store(self, value: int) -> None:
        """Raises FailedPreconditionError."""
        raise FailedPreconditionError(f"a fence that this process maps only for reading cannot be set to {value}")

    def poll(self) -> int:
        return max(self._word.value, self._floor)

    def wait_on_host(self, value: int, timeout_s: float, look: Look = ANY_TIME) -> bool:
        deadline = time.monotonic() + timeout_s
        # The word is read once: one that changes after that must end the sleep.
        while max(now := self._word.value, self._floor) < value:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._sleep_while(now, min(left, _LOCAL_RELEASE_S))
        return True

    def release(self, value: int) -> None:
        """Raises the counter as this process sees it."""
        self._floor = max(self._floor, value)


class HostArena:
    """Implements `Arena` on a mapped file."""

    fence_class: type[HostFence] = HostFence
    """The class of the fences that this process can set."""

    def __init__(
        self, manifest: Manifest, memory: mmap.mmap, *, is_owner: bool = False, read_only: bool = False
    ) -> None:
        """Use `create` or `open`."""
        self.manifest = manifest
        self._memory = _without_its_flag(memory) if read_only else memory
        self._is_owner = is_owner
        self._places = {placed.spec.name: placed for placed in manifest.buffers}
        view, fence = memoryview(self._memory), ReadOnlyFence if read_only else self.fence_class
        self._fences = {word.fence: fence(view, word.offset) for word in manifest.fences}

    @classmethod
    def create(cls, specs: Iterable[BufferSpec], fences: Iterable[FenceName]) -> Self:
        """Makes a file. Raises as `create_mapped` does."""
        buffers, words, size = lay_out(specs, fences, FENCE_KIND)
        path = new_path()
        manifest = Manifest(KIND, str(path), size, buffers, words)
        manifest.check()
        return cls(manifest, create_mapped(path, size), is_owner=True)

    @classmethod
    def open(cls, manifest: Manifest, *, read_only: bool = False) -> HostArena:
        """Maps another process's file. Raises ManifestError if it is not what the manifest says.

        `read_only`: the kernel lets this process write nothing through the mapping; what does is killed by SIGSEGV.
        """
        return cls(manifest, cls._mapped(manifest, read_only=read_only), read_only=read_only)

    @staticmethod
    def _mapped(manifest: Manifest, *, read_only: bool = False) -> mmap.mmap:
        if manifest.kind != KIND:
            raise ManifestError(f"arena kind {manifest.kind!r}: this worker opens {KIND!r}")
        for word in manifest.fences:
            if word.kind != FENCE_KIND:
                raise ManifestError(f"fence {word.fence.name} of kind {word.kind!r}: this worker opens {FENCE_KIND!r}")
        manifest.check()
        return open_mapped(Path(manifest.path), manifest.size, read_only=read_only)

    def tensor(self, name: str) -> torch.Tensor:
        placed = self._places.get(name)
        if placed is None:
            raise ManifestError(f"the arena has no buffer {name}")
        spec = placed.spec
        flat = torch.frombuffer(self._memory, dtype=spec.dtype, count=math.prod(spec.shape), offset=placed.offset)
        return flat.view(spec.shape)

    def fence(self, name: FenceName) -> HostFence:
        if name not in self._fences:
            raise ManifestError(f"the arena has no fence {name.name}")
        return self._fences[name]

    def seal(self) -> None:
        """Removes the file's name: the memory lives as long as it is mapped, and a crash leaves nothing behind."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.manifest.path)

    def close(self) -> None:
        """The mapping goes with its last view."""
        if self._is_owner:
            self.seal()
        self._fences.clear()


def _without_its_flag(memory: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    """Returns a buffer of the same memory that does not say that it cannot be written.

    PyTorch and ctypes know no tensors and words that are only read: PyTorch warns of them, ctypes refuses.
    """
    view = np.frombuffer(memory, np.uint8)
    array = (ctypes.c_char * len(view)).from_address(view.ctypes.data)
    array.mapped = view  # type: ignore[attr-defined]  # keeps the memory mapped for as long as the array lives
    return array


class HostStream:
    """Implements `Stream`. After work has raised, the rest is dropped, as on a GPU after a sticky error."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def synchronize(self, timeout_s: float) -> None:
        reached = threading.Event()
        self._work.put(reached.set)
        while not reached.wait(min(timeout_s, 0.05)):
            timeout_s -= 0.05
            if self.failure is not None:
                raise self.failure
            if timeout_s <= 0:
                raise DeadlineExceededError(f"stream {self.name} did not finish its work in time")

    def bind_thread(self) -> None:
        """Does nothing: a thread computes the tensors that it touches itself."""

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self._on_failure(error)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(None if self.failure is None else CLOSE_TIMEOUT_S)

    @torch.inference_mode()
    def _run(self) -> None:
        work_as_stream()
        while (work := self._work.get()) is not None:
            if self.failure is not None:
                continue
            try:
                work()
            except BaseException as error:
                self.fail(error)


class HostDevice:
    """Implements `Device`."""

    identity = "cpu"
    fence_kind = FENCE_KIND
    has_stream_threads = True
    under_mps = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> HostStream:
        return HostStream(name, on_failure)

    def create_arena(
        self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False
    ) -> HostArena:
        return HostArena.create(specs, fences)

    def open_arena(self, manifest: Manifest, *, read_only: bool = False) -> HostArena:
        return HostArena.open(manifest, read_only=read_only)

    def stamp(self, stream: Stream, target: torch.Tensor) -> None:
        """Writes CLOCK_MONOTONIC, which all processes of a host share."""
        word = ctypes.c_int64.from_address(target.data_ptr())
        stream.enqueue(lambda: _write_time(word, target))

    def stamp_row(self, stream: Stream, targets: torch.Tensor, row: torch.Tensor) -> None:
        stream.enqueue(lambda: _write_row(targets, row))

    def sample_clock(self) -> ClockSample:
        """Returns the same time twice: both are the same clock."""
        now = time.monotonic_ns()
        return ClockSample(now, now)

    def fetch(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors


def worker_threads() -> int:
    """Returns the compute threads of a worker: with more than half the cores each, two workers wait for each other."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _write_row(targets: torch.Tensor, row: torch.Tensor) -> None:
    targets.index_fill_(0, row, time.monotonic_ns())


def _write_time(word: ctypes.c_int64, owner: torch.Tensor) -> None:
    # Straight to memory: a stamp must cost next to nothing. `owner` keeps the memory mapped until then.
    word.value = time.monotonic_ns()
