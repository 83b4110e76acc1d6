"""Shared memory, fences and streams of the simulated device: the real layout over memory of this process.

A stream is a list of work that the world runs piece by piece. A wait holds it as long as the fence's word in the memory
is too low, so a word that is written late, or set back, has its effect.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import torch

from slipstream.common.device.interface import ANY_TIME, PollTime
from slipstream.common.errors import ManifestError
from slipstream.common.wire.manifest import EVENT, HOST, BufferSpec, Manifest, lay_out
from slipstream.common.wire.step import FenceName
from slipstream.common.wire.trace import ClockSample
from tests.simulator.threads import Signal
from tests.simulator.world import Process, World


class SharedMemory:
    """Bytes that several processes map. Alive as long as this object is."""

    def __init__(self, world: World, size: int) -> None:
        self.memory = bytearray(size)
        self.changed = Signal(world)
        """Of any fence word."""
        self.recorded: dict[int, int] = {}
        """For event fences: the last value whose record was enqueued, by the word's offset."""
        self.is_sealed = False
        self.is_freed = False
        """True once its owner gave it back: whoever touches it then may touch what another one has by now."""
        self.is_released = False
        """True once a wait was released, or is left out where it cannot be: what is behind it may read anything."""

    def check(self, process: Process) -> None:
        """Called with each access."""
        if self.is_freed and process.is_alive and not process.is_on_its_way_out:
            process.world.fail(f"{process.name} used a region that was given back")


