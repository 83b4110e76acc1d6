"""A CPU on which time is counted in place of measured: each run gives the same times, whatever else the machine does.

Each thread has a time of its own, and only `CountedTime.spend` makes it later. Work of a stream begins when it was
enqueued or later, and a wait ends when its fence was signalled or later. Everything else takes no time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from slipstream.common.device.cpu.device import HostArena, HostDevice, HostStream
from slipstream.common.device.cpu.fence import HostFence
from slipstream.common.device.interface import ANY_TIME, PollTime, Stream
from slipstream.common.wire.manifest import BufferSpec, Manifest
from slipstream.common.wire.step import FenceName


class CountedTime(threading.local):
    """The time of the thread that asks, in nanoseconds."""

    now_ns = 0

    def spend(self, length_ns: int) -> None:
        """The thread is busy so long."""
        self.now_ns += length_ns

    def reach(self, time_ns: int) -> None:
        """The thread goes on at this time or later."""
        self.now_ns = max(self.now_ns, time_ns)


class _CountedStream(HostStream):
    def __init__(self, time: CountedTime, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self._time = time
        super().__init__(name, on_failure)

    def enqueue(self, work: Callable[[], None]) -> None:
        enqueued_ns = self._time.now_ns

        def run() -> None:
            self._time.reach(enqueued_ns)
            work()

        super().enqueue(run)


class _CountedFence:
    """Implements `Fence`."""

    is_releasable = True

    def __init__(self, fence: HostFence, time: CountedTime, signals: dict[int, int]) -> None:
        """`signals`: the time of each value. All who map the fence share it."""
        self._fence = fence
        self._time = time
        self._signals = signals
        self.poll, self.release = fence.poll, fence.release

    def signal(self, stream: Stream, value: int) -> None:
        stream.enqueue(lambda: self._signals.update({value: self._time.now_ns}))
        self._fence.signal(stream, value)

    def wait(self, stream: Stream, value: int) -> None:
        self._fence.wait(stream, value)
        stream.enqueue(lambda: self._reach(value))

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        has_come = self._fence.wait_on_host(value, timeout_s)
        if has_come:
            self._reach(value)
        return has_come

    def _reach(self, value: int) -> None:
        later = [signalled for signalled in self._signals.copy() if signalled >= value]
        # A wait that was released has no signal.
        self._time.reach(self._signals[min(later)] if later else 0)


class _CountedArena(HostArena):
    device: CountedDevice

    def of(self, device: CountedDevice) -> _CountedArena:
        self.device = device
        return self

    def fence(self, name: FenceName) -> _CountedFence:  # type: ignore[override]
        signals = self.device.signals[self.manifest.path, name]
        return _CountedFence(super().fence(name), self.device.time, signals)


class CountedDevice(HostDevice):
    """Implements `Device`; shared by the scheduler and the workers of a test, which run in its process."""

    def __init__(self) -> None:
        super().__init__()
        self.time = CountedTime()
        self.signals: dict[tuple[str, FenceName], dict[int, int]] = defaultdict(dict)
        """When each value of a fence was signalled, by the arena's path and the fence."""

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> HostStream:
        return _CountedStream(self.time, name, on_failure)

    def create_arena(
        self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False
    ) -> HostArena:
        return _CountedArena.create(specs, fences).of(self)

    def open_arena(self, manifest: Manifest, *, read_only: bool = False) -> HostArena:
        return _CountedArena.open(manifest, read_only=read_only).of(self)  # type: ignore[attr-defined,no-any-return]

    def stamp(self, stream: Stream, target: torch.Tensor) -> None:
        """Writes the stream's own time."""
        stream.enqueue(lambda: target.fill_(self.time.now_ns) and None)
