"""Runs `slipstream` commands as a user does: those that end by themselves in this process, others in their own."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import psutil

from slipstream.cli.main import main

_NUMBERS = itertools.count(os.getpid())
COMMAND = (sys.executable, "-m", "slipstream.cli.main")


def slipstream(*arguments: str, stdin: str = "", timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end: in this process, unless an event loop or another thread calls.

    `timeout_s` bounds a command in its own process, and the test's timeout one in this process.
    """
    if threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is None:
        return _called(arguments, stdin)
    return subprocess.run(
        (*COMMAND, *arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _called(arguments: tuple[str, ...], stdin: str) -> subprocess.CompletedProcess[str]:
    """Calls the command's `main`; restores all that it sets for its process."""
    outputs = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    root, client = logging.getLogger(), logging.getLogger("slipstream.client")
    handlers, level = root.handlers, client.level
    try:
        root.handlers = []
        with (
            patch.dict(os.environ),
            patch.object(sys, "argv", ["slipstream", *arguments]),
            patch.object(sys, "stdin", io.StringIO(stdin)),
            redirect_stdout(outputs[0]),
            redirect_stderr(outputs[1]),
        ):
            main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        root.handlers = handlers
        client.setLevel(level)
    shown = [output.buffer.getvalue().decode() for output in outputs]
    return subprocess.CompletedProcess(arguments, status, *shown)


def free_ports(count: int) -> int:
    """The first of so many ports on loopback, 16 at most, that follow each other and are free.

    They are below those that a system gives to connections and to listeners without a number, and apart from those of
    neighbouring test processes: nothing takes one before a command listens there.
    """
    lowest = 30_200 + 800 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 3)
    while True:
        first = lowest + 16 * (next(_NUMBERS) % 50)
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


class Running:
    """A command that runs."""

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """Starts it; its output goes to files, so that it never waits for us to read.

        `environment`: of the process, this one's if it is not given. `prefix`: the command that runs it.
        """
        self._files = (TemporaryFile(), TemporaryFile())  # noqa: SIM115 — closed by `end`
        # Tests that a shell runs in the background ignore Ctrl-C, and so would what they start.
        command = ("env", "--default-signal=INT", *prefix, *COMMAND, *arguments)
        self._process = subprocess.Popen(command, stdout=self._files[0], stderr=self._files[1], env=environment)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Waits for its end, which the test's timeout bounds, and gives its exit status."""
        return self._process.wait()

    def output(self) -> str:
        """Returns its standard output until now."""
        return self._read(0)

    def errors(self) -> str:
        """Returns its standard error until now."""
        return self._read(1)

    def children(self) -> list[psutil.Process]:
        """The processes that it started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        """Ends it if it runs, and forgets its output."""
        if not self.has_ended:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                # A test's timeout in `poll` leaves its lock taken, and then the end is not seen.
                self._process.wait(20)
        for file in self._files:
            file.close()

    def _read(self, index: int) -> str:
        descriptor = self._files[index].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[Running]:
    """Starts a command; it is ended with the context, if it has not by then. `options`: see `Running`."""
    with closing(Running(*arguments, **options)) as command:
        yield command


def until(is_so: Callable[[], bool], command: Running) -> None:
    """Returns when it is so; the command must live that long, and the test's timeout bounds it."""
    while not is_so():
        assert not command.has_ended, command.errors()
        time.sleep(0.02)


def status(state_dir: Path) -> dict[str, Any]:
    """Returns the parsed output of `slipstream status --json`."""
    found: dict[str, Any] = json.loads(slipstream("status", "--state-dir", str(state_dir), "--json").stdout)
    return found


@contextmanager
def running_up(state_dir: Path, *options: str, **process: Any) -> Iterator[Running]:
    """`slipstream up` in a state directory, on a free port, ready. `process`: see `Running`."""
    arguments = ("up", "--state-dir", str(state_dir), "--listen", "127.0.0.1:0", *options)
    with running(*arguments, **process) as up:
        until((state_dir / "server").exists, up)
        yield up


def leftovers(state_dir: Path) -> list[Path]:
    """Lists the files that may be there only while a service runs: sockets and `server`."""
    return [path for path in state_dir.rglob("*") if path.is_socket() or path.name == "server"]
