"""A GPU whose copies of results are ordered as they were before they had a stream of their own: to measure against."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.benchmarks.overlap_policies import MAIN_STREAM, WHOLE_STEP
from slipstream.common.device.cuda.device import CudaDevice
from slipstream.common.device.cuda.fences import TimelineFence
from slipstream.common.device.cuda.poll_backoff import PollBackoff
from slipstream.common.device.manifest import TIMELINE
from slipstream.common.worker.step import FenceName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.interface import Fence
    from slipstream.common.device.manifest import BufferSpec

CLOSE_TIMEOUT_S = 5.0


class PolicyDevice(CudaDevice):
    """The scheduler's device under one of the earlier policies; workers keep theirs."""

    def __init__(self, policy: str) -> None:
        """`policy`: WHOLE_STEP or MAIN_STREAM."""
        assert policy in (WHOLE_STEP, MAIN_STREAM), policy
        super().__init__(TIMELINE)
        self._policy = policy
        self._stash: TimelineFence | None = None

    def create_arena(self, specs: Iterable[BufferSpec], fences: Iterable[FenceName]) -> CudaArena:
        """See `Device.create_arena`."""
        arena = super().create_arena(specs, fences)
        stash = arena.fence(FenceName.VERIFY_STASH)
        assert isinstance(stash, TimelineFence), "the kind that was asked for"
        self._stash = stash
        return arena

    def host_copy(self, fence: Fence, sources: Sequence[Sequence[torch.Tensor]]) -> MainStreamCopy:
        """See `Device.host_copy`."""
        assert isinstance(fence, TimelineFence), "the kind that was asked for"
        assert self._stash is not None, "an arena was created"
        gate = self._stash if self._policy == WHOLE_STEP else fence
        return MainStreamCopy(self.driver, gate, self._stash, sources)


class MainStreamCopy:
    """Implements `HostCopy` on a stream that has other work: it follows every step that is sent to its end.

    That is what a scheduler's own stream does which must not overwrite what a step still reads. A copy is enqueued
    when its result is asked for; by then the next step's end may be ahead of it.
    """

    def __init__(
        self,
        driver: CudaDriver,
        gate: TimelineFence,
        step_end: TimelineFence,
        sources: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self._driver = driver
        self._gate = gate
        self._step_end = step_end
        self._sources = sources
        self._stream = driver.create_stream()
        self._mirrors = [torch.zeros_like(rows[0], device="cpu", pin_memory=True) for rows in sources]
        self._landed_word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._landed = ctypes.c_int64.from_address(self._landed_word.data_ptr())
        self._copied = 0
        self._started = 0

    def start(self, value: int, row: int) -> None:
        """See `HostCopy.start`: only the barrier."""
        self._started = value
        self._step_end.wait_on_stream(self._stream, value)

    def finish(self, value: int, row: int, timeout_s: float) -> list[torch.Tensor] | None:
        """See `HostCopy.finish`."""
        if self._copied < value:
            self._copied = value
            self._gate.wait_on_stream(self._stream, value)
            for source, mirror in zip(self._sources, self._mirrors, strict=True):
                size = mirror.numel() * mirror.element_size()
                self._driver.call(cu.cuMemcpyDtoHAsync, mirror.data_ptr(), source[row].data_ptr(), size, self._stream)
            self._driver.streams.write(self._stream, self._landed_word.data_ptr(), value)
        deadline = time.monotonic() + timeout_s
        backoff = PollBackoff()
        while self._landed.value < value:
            if time.monotonic() >= deadline:
                return None
            backoff.sleep(deadline)
        return self._mirrors

    def close(self) -> None:
        """See `HostCopy.close`."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._driver.is_idle(self._stream) and time.monotonic() < deadline:
            self._step_end.release(self._started)
            self._gate.release(self._started)
        self._driver.call(cu.cuStreamDestroy, self._stream)
