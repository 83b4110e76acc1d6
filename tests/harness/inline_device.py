"""A CPU that enqueues as a GPU does: work runs on the thread that enqueues it, in place of being launched.

So what a worker does differently on a GPU, staging and replaying, can be looked at without one. Work runs at once, or,
behind a wait for a fence that is not there yet, when a stream of the device has signalled it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.common.device.cpu.device import HostArena, HostDevice
from slipstream.common.device.cpu.fence import HostFence
from slipstream.common.device.interface import ANY_TIME, PollTime
from slipstream.common.errors import DeadlineExceededError
from slipstream.common.wire.manifest import BufferSpec, Manifest
from slipstream.common.wire.step import FenceName

LOOK_S = 0.001


class InlineStream:
    """Implements `Stream`."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None], device: InlineDevice) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._device = device
        self._is_in_work = False
        self._is_held = False
        """True if the work that runs has enqueued a wait: what it enqueues after that waits, too."""
        self._pending: deque[tuple[Callable[[], bool] | None, Callable[[], None]]] = deque()
        """Work, and what it waits for."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """See `Stream.enqueue`."""
        if self._is_in_work and not self._is_held:
            work()
        elif self.failure is None:
            self._pending.append((None, work))
            self._device.run()

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Has what is enqueued from now on wait."""
        if self._is_in_work and not self._is_held and is_met():
            return
        self._is_held = True
        self._pending.append((is_met, lambda: None))

    def advance(self) -> bool:
        """Runs what waits for nothing. Returns whether that was anything."""
        has_run = False
        while self._pending and not self._is_in_work and ((is_met := self._pending[0][0]) is None or is_met()):
            _, work = self._pending.popleft()
            self._run(work)
            has_run = True
        return has_run

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._is_in_work, self._is_held = True, False
            with torch.inference_mode():
                work()
        except BaseException as error:
            self.fail(error)
        finally:
            self._is_in_work = False

    def bind_thread(self) -> None:
        """See `Stream.bind_thread`."""

    def synchronize(self, timeout_s: float) -> None:
        """See `Stream.synchronize`."""
        deadline = time.monotonic() + timeout_s
        self._device.run()
        while self.failure is None and self._pending:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"stream {self.name} did not finish its work in time")
            self._device.run()
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """See `Stream.fail`."""
        self.failure = error
        self._pending.clear()
        self._on_failure(error)

    def close(self) -> None:
        """See `Stream.close`."""


class InlineFence:
    """Implements `Fence`: waits hold up a stream, and no thread."""

    def __init__(self, fence: HostFence, device: InlineDevice) -> None:
        self._fence = fence
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fence, name)

    def wait(self, stream: InlineStream, value: int) -> None:
        """See `Fence.wait`."""
        stream.wait_until(lambda: self._fence.poll() >= value)

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        """See `Fence.wait_on_host`. Runs what another thread, or another process, has signalled."""
        deadline = time.monotonic() + timeout_s
        while not self._fence.wait_on_host(value, min(LOOK_S, max(deadline - time.monotonic(), 0.0)), poll_time):
            if time.monotonic() > deadline:
                return False
            self._device.run()
        return True

    def release(self, value: int) -> None:
        """See `Fence.release`."""
        self._fence.release(value)
        self._device.run()


class InlineDevice(HostDevice):
    """Implements `Device`."""

    has_stream_threads = False
    under_mps = False

    def __init__(self) -> None:
        super().__init__()
        self._streams: list[InlineStream] = []

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> InlineStream:  # type: ignore[override]
        """See `Device.create_stream`."""
        self._streams.append(InlineStream(name, on_failure, self))
        return self._streams[-1]

    def create_arena(
        self, specs: Iterable[BufferSpec], fences: Iterable[FenceName], *, on_host: bool = False
    ) -> HostArena:
        """See `Device.create_arena`."""
        return self._inline(super().create_arena(specs, fences, on_host=on_host))

    def open_arena(self, manifest: Manifest, *, read_only: bool = False) -> HostArena:
        """See `Device.open_arena`."""
        return self._inline(super().open_arena(manifest, read_only=read_only))

    def run(self) -> None:
        """Runs what is enqueued on all streams, as far as it waits for nothing."""
        while any(stream.advance() for stream in self._streams):
            pass

    def _inline(self, arena: HostArena) -> HostArena:
        fences: dict[Any, Any] = arena._fences
        for name, fence in fences.items():
            fences[name] = InlineFence(fence, self)
        return arena
