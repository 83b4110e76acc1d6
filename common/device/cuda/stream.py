"""The stream of a GPU: work runs at once on the calling thread, and enqueues its kernels."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from slipstream.common.device.cuda.poll_backoff import PollBackoff
from slipstream.common.errors import DeadlineExceededError, SlipstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.cuda.driver import CudaDriver
    from slipstream.common.device.interface import Stream

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
        """The handle lives as long as the process: PyTorch keeps its memory by stream."""
        PollBackoff().wait(self._is_idle, time.monotonic() + CLOSE_TIMEOUT_S)

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
