"""The stream of the CPU: a thread that runs closures in order."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import DeadlineExceededError
from slipstream.common.host import work_as_stream

if TYPE_CHECKING:
    from collections.abc import Callable

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
