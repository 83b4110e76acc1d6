"""Another process on the same GPU."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from slipstream.common.worker.wire import manifest_to_pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.interface import Arena
    from slipstream.common.device.manifest import Manifest

Pair: TypeAlias = "tuple[OtherProcess, OtherProcess]"

GONE_TIMEOUT_S = 20.0

_SCRIPT = Path(__file__).with_name("gpu_user.py")


class OtherProcess:
    """Runs `gpu_user.py`."""

    def __init__(self, process: subprocess.Popen[str], arena: Arena | None) -> None:
        self._process = process
        self._arena = arena
        self._is_ready = False

    @classmethod
    @contextmanager
    def running(cls, arena: Arena | None = None) -> Iterator[OtherProcess]:
        """Starts it, and has it gone at the end.

        It is waited for, and opens the arena, when it is first told something: so that several start side by side.
        """
        command = [sys.executable, str(_SCRIPT)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process, arena)
            finally:
                process.kill()

    def open(self, manifest: Manifest) -> str:
        """Gives it a manifest, over the wire's encoding."""
        return self.tell(f"open {manifest_to_pb(manifest).SerializeToString().hex()}")

    def tell(self, line: str) -> str:
        """Gives it something to do; returns its answer."""
        if not self._is_ready:
            self._is_ready = True
            assert self._answer() == "ready"
            if self._arena is not None:
                assert self.open(self._arena.manifest) == "opened"
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def do(self, *lines: str) -> None:
        """Gives it work that only is enqueued."""
        for line in lines:
            assert self.tell(line) == "ok", line

    def read(self, name: str) -> list[float]:
        """What it sees in a buffer."""
        return [float(number) for number in self.tell(f"read {name}").split()]

    def kill(self) -> None:
        """SIGKILL; returns when it is gone, and raises if it stays."""
        self._process.kill()
        self._process.wait(GONE_TIMEOUT_S)

    def _answer(self) -> str:
        assert self._process.stdout is not None, "a pipe was asked for"
        return self._process.stdout.readline().strip()


def attached(pair: Pair, arena: Arena) -> Pair:
    """Two processes with an arena open."""
    for process in pair:
        assert process.open(arena.manifest) == "opened"
    return pair
