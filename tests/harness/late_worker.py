"""A worker with dummy kernels that is late on demand: `late_worker.py CONTROL …`, then the command line of a dummy.

The first byte of the file CONTROL is a `Late`, which takes effect at once.
"""

from __future__ import annotations

import enum
import mmap
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.benchmarks.dummy_worker import main
from slipstream.common.rpc.service_options import run_command
from slipstream.common.wire.step import FenceName, FencePoint, Role, StepCommand
from slipstream.services.worker import server
from slipstream.services.worker.engine import Engine
from slipstream.services.worker.epoch import Epoch

DELAY_US = 500.0


class Late(enum.IntEnum):
    """The place of the delay."""

    NOTHING = 0
    STASH = 1
    """Verify's stream, behind the end stamp of a step and before the signal of its stash."""
    PROPOSED = 2
    """Draft's stream, after the end stamp of a decode part and before its signal."""
    DRAFT_COMMAND = 3
    """Draft's host, before it enqueues a command."""
    VERIFY_COMMAND = 4
    """Verify's host, before it enqueues a command."""


_SIGNALS = {Late.STASH: FenceName.VERIFY_STASH, Late.PROPOSED: FenceName.DRAFT_PROPOSED}
_COMMANDS = {Late.DRAFT_COMMAND: Role.DRAFT, Late.VERIFY_COMMAND: Role.VERIFY}


class LateEngine(Engine):
    """The product's engine with a delay where the control file puts one."""

    def __init__(self, control: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        with control.open("rb") as file:
            self._control = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)

    def enqueue(self, command: StepCommand) -> None:
        if _COMMANDS.get(Late(self._control[0])) is self.description.role:
            _spin()
        super().enqueue(command)

    def _signal(self, opened: Epoch, point: FencePoint, command: StepCommand) -> None:
        if _SIGNALS.get(Late(self._control[0])) is point.fence:
            self._stream.enqueue(_spin)
        super()._signal(opened, point, command)


def _spin() -> None:
    """Takes the time without a sleep, which a busy machine lets end late."""
    end = time.monotonic() + DELAY_US / 1e6
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    setattr(server, "Engine", partial(LateEngine, Path(sys.argv.pop(1))))  # noqa: B010 - the module does not export it
    run_command(main)
