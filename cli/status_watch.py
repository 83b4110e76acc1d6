"""`slipstream status --watch`: looks at a server at a steady pace and shows each look, until it is stopped."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from slipstream.cli.cancellation import StopSignals
from slipstream.cli.status_watch_look import Watcher, read_server
from slipstream.cli.status_watch_screen import frame
from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from slipstream.cli.status_watch_look import Look

    Show = Callable[[Look], None]

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
_BLOCK_WIDTH = 160


async def run_watch(locate: Callable[[], str], *, interval_s: float | None, as_json: bool) -> int:
    """Shows a look now and after each interval. Returns 0 when a signal ends it.

    `locate` gives the server's address, or raises UnavailableError while there is none. Raises ConfigError naming
    `interval`.
    """
    interval_s = DEFAULT_INTERVAL_S if interval_s is None else interval_s
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigError("interval", interval_s, f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")
    stop = StopSignals()
    with _output(as_json=as_json) as show:
        await stop.cancel(_watch(Watcher(locate, read_server), interval_s, show))
    return 0


async def _watch(watcher: Watcher, interval_s: float, show: Show) -> None:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        show(await watcher.look())
        due_s = max(due_s + interval_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


def _output(*, as_json: bool) -> AbstractContextManager[Show]:
    if as_json:
        return json_lines()
    is_live = sys.stdout.isatty() and not Console().is_dumb_terminal
    return live(Console()) if is_live else blocks(Console(width=_BLOCK_WIDTH, color_system=None))


@contextmanager
def live(console: Console) -> Iterator[Show]:
    """Fills the terminal with the newest look, and leaves the last one behind."""
    last: list[Look] = []

    def show(look: Look) -> None:
        last[:] = [look]
        screen.update(frame(look), refresh=True)

    with Live(Text("asking ..."), console=console, screen=True, auto_refresh=False) as screen:
        yield show
    for look in last:
        console.print(frame(look))


@contextmanager
def blocks(console: Console) -> Iterator[Show]:
    """Prints a block of lines for each look, with an empty line behind it."""

    def show(look: Look) -> None:
        with console.capture() as captured:
            console.print(frame(look))
        lines = [line.rstrip() for line in captured.get().splitlines()]
        print(*lines, "", sep="\n", file=console.file, flush=True)

    yield show


@contextmanager
def json_lines() -> Iterator[Show]:
    """Prints a JSON object on a line of its own for each look."""

    def show(look: Look) -> None:
        print(json.dumps(look.as_json(), allow_nan=False), flush=True)

    yield show
