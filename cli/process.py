"""Processes that `slipstream up` starts: bound to this one, in a session of their own, ended politely or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from slipstream.common.errors import AddressInUseError
from slipstream.common.private_files import open_new
from slipstream.common.rpc.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Mapping

HTTP = "http://"
"""Begins the address of a service that is asked for its health as SMG answers."""
_EXEC_WITH_PARENT = Path(__file__).with_name("exec_with_parent.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """One service to start."""

    name: str
    """Its name in messages and of its log: "draft", "verify", "scheduler", "gateway"."""
    argv: tuple[str, ...]
    """The command line, beginning with an absolute path."""
    address: str
    """Where its health is asked: `unix:PATH` or `HOST:PORT` by gRPC, `http://HOST:PORT` as SMG answers."""
    log_path: Path
    """Takes its standard output and error."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has beside this process's own, or in their place."""
    restarts: bool = False
    """Whether it is started again when it dies after it was ready."""
    is_optional: bool = False
    """Whether the others serve without it: no start waits for it, and it is started again whatever happens."""
    group: str = ""
    """Services of one group are started again together, because the death of one breaks the others; "": it is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """A service at one moment."""

    name: str
    pid: int
    """0 while it has no process."""
    state: str
    """ "loading", "ready", "stopping", "stopped" or "died"."""
    num_restarts: int
    """Times that it was started again."""
    last_end: str
    """How its process before ended; empty if there was none."""
    address: str
    """Where its health is asked, see `ServiceCommand`."""


def bound(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command that dies with this process, if it is started on the main thread: see `exec_with_parent.py`."""
    return (sys.executable, "-I", "-S", str(_EXEC_WITH_PARENT), str(os.getpid()), *argv)


def start_bound(argv: tuple[str, ...], output: BinaryIO, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a command without input that dies with this process, on the main thread."""
    return subprocess.Popen(
        bound(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **environment},
        # Out of the terminal's process group: this process decides who ends on Ctrl-C, and in which order.
        start_new_session=True,
    )


class ServiceProcess:
    """A started service."""

    def __init__(self, command: ServiceCommand) -> None:
        """Starts the service with an empty log; the log of the run before is kept beside it as `.1`.

        Must be called on the main thread, on whose event loop the process is then waited for.
        """
        self.command = command
        if command.log_path.exists():
            command.log_path.replace(command.log_path.with_name(command.log_path.name + ".1"))
        with os.fdopen(open_new(command.log_path), "wb") as log:
            self._process = start_bound(command.argv, log, command.environment)
        self.ready = asyncio.Event()
        """Set when its health was SERVING."""
        self.ended = asyncio.Event()
        """Set when it is over, and reaped."""
        self.fault = ""
        """Why this process has killed it, if it has: "did not answer for 10 s"."""
        # A thread of its own, for asyncio's child watcher (before Python 3.12) and a signal may race for the status.
        threading.Thread(target=self._reap, args=(asyncio.get_running_loop(),), daemon=True).start()

    @property
    def name(self) -> str:
        """The service's name."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs. The first SIGTERM lets it finish what it has begun, the second ends it."""
        if not self.ended.is_set():
            self._process.send_signal(number)

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs, and if a signal ended it."""
        status = self._process.returncode
        return None if status is None or status < 0 else status

    def describe_end(self) -> str:
        """Says how it ended: "was killed by SIGKILL", "ended with exit status 1"."""
        status = self._process.returncode
        if self.fault:
            return f"{self.fault} and was killed"
        if status is None:
            return "is running"
        if status < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"was killed by {names.get(-status, f'signal {-status}')}"
        return f"ended with exit status {status}"

    def last_log_lines(self, count: int = 20, *, if_none: str = "  (it logged nothing)") -> str:
        """The end of its log, indented; says so when there is none, by `if_none`."""
        try:
            with self.command.log_path.open(encoding="utf-8", errors="replace") as log:
                lines = deque(log, maxlen=count)
        except OSError as error:
            return f"  (its log cannot be read: {error})"
        return "".join(f"  {line.rstrip()}\n" for line in lines).rstrip("\n") or if_none

    def remove_socket(self) -> None:
        """Removes the socket that a killed service left; one at which another process serves stays."""
        address = self.command.address
        if not address.startswith("unix:") or not Path(address.removeprefix("unix:")).exists():
            return
        with contextlib.suppress(AddressInUseError), Listener.claim(address):
            pass  # leaving a claim removes the socket

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        loop.call_soon_threadsafe(self.ended.set)
