"""The streams of a GPU: of the steps, whose work runs at once on the calling thread, and of small copies beside it."""

from __future__ import annotations

import ctypes
import threading
import time
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver as cu

from slipstream.common.device.cuda.poll_backoff import PollBackoff
from slipstream.common.device.interface import bounded_clock
from slipstream.common.errors import DeadlineExceededError, SlipstreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.device.cuda.driver import CudaDriver, CudaKernels
    from slipstream.common.device.interface import Stream
    from slipstream.common.wire.trace import ClockSample

CLOSE_TIMEOUT_S = 10.0


class CudaStream:
    """Implements `Stream`. Belongs to one thread, but for `synchronize` and `close`."""

    def __init__(
        self, name: str, driver: CudaDriver, device: torch.device, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.handle = driver.create_stream()
        self._driver = driver
        self._on_failure = on_failure
        self._is_in_work = False
        self._torch_stream = torch.cuda.ExternalStream(self.handle, device=device)  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], None]) -> None:
        """After work has raised, the rest is dropped. Work may enqueue more: it becomes a part of it."""
        if self.failure is not None:
            return
        if self._is_in_work:
            work()
            return
        try:
            self._is_in_work = True
            # Not `torch.cuda.stream`, which takes ten times as long: there is no other stream to go back to.
            torch.cuda.set_stream(self._torch_stream)
            with torch.inference_mode():
                work()
        except BaseException as error:
            self.fail(error)
        finally:
            self._is_in_work = False

    def bind_thread(self) -> None:
        torch.cuda.set_stream(self._torch_stream)

    def synchronize(self, timeout_s: float) -> None:
        """Polls, because the driver's own wait has no end if a peer is gone."""
        is_idle = PollBackoff().wait(self._is_idle, time.monotonic() + timeout_s)
        if self.failure is not None:
            raise self.failure
        if not is_idle:
            raise DeadlineExceededError(f"stream {self.name} did not finish its work in time")

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self._on_failure(error)

    def close(self) -> None:
        """Gives the handle back to the driver if its work ends in time."""
        is_idle = PollBackoff().wait(self._is_idle, time.monotonic() + CLOSE_TIMEOUT_S)
        if is_idle and self.failure is None:
            self._driver.give_back_stream(self.handle)

    def _is_idle(self) -> bool:
        try:
            return self._driver.is_idle(self.handle)
        except SlipstreamError as error:
            self.fail(error)
            return True


def handle_of(stream: Stream) -> int:
    """Returns the driver's handle of a stream."""
    assert isinstance(stream, CudaStream), "streams of a device are its own"
    return stream.handle


TIMEOUT_S = 10.0
"""Far more than a copy takes; only a lost GPU needs longer."""
STAGING_BYTES = 1 << 20
SPIN_S = 0.00003
"""A copy of a few bytes takes 7 us: less than a sleep."""
CLOCK_READINGS = 32
CLOCK_S = 0.1
"""For all readings together: the GPU may answer late while another process has it to itself for a time slice."""


class SideStream:
    """A stream for small copies and writes, which never waits for another process.

    Any thread may call; each call returns when its work is done.
    """

    def __init__(self, driver: CudaDriver, kernels: CudaKernels) -> None:
        self.handle = driver.create_stream()
        self._driver = driver
        self._kernels = kernels
        self._lock = threading.Lock()
        # Pinned once: an allocation waits for all streams, and one of them may wait for a process that is gone.
        self._pinned = torch.zeros(8 + STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._word = self._pinned.data_ptr()
        self._word_value = ctypes.c_uint64.from_address(self._word)
        self._staging = self._word + 8

    def read_word(self, address: int) -> int:
        """Reads 64 bits of the device."""
        with self._lock:
            self._driver.call(cu.cuMemcpyDtoHAsync, self._word, address, 8, self.handle)
            self._finish()
            return self._word_value.value

    def write_word(self, address: int, value: int) -> None:
        """Writes 64 bits of the device."""
        with self._lock:
            self._kernels.store(self.handle, address, value)
            self._finish()

    def zero(self, address: int, size: int) -> None:
        """Sets `size` bytes to 0."""
        with self._lock:
            self._driver.call(cu.cuMemsetD8Async, address, 0, size, self.handle)
            self._finish()

    def to_host(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies contiguous tensors, at most `STAGING_BYTES` together, to host memory."""
        copies = [torch.empty(source.shape, dtype=source.dtype, device="cpu") for source in sources]
        offsets = list(accumulate((source.nbytes for source in sources), initial=self._staging))
        assert offsets[-1] <= self._staging + STAGING_BYTES, "the tensors are small"
        with self._lock:
            for source, offset in zip(sources, offsets, strict=False):
                self._driver.call(cu.cuMemcpyDtoHAsync, offset, source.data_ptr(), source.nbytes, self.handle)
            self._finish()
            for copy, offset in zip(copies, offsets, strict=False):
                ctypes.memmove(copy.data_ptr(), offset, copy.nbytes)
        return copies

    def sample_clock(self) -> ClockSample:
        """Compares %globaltimer with CLOCK_MONOTONIC by several readings. Raises DeadlineExceededError."""
        readings: list[tuple[int, int, int]] = []
        started = time.monotonic()
        for _ in range(CLOCK_READINGS):
            with self._lock:
                readings.append(self._read_clocks())
            if time.monotonic() - started > CLOCK_S:
                break
        return bounded_clock(readings)

    def finish(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for what a caller enqueued on `handle`. Raises DeadlineExceededError."""
        with self._lock:
            self._finish(timeout_s)

    def _read_clocks(self) -> tuple[int, int, int]:
        """Returns the host's time before, the GPU's, and the host's after, once the stamp is in pinned memory."""
        self._word_value.value = 0
        before_ns = time.monotonic_ns()
        self._kernels.stamp(self.handle, self._word)
        self._wait(lambda: self._word_value.value != 0, TIMEOUT_S)
        after_ns = time.monotonic_ns()
        device_ns = self._word_value.value
        self._finish()
        return before_ns, device_ns, after_ns

    def _finish(self, timeout_s: float = TIMEOUT_S) -> None:
        self._wait(lambda: self._driver.is_idle(self.handle), timeout_s)

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        if not PollBackoff(spin_s=SPIN_S).wait(is_done, time.monotonic() + timeout_s):
            raise DeadlineExceededError(f"the GPU did not answer within {timeout_s:.1f} s")
