"""A process with a session of its own, ended together with whatever it has started there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXEC_WITH_PARENT = Path(__file__).with_name("exec_with_parent.py")
_POLL_S = 0.02


class ProcessGroup:
    """A started command, the leader of its group. It dies with this process (see `exec_with_parent.py`).

    The leader is reaped by `kill` and not before: until then no other process, and no other group, can get its id.
    """

    def __init__(self, *argv: str, output: BinaryIO, environment: Mapping[str, str]) -> None:
        """Starts it on the main thread, with no input; what it says goes to `output`."""
        self._leader = subprocess.Popen(
            (sys.executable, "-I", "-S", str(_EXEC_WITH_PARENT), str(os.getpid()), *argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def status(self) -> int | None:
        """How the leader ended: its exit status, or the signal's number below zero. None while it runs."""
        if self._leader.returncode is not None:
            return self._leader.returncode
        ended = os.waitid(os.P_PID, self._leader.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    async def ends_within(self, timeout_s: float) -> bool:
        """Whether the leader ends by itself in that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.status is None:  # noqa: ASYNC110 - an end that is not reaped raises no event
                    await asyncio.sleep(_POLL_S)
        return self.status is not None

    def kill(self) -> None:
        """Ends every process of the group that still runs, and reaps the leader."""
        if self._leader.returncode is None:
            os.killpg(self._leader.pid, signal.SIGKILL)
            self._leader.wait()
