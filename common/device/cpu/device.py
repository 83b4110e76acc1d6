"""The CPU as a device: threads as streams, shared files as arenas, futexes as fences."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from slipstream.common.device.cpu.fence import HostFence, ReadOnlyFence, without_its_flag
from slipstream.common.device.cpu.shared_file import create_mapped, new_path, open_mapped
from slipstream.common.errors import DeadlineExceededError, ManifestError
from slipstream.common.host import work_as_stream
from slipstream.common.wire.manifest import HOST, Manifest, lay_out
from slipstream.common.wire.trace import ClockSample

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable

    from slipstream.common.device.interface import Stream
    from slipstream.common.wire.manifest import BufferSpec
    from slipstream.common.wire.step import FenceName

KIND = "file"
FENCE_KIND = HOST
CLOSE_TIMEOUT_S = 10.0


class HostArena:
    """Implements `Arena` on a mapped file."""

    fence_class: type[HostFence] = HostFence
    """The class of the fences that this process can set."""

    def __init__(
        self, manifest: Manifest, memory: mmap.mmap, *, is_owner: bool = False, read_only: bool = False
    ) -> None:
        """Use `create` or `open`."""
        self.manifest = manifest
        self._memory = without_its_flag(memory) if read_only else memory
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
