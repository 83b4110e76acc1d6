"""What `slipstream up` shows: how services come up, what they log, on a console that outlives its reader."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slipstream.cli.up.supervisor import ServiceState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

_STYLES = {
    ServiceState.LOADING: "yellow",
    ServiceState.READY: "green",
    ServiceState.STOPPING: "yellow",
    ServiceState.STOPPED: "dim",
    ServiceState.DIED: "bold red",
}
_FINISHED = (ServiceState.READY, ServiceState.STOPPED, ServiceState.DIED)
_LOG_INTERVAL_S = 0.2
_NO_READER = (errno.EIO, errno.EPIPE)
"""Errors of a terminal that is gone, and of a pipe without a reader."""


@dataclass(frozen=True, slots=True)
class _Row:
    state: ServiceState
    since: float
    took: float | None
    """Seconds that the state before took, if this one ends something."""


class LoadingDisplay:
    """What each service is doing. `on_change` is for the supervisor."""

    def __init__(self, console: Console, *, is_live: bool) -> None:
        """Writes to `console`; `is_live` lets it redraw lines there."""
        self._console = console
        self._is_live = is_live
        self._rows: dict[str, _Row] = {}
        self._spinner = Spinner("dots", style="yellow")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Shows the display while the context is open; `on_change` prints a line at other times."""
        if self._is_live:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_change(self, name: str, state: ServiceState) -> None:
        """A service's state has changed."""
        now = time.monotonic()
        before = self._rows.get(name)
        took = now - before.since if before is not None and state in _FINISHED else None
        self._rows[name] = _Row(state, now, took)
        if self._live is None:
            self._console.print(f"{name}: {state.value}{_after(took)}", highlight=False)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, row in self._rows.items():
            style = _STYLES[row.state]
            mark = Text("●", style=style) if row.state in _FINISHED else self._spinner
            waited = _after(time.monotonic() - row.since if row.took is None else row.took)
            table.add_row(mark, name, Text(row.state.value, style=style), Text(waited.strip(), style="dim"))
        return table


def _after(seconds: float | None) -> str:
    return "" if seconds is None else f" after {seconds:.1f} s"


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
            await asyncio.sleep(_LOG_INTERVAL_S)

    def _copy(self) -> None:
        for log, rest in self._logs.items():
            lines, newline, self._logs[log] = (rest + log.read()).rpartition(b"\n")
            self._output.write(lines + newline)
        self._output.flush()


def nonfailing_console() -> Console:
    """Writes to standard error, and raises nothing when that fails."""
    return Console(file=cast("TextIO", NonfailingOutput(sys.stderr)))


class NonfailingOutput:
    """A text file that loses what it cannot write, and becomes /dev/null once nobody reads it."""

    def __init__(self, file: TextIO) -> None:
        """Writes to `file`; all else that is asked of this one, `file` answers."""
        self._file = file

    def __getattr__(self, name: str) -> Any:
        """What `file` has under this name."""
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Says that all was written, whether it was or not."""
        with self._losing():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or loses it."""
        with self._losing():
            self._file.flush()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NO_READER:
                self._redirect()

    def _redirect(self) -> None:
        # The descriptor, not this object: buffers below still hold the text, and whoever flushes them would fail again,
        # the interpreter at its end too, which then changes the exit status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._file.fileno())
        os.close(null)
