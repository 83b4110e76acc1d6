"""The NumPy drafter, with a log of what its stream does for the happens-before checker: logged_drafter.py LOG ..."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slipstream.common.wire.events import EventLog, LogOp, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "numpy_drafter"))

from collections.abc import Callable

import arena
import epoch
import main

LOG = EventLog(StreamName.DRAFT, Path(sys.argv.pop(1)))
READS = (BufferName.SEQ_LENS, BufferName.NUM_NEW, BufferName.LAST_TOKENS)
step = attachment = 0


class LoggedFence(arena.Fence):
    """Logs waits that are over, and signals before they are made."""

    name: FenceName

    def signal(self, value: int) -> None:
        """See `Fence.signal`."""
        LOG.fence(LogOp.SIGNAL, self.name, value, step=step, attachment=attachment)
        super().signal(value)

    def wait(self, value: int, is_over: Callable[[], bool]) -> bool:
        """See `Fence.wait`."""
        arrived = super().wait(value, is_over)
        if arrived:
            LOG.fence(LogOp.WAIT, self.name, value, step=step, attachment=attachment)
        return arrived


class LoggedArena(arena.Arena):
    """Hands out such fences."""

    def fence(self, fence: Any) -> LoggedFence:
        """See `Arena.fence`."""
        made = super().fence(fence)
        made.__class__ = LoggedFence
        made.name = FenceName(fence)
        return made


class LoggedEpoch(epoch.Epoch):
    """Logs what each step reads and writes."""

    def _carry_out(self, command: Any) -> None:
        global step, attachment
        step, attachment = command.step, command.epoch
        LOG.recv(epoch=command.epoch, step=step)
        super()._carry_out(command)

    def _propose(self, slot: int, num_guesses: int) -> list[int]:
        for name in READS:
            LOG.access(name, [slot], is_write=False, step=step, attachment=attachment)
        guesses = super()._propose(slot, num_guesses)
        LOG.access(BufferName.DRAFT_TOKENS, [slot], is_write=True, step=step, attachment=attachment)
        return guesses


epoch.Arena = LoggedArena
main.Epoch = LoggedEpoch

if __name__ == "__main__":
    status = main.main()
    LOG.close()
    sys.exit(status)
