"""The output of `slipstream up`: states and logs of the services, on a console that may lose its reader."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import sys
import time
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Self, TextIO, cast

from rich.console import Console

from slipstream.cli.service import ServiceState
from slipstream.common.rpc.shutdown import raise_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_STYLES = {
    ServiceState.LOADING: "yellow",
    ServiceState.READY: "green",
    ServiceState.STOPPING: "yellow",
    ServiceState.STOPPED: "dim",
    ServiceState.DIED: "bold red",
}
_FINISHED = (ServiceState.READY, ServiceState.STOPPED, ServiceState.DIED)
_LOG_INTERVAL_S = 0.2
_LOADING = re.compile(r"loading: (\d+) % of the weights, ([\d.]+ GB/s)")
_BAR_COLUMNS = 30
_NO_READER = (errno.EIO, errno.EPIPE)
"""Errors of a terminal that is gone, and of a pipe without a reader."""


class StateLines:
    """Prints a line for each change of a service's state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, tuple[ServiceState, float]] = {}
        """State, and the time of its begin, by service."""
        self._failing: set[str] = set()
        """Services that died while loading: no further start is shown until it is ready, or is stopped."""

    def on_change(self, name: str, state: ServiceState) -> None:
        """Called by the supervisor when a service's state has changed."""
        now, (before, since) = time.monotonic(), self._states.get(name, (None, 0.0))
        is_failing = name in self._failing and state in (ServiceState.LOADING, ServiceState.DIED)
        if not is_failing:
            self._failing.discard(name)
        if state is ServiceState.DIED and before is ServiceState.LOADING:
            self._failing.add(name)
        self._states[name] = (state, now)
        if not is_failing:
            took = f" after {now - since:.1f} s" if before is not None and state in _FINISHED else ""
            self._console.print(f"{name}: [{_STYLES[state]}]{state.value}[/]{took}", highlight=False)

    def say_progress(self, last_log_line: Callable[[str], str]) -> None:
        """Prints a line for each service that is loading, with the last line of its log if that has any."""
        for name, (state, since) in self._states.items():
            if state is ServiceState.LOADING and name not in self._failing:
                took, line = time.monotonic() - since, _with_bar(last_log_line(name))
                last = f": {line}" if line else ""
                self._console.print(f"{name}: still loading after {took:.0f} s{last}", highlight=False, markup=False)


def _with_bar(line: str) -> str:
    """Shows how much of the weights is there as a bar, where a log line says it."""
    found = _LOADING.search(line)
    if found is None:
        return line
    done = _BAR_COLUMNS * int(found[1]) // 100
    return f"[{'#' * done}{'.' * (_BAR_COLUMNS - done)}] {found[1]} % of the weights, {found[2]}"


class LogFollower:
    """Copies log files to an output as they grow, by whole lines.

    The services write to files and not to a pipe, so that none ever waits for this process to read.
    """

    def __init__(self, output: BinaryIO) -> None:
        """Copies nothing until `start`. Loses what cannot be written to `output`."""
        self._output = NonfailingOutput(output)
        self._logs: dict[Path, tuple[BinaryIO, bytes]] = {}
        """Open file, and the incomplete last line that was read, by path."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._follow())
        self._task.add_done_callback(raise_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Copies the rest."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._copy()
        for file, rest in self._logs.values():
            self._output.write(rest + b"\n" if rest else b"")
            file.close()
        self._output.flush()

    def start(self, paths: Iterable[Path]) -> None:
        """Follows these existing files, too, from their beginnings, and each file that replaces one."""
        self._logs |= {path: (path.open("rb"), b"") for path in paths}

    async def _follow(self) -> None:
        while True:
            self._copy()
            await asyncio.sleep(_LOG_INTERVAL_S)

    def _copy(self) -> None:
        for path, (file, rest) in self._logs.items():
            # Asked before the rest is read: a file that was replaced gets no more.
            is_replaced = _is_replaced(path, file)
            lines, newline, rest = (rest + file.read()).rpartition(b"\n")
            self._output.write(lines + newline)
            if is_replaced:
                self._output.write(rest + b"\n" if rest else b"")
                file.close()
                file, rest = path.open("rb"), b""
            self._logs[path] = file, rest
        self._output.flush()


def _is_replaced(path: Path, file: BinaryIO) -> bool:
    return path.exists() and not os.path.samestat(path.stat(), os.fstat(file.fileno()))


def nonfailing_console() -> Console:
    """Writes to standard error, and raises nothing when that fails."""
    return Console(file=cast("TextIO", NonfailingOutput(sys.stderr)))


class NonfailingOutput:
    """A file that drops what it cannot write, and becomes /dev/null once it has no reader."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        """Writes if possible; returns as if all was written."""
        with self._losing():
            self._file.write(content)
        return len(content)

    def flush(self) -> None:
        with self._losing():
            self._file.flush()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NO_READER:
                # The descriptor, not this object: buffers below still hold the text, and flushing them would fail
                # again, at the interpreter's end too, which then changes the exit status.
                with open(os.devnull, "wb") as null:
                    os.dup2(null.fileno(), self._file.fileno())
