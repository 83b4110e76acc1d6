"""A worker that is late on demand, for `step_check.py`: the real one, but for its engine.

    python -m slipstream.benchmarks.late_worker CONTROL MODULE …

serves as MODULE does with the arguments behind it. The first byte of the file CONTROL is a `Late`, which takes effect
at once.
"""

from __future__ import annotations

import enum
import mmap
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.common.worker.step import FenceName, Role
from slipstream.services.worker import server
from slipstream.services.worker.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.worker.contract import Attachment
    from slipstream.common.worker.step import FencePoint, StepCommand
    from slipstream.services.worker.epoch import Epoch

DELAY_US = 500.0


class Late(enum.IntEnum):
    """The place of the delay."""

    NOTHING = 0
    STASH = 1
    """Verify's stream, behind the end stamp of a step and before the signal of its stash."""
    DONE = 2
    """Draft's stream, behind the end stamp of a step and before the signal of its done."""
    DRAFT_COMMAND = 3
    """Draft's host, before it enqueues a command."""
    VERIFY_COMMAND = 4
    """Verify's host, before it enqueues a command."""


_SIGNALS = {Late.STASH: FenceName.VERIFY_STASH, Late.DONE: FenceName.DRAFT_DONE}
_COMMANDS = {Late.DRAFT_COMMAND: Role.DRAFT, Late.VERIFY_COMMAND: Role.VERIFY}


class LateEngine(Engine):
    """The product's engine with a delay where the control file puts one."""

    def __init__(self, control: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        with control.open("rb") as file:
            self._control = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._delay: Callable[[], None] = _spin

    def attach(self, attachment: Attachment) -> None:
        if not self._device.has_stream_threads:
            from slipstream.benchmarks.dummy_model import make_kernel

            self._delay = partial(make_kernel(DELAY_US / 1000, self._device).run, lambda: None)
        super().attach(attachment)

    def enqueue(self, command: StepCommand) -> None:
        if _COMMANDS.get(Late(self._control[0])) is self.description.role:
            _spin()
        super().enqueue(command)

    def _signal(self, opened: Epoch, point: FencePoint, command: StepCommand) -> None:
        if _SIGNALS.get(Late(self._control[0])) is point.fence:
            self._stream.enqueue(self._delay)
        super()._signal(opened, point, command)


def _spin() -> None:
    """Takes the time without a sleep, which a busy machine lets end late."""
    end = time.monotonic() + DELAY_US / 1e6
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    control, module = Path(sys.argv.pop(1)), sys.argv.pop(1)
    setattr(server, "Engine", partial(LateEngine, control))  # noqa: B010 - the module does not export it
    runpy.run_module(module, run_name="__main__")