class SimulatedStream:
    """Implements `Stream` for a process."""

    def __init__(self, process: Process, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.is_stuck = False
        """True once a kernel hangs: nothing enqueued behind it ever runs."""
        self.paused_until = 0.0
        """Slow until then."""
        self.items_left: int | None = None
        """Pieces of work until a kernel hangs; None is never."""
        self._process = process
        self._on_failure = on_failure
        self._items: deque[Callable[[], bool]] = deque()
        self._is_scheduled = False
        self.idle = Signal(process.world)
        """Changes when there is nothing left to do."""

    @property
    def is_idle(self) -> bool:
        """True if all that was enqueued is done."""
        return not self._items

    def enqueue(self, work: Callable[[], None]) -> None:
        """See `Stream.enqueue`."""

        def run() -> bool:
            work()
            return True

        self._add(run)

    def enqueue_wait(self, is_over: Callable[[], bool], changed: Signal) -> None:
        """Appends a wait."""

        def run() -> bool:
            if is_over():
                return True
            changed.watchers.append(self._schedule)
            return False

        self._add(run)

    def fail(self, error: BaseException) -> None:
        """See `Stream.fail`."""
        if self.failure is None:
            self.failure = error
            self._items.clear()
            self._on_failure(error)
            self.idle.changed()

    def _add(self, item: Callable[[], bool]) -> None:
        if self.failure is None:
            self._items.append(item)
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            world = self._process.world
            self._process.at(max(world.latency(), self.paused_until - world.now), self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        if self.items_left is not None and self._process.world.now >= self.paused_until:
            self.items_left -= 1
            self.is_stuck |= self.items_left < 0
        if self.is_stuck or self.failure is not None or not self._items:
            return
        try:
            if not self._items[0]():
                return
        except Exception as error:
            self.fail(error)
            return
        self._items.popleft()
        if self._items:
            self._schedule()
        else:
            self.idle.changed()


class SimulatedFence:
    """Implements `Fence` on a word of shared memory, as one process sees it."""

    def __init__(
        self, process: Process, shared: SharedMemory, offset: int, kind: str, *, read_only: bool = False
    ) -> None:
        self.is_releasable = kind != EVENT
        self._read_only = read_only
        self._released = 0
        """A reader cannot write the word: it gives up its own waits up to here."""
        self._process = process
        self._shared = shared
        self._offset = offset
        self._word = memoryview(shared.memory)[offset : offset + 8].cast("Q")

    def signal(self, stream: SimulatedStream, value: int) -> None:
        """See `Fence.signal`."""
        self._shared.recorded[self._offset] = value
        stream.enqueue(lambda: self._store(value))

    def wait(self, stream: SimulatedStream, value: int) -> None:
        """See `Fence.wait`."""
        if not self.is_releasable and self._shared.recorded.get(self._offset, 0) < value:
            # With events such a wait is silently none.
            self._process.world.fail(f"a wait for {value} was enqueued before its record")
        stream.enqueue_wait(lambda: max(self.poll(), self._released) >= value, self._shared.changed)

    def poll(self) -> int:
        """See `Fence.poll`."""
        return self._word[0] if self._is_there() else 0

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        """See `Fence.wait_on_host`."""
        if self.poll() >= value:
            return True
        return self._shared.changed.wait_for(lambda: self.poll() >= value, timeout_s)

    def release(self, value: int) -> None:
        """See `Fence.release`."""
        if self._process.is_alive and max(self.poll(), self._released) < value:
            # An event cannot be released: the scheduler leaves the wait out of the commands that it still sends.
            self._shared.is_released = True
            if not self.is_releasable:
                return
            if self._read_only:
                self._released = value
                self._shared.changed.changed()
            else:
                self._store(value)

    def _store(self, value: int) -> None:
        if self._process.is_alive and self._is_there():
            self._word[0] = value
            self._shared.changed.changed()

    def _is_there(self) -> bool:
        self._shared.check(self._process)
        return not self._shared.is_freed


class SimulatedArena:
    """Implements `Arena`."""

    def __init__(
        self,
        process: Process,
        shared: SharedMemory,
        manifest: Manifest,
        *,
        is_owner: bool = False,
        read_only: bool = False,
    ) -> None:
        self._is_owner = is_owner
        self._process = process
        self.manifest = manifest
        self.shared = shared
        self._places = {placed.spec.name: placed for placed in manifest.buffers}
        self._fences = {
            word.fence: SimulatedFence(process, shared, word.offset, word.kind, read_only=read_only)
            for word in manifest.fences
        }

    def tensor(self, name: str) -> torch.Tensor:
        """See `Arena.tensor`."""
        if name not in self._places:
            raise ManifestError(f"the arena has no buffer {name}")
        placed = self._places[name]
        spec = placed.spec
        count = math.prod(spec.shape)
        return torch.frombuffer(self.shared.memory, dtype=spec.dtype, count=count, offset=placed.offset).view(
            spec.shape
        )

    def fence(self, name: FenceName) -> SimulatedFence:
        """See `Arena.fence`."""
        if name not in self._fences:
            raise ManifestError(f"the arena has no fence {name.name}")
        return self._fences[name]

    def seal(self) -> None:
        """See `Arena.seal`."""
        self.shared.is_sealed = True

    def close(self) -> None:
        """See `Arena.close`. Results outlive their owner's interest; a region is another's as soon as it is freed."""
        if self._is_owner and self._process.is_alive and FenceName.VERIFY_PUBLISH not in self._fences:
            self.shared.is_freed = True


class Host:
    """The machine: the shared memory that can be opened by its path."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shared: dict[str, SharedMemory] = {}


class SimulatedDevice:
    """Implements the part of `Device` that the scheduler uses, and arenas and streams for workers."""

    identity = "cpu"
    has_stream_threads = True
    under_mps = False
    torch_device = torch.device("cpu")

    def __init__(self, host: Host, process: Process, fence_kind: str = HOST) -> None:
        self.fence_kind = fence_kind
        self._host = host
        self._process = process

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> SimulatedStream:
        """See `Device.create_stream`."""
        return SimulatedStream(self._process, name, on_failure)

    def create_arena(
        self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False
    ) -> SimulatedArena:
        """See `Device.create_arena`."""
        buffers, words, size = lay_out(specs, fences, self.fence_kind)
        path = f"arena-{len(self._host.shared)}"
        shared = self._host.shared[path] = SharedMemory(self._host.world, size)
        manifest = Manifest("file", path, size, buffers, words)
        return SimulatedArena(self._process, shared, manifest, is_owner=True)

    def open_arena(self, manifest: Manifest, *, read_only: bool = False) -> SimulatedArena:
        """See `Device.open_arena`."""
        shared = self._host.shared[manifest.path]
        if shared.is_sealed:
            raise ManifestError(f"arena {manifest.path} is sealed")
        manifest.check()
        return SimulatedArena(self._process, shared, manifest, read_only=read_only)

    def sample_clock(self) -> ClockSample:
        """See `Device.sample_clock`."""
        now_ns = round(self._host.world.monotonic() * 1e9)
        return ClockSample(now_ns, now_ns)

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """See `Device.to_host`."""
        return tensors
