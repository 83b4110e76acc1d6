"""Another process at the other end of a counter."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCRIPT = Path(__file__).with_name("fence_user.py")


class OtherProcess:
    """Runs `fence_user.py` on a counter."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def at(cls, path: str, offset: int) -> Iterator[OtherProcess]:
        """Starts it, and has it gone at the end."""
        with subprocess.Popen(
            [sys.executable, str(_SCRIPT), path, str(offset)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            other = cls(process)
            assert other.answer() == "ready"
            try:
                yield other
            finally:
                process.kill()

    def tell(self, line: str) -> None:
        """Gives it something to do."""
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Waits until it is done."""
        assert self._process.stdout is not None, "a pipe was asked for"
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait()
