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
from slipstream.common.rpc.address import COMMANDS_ENDING, path_beside
from slipstream.common.rpc.listener import Listener
from slipstream.common.settings import VARIABLE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

HTTP = "http://"
"""Begins the address of a door, which is asked for its health by HTTP."""
_EXEC_WITH_PARENT = Path(__file__).with_name("exec_with_parent.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """One service to start."""

    name: str
    """Its name in messages and of its log: "draft", "verify", "scheduler", "gateway"."""
    argv: tuple[str, ...]
    """The command line, beginning with an absolute path."""
    address: str
    """Where its health is asked: `unix:PATH` or `HOST:PORT` by gRPC, `http://unix:PATH` by HTTP."""
    log_path: Path
    """File for its standard output and error."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's own; an equal name replaces."""
    restarts: bool = False
    """Whether it is started again when it dies after it was ready."""
    is_optional: bool = False
    """Whether the other services serve without it: no start waits for it, and it is always started again."""
    group: str = ""
    """Group of services that are started again together, because a death in it breaks the others; "": no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """A service at one moment."""

    name: str
    pid: int
    """Process id; 0 while it has no process."""
    state: str
    """ "loading", "ready", "stopping", "stopped" or "died"."""
    num_restarts: int
    """Number of times that it was started again."""
    last_end: str
    """End of its previous process; empty if there was none."""
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
        # Their settings are in the command line: a variable is this process's own.
        env={name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
        | dict(environment),
        # Out of the terminal's process group: this process decides who ends on Ctrl-C, and in which order.
        start_new_session=True,
    )


class ServiceProcess:
    """A started service."""

    def __init__(self, command: ServiceCommand) -> None:
        """Starts the service with an empty log; the previous log is kept beside it as `.1`.

        Must be called on the main thread, on whose event loop the process is then waited for.
        """
        self.command = command
        if command.log_path.exists():
            command.log_path.replace(command.log_path.with_name(command.log_path.name + ".1"))
        with os.fdopen(open_new(command.log_path), "wb") as log:
            self._process = start_bound(command.argv, log, command.environment)
        self.ready = asyncio.Event()
        """Set once its health was SERVING."""
        self.ended = asyncio.Event()
        """Set once it has ended, and is reaped."""
        self.fault = ""
        """Reason for which this process has killed it, such as "did not answer for 10 s"; empty if it has not."""
        # A thread of its own, for asyncio's child watcher (before Python 3.12) and a signal may race for the status.
        threading.Thread(target=self._reap, args=(asyncio.get_running_loop(),), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs. The first SIGTERM lets it finish what it has begun, the second ends it."""
        if not self.ended.is_set():
            self._process.send_signal(number)

    @property
    def exit_status(self) -> int | None:
        """Exit status. None: it runs, or a signal ended it."""
        status = self._process.returncode
        return None if status is None or status < 0 else status

    def describe_end(self) -> str:
        """Returns how it ended: "was killed by SIGKILL", "ended with exit status 1"."""
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
        """Returns the last lines of its log, indented; `if_none` where there are none."""
        try:
            with self.command.log_path.open(encoding="utf-8", errors="replace") as log:
                lines = deque(log, maxlen=count)
        except OSError as error:
            return f"  (its log cannot be read: {error})"
        return "".join(f"  {line.rstrip()}\n" for line in lines).rstrip("\n") or if_none

    def end_of_log(self) -> str:
        """The last lines of its log, introduced, for a message."""
        return f"the end of its log ({self.command.log_path}):\n{self.last_log_lines()}"

    def remove_socket(self) -> None:
        """Removes the socket that a killed service left, and a worker's for commands beside it.

        Those of another process that serves there stay.
        """
        address = self.command.address.removeprefix(HTTP)
        paths = [path for ending in ("", COMMANDS_ENDING) if (path := path_beside(address, ending)) is not None]
        if any(path.exists() for path in paths):
            with contextlib.suppress(AddressInUseError), Listener.claim(address):
                for path in paths:
                    path.unlink(missing_ok=True)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        loop.call_soon_threadsafe(self.ended.set)
