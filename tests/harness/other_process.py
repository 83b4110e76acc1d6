"""Another process on the same memory: it runs one of the programs beside this file, told line by line.

`FenceUser` runs `fence_user.py` on a counter of the CPU, `ArenaReader` runs `arena_reader.py` on an arena of the CPU,
`GpuUser` runs `gpu_user.py` on an arena of a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeAlias

from slipstream.common.device.interface import Arena
from slipstream.common.wire.manifest import Manifest

Pair: TypeAlias = "tuple[GpuUser, GpuUser]"

GONE_TIMEOUT_S = 20.0


class OtherProcess:
    """A program that answers each line of its standard input with one line, after a first line "ready"."""

    PROGRAM: str
    """The program's file, beside this one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._is_ready = False

    @classmethod
    @contextmanager
    def running(cls, *arguments: str) -> Iterator[Self]:
        """Starts it, and kills it when the context ends. It is waited for with the first line, so several start
        side by side."""
        command = [sys.executable, str(Path(__file__).with_name(cls.PROGRAM)), *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def tell(self, line: str) -> None:
        """Sends a line and does not wait for the answer."""
        if not self._is_ready:
            self._is_ready = True
            assert self.answer() == "ready"
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Waits for an answer."""
        assert self._process.stdout is not None, "a pipe was asked for"
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        """Sends a line and returns the answer."""
        self.tell(line)
        return self.answer()

    def ended(self) -> int:
        """Waits until it has ended by itself; returns its exit status, which is negative for a signal."""
        return self._process.wait(GONE_TIMEOUT_S)

    def kill(self) -> None:
        """Kills it with SIGKILL; returns when it is gone, and raises if it stays."""
        self._process.kill()
        self._process.wait(GONE_TIMEOUT_S)


class FenceUser(OtherProcess):
    """Stores to a counter in a file, and waits for it."""

    PROGRAM = "fence_user.py"

    @classmethod
    @contextmanager
    def at(cls, path: str, offset: int) -> Iterator[Self]:
        """Runs on the counter at an offset of a file, and is ready."""
        with cls.running(path, str(offset)) as other:
            other._is_ready = True
            assert other.answer() == "ready"
            yield other


class ArenaReader(OtherProcess):
    """Maps an arena of the CPU for reading."""

    PROGRAM = "arena_reader.py"

    @classmethod
    @contextmanager
    def of(cls, manifest: Manifest) -> Iterator[Self]:
        """Runs with the arena of a manifest."""
        with cls.running(manifest.to_pb().SerializeToString().hex()) as other:
            yield other


class GpuUser(OtherProcess):
    """Uses an arena of the same GPU."""

    PROGRAM = "gpu_user.py"

    @classmethod
    @contextmanager
    def on(cls, arena: Arena) -> Iterator[Self]:
        """Runs with an arena open."""
        with cls.running() as other:
            assert other.open(arena.manifest) == "opened"
            yield other

    def open(self, manifest: Manifest) -> str:
        """Gives it a manifest, over the wire's encoding."""
        return self.ask(f"open {manifest.to_pb().SerializeToString().hex()}")

    def do(self, *lines: str) -> None:
        """Gives it work that is only enqueued."""
        for line in lines:
            assert self.ask(line) == "ok", line

    def read(self, name: str) -> list[float]:
        """Returns the elements of a buffer as it sees them."""
        return [float(number) for number in self.ask(f"read {name}").split()]


def attached(pair: Pair, arena: Arena) -> Pair:
    """Opens an arena in both processes."""
    for process in pair:
        assert process.open(arena.manifest) == "opened"
    return pair
