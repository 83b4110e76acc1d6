"""The CPU as a device: threads as streams, shared files as arenas, futexes as fences."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from slipstream.common.device.cpu.arena import FENCE_KIND, HostArena
from slipstream.common.device.interface import ClockSample
from slipstream.common.errors import DeadlineExceededError
from slipstream.common.host import work_as_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from slipstream.common.device.interface import Fence, Stream
    from slipstream.common.device.manifest import BufferSpec, Manifest
    from slipstream.common.worker.step import FenceName


CLOSE_TIMEOUT_S = 10.0


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

    def create_arena(self, specs: Iterable[BufferSpec], fences: Iterable[FenceName]) -> HostArena:
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

    def host_copy(self, fence: Fence, sources: Sequence[Sequence[torch.Tensor]]) -> PlainCopy:
        return PlainCopy(fence, sources)


class PlainCopy:
    """Implements `HostCopy` where the arena is host memory: only the wait is left."""

    def __init__(self, fence: Fence, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        self._fence = fence
        self._sources = sources

    def start(self, value: int, row: int) -> None:
        """Does nothing: `finish` copies."""

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        if not self._fence.wait_on_host(value, timeout_s):
            return None
        return [source[row].clone() for source in self._sources]

    def close(self) -> None:
        """Does nothing: there is no stream."""


def worker_threads() -> int:
    """Returns the compute threads of a worker: with more than half the cores each, two workers wait for each other."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _write_row(targets: torch.Tensor, row: torch.Tensor) -> None:
    targets.index_fill_(0, row, time.monotonic_ns())


def _write_time(word: ctypes.c_int64, owner: torch.Tensor) -> None:
    # Straight to memory: a stamp must cost next to nothing. `owner` keeps the memory mapped until then.
    word.value = time.monotonic_ns()
