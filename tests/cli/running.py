"""Runs `slipstream` commands as a user does, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = (sys.executable, "-m", "slipstream.cli.main")


def slipstream(*arguments: str, stdin: str = "", timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        (*COMMAND, *arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@dataclass(frozen=True)
class Running:
    """A command that runs."""

    process: subprocess.Popen[str]

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def end(self, timeout_s: float = 30) -> tuple[int, str, str]:
        """Waits for its end: status, output and errors."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def children(self) -> list[psutil.Process]:
        """The processes that it started."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running(*arguments: str) -> Iterator[Running]:
    """Starts a command; it is ended with the context, if it has not by then."""
    process = subprocess.Popen((*COMMAND, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield Running(process)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()


def status(state_dir: Path) -> dict[str, Any]:
    """What `slipstream status --json` says."""
    found: dict[str, Any] = json.loads(slipstream("status", "--state-dir", str(state_dir), "--json").stdout)
    return found


@contextmanager
def running_up(state_dir: Path, *options: str) -> Iterator[Running]:
    """`slipstream up` in a state directory, on a free port, ready."""
    with running("up", "--state-dir", str(state_dir), "--listen", "127.0.0.1:0", *options) as up:
        while not (state_dir / "server").exists():
            assert up.process.poll() is None, up.end()
            time.sleep(0.05)
        yield up


def leftovers(state_dir: Path) -> list[Path]:
    """What only a running service may have there."""
    return [path for path in state_dir.rglob("*") if path.is_socket() or path.name == "server"]
