"""Shows how services come up: live on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slipstream.cli.up.supervisor import ServiceState

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

_STYLES = {
    ServiceState.LOADING: "yellow",
    ServiceState.READY: "green",
    ServiceState.STOPPING: "yellow",
    ServiceState.STOPPED: "dim",
    ServiceState.DIED: "bold red",
}
_FINISHED = (ServiceState.READY, ServiceState.STOPPED, ServiceState.DIED)


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
