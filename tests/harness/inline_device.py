"""A CPU that enqueues as a GPU does: work runs at once on the thread that enqueues it, in place of being launched.

So what a worker does differently on a GPU, staging and replaying, can be looked at without one. Commands must come in
an order in which nothing waits for what comes later, which is the order in which a scheduler sends them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.common.device.cpu.device import HostDevice

if TYPE_CHECKING:
    from collections.abc import Callable


class InlineStream:
    """Implements `Stream`."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._is_in_work = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """See `Stream.enqueue`."""
        if self.failure is not None:
            return
        if self._is_in_work:
            work()
            return
        try:
            self._is_in_work = True
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
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """See `Stream.fail`."""
        self.failure = error
        self._on_failure(error)

    def close(self) -> None:
        """See `Stream.close`."""


class InlineDevice(HostDevice):
    """Implements `Device`."""

    has_stream_threads = False
    under_mps = False

    def create_stream(self, name: str, on_failure: Callable[[BaseException], None]) -> InlineStream:  # type: ignore[override]
        """See `Device.create_stream`."""
        return InlineStream(name, on_failure)
