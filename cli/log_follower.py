"""Copies what services log to a terminal while they run."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

_INTERVAL_S = 0.2


class LogFollower:
    """Copies files to an output as they grow, by whole lines.

    The services write to files and not to a pipe of ours, so that no service ever waits for us to read.
    """

    def __init__(self, output: BinaryIO) -> None:
        """Writes to `output` alone."""
        self._output = output
        self._files = ExitStack()
        self._logs: dict[BinaryIO, bytes] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Follows nothing until `start`."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Copies what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._copy()
        self._output.write(b"".join(rest + b"\n" for rest in self._logs.values() if rest))
        self._output.flush()
        self._files.close()

    def start(self, paths: Iterable[Path]) -> None:
        """Follows these files, which are there, from their beginnings."""
        self._logs = {self._files.enter_context(path.open("rb")): b"" for path in paths}
        self._task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        while True:
            self._copy()
            await asyncio.sleep(_INTERVAL_S)

    def _copy(self) -> None:
        for log, rest in self._logs.items():
            lines, newline, self._logs[log] = (rest + log.read()).rpartition(b"\n")
            self._output.write(lines + newline)
        self._output.flush()
