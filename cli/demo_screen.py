"""What the demo shows while tokens come: live boxes on a terminal, marked lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from rich.console import Console

    from slipstream.bundled import Prompt

PROMPT_STYLE = "dim"
ACCEPTED_STYLE = "bold green"
OWN_STYLE = "yellow"
OPENING, CLOSING = "«", "»"

_ROWS_KEPT_FREE = 3


class Screen(Protocol):
    """Takes the pieces of several outputs as they come."""

    def __enter__(self) -> Self:
        """Begins to show them."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shows what is left."""

    def add(self, index: int, pieces: Iterable[tuple[str, bool]]) -> None:
        """Text of the prompt with this index, each piece with whether it was drafted and accepted."""


class LiveScreen:
    """A box for each prompt, redrawn as tokens come; each shows the end of its text."""

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        """Draws to a terminal."""
        self._console = console
        self._titles = [f"{prompt.source}:{prompt.line}" for prompt in prompts]
        self._texts = [Text().append(prompt.text, PROMPT_STYLE) for prompt in prompts]
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=12)

    def __enter__(self) -> Self:
        """See `Screen`."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See `Screen`."""
        self._live.stop()

    def add(self, index: int, pieces: Iterable[tuple[str, bool]]) -> None:
        """See `Screen`."""
        for text, is_accepted in pieces:
            self._texts[index].append(text, ACCEPTED_STYLE if is_accepted else OWN_STYLE)

    def _render(self) -> Table:
        num_columns = 2 if self._console.width >= 100 and len(self._texts) > 1 else 1
        num_rows = -(-len(self._texts) // num_columns)
        height = max(3, (self._console.height - _ROWS_KEPT_FREE) // num_rows)
        width = self._console.width // num_columns
        boxes = [self._box(index, width, height) for index in range(len(self._texts))]
        table = Table.grid(expand=True)
        for _ in range(num_columns):
            table.add_column(width=width)
        for first in range(0, len(boxes), num_columns):
            table.add_row(*boxes[first : first + num_columns])
        return table

    def _box(self, index: int, width: int, height: int) -> Panel:
        lines = self._texts[index].wrap(self._console, width - 4, tab_size=4)
        shown = Text("\n").join(lines[-(height - 2) :])
        return Panel(shown, title=self._titles[index], title_align="left", height=height, border_style="dim")


class LineScreen:
    """Each line of an output when it is finished, behind its prompt's number, with accepted drafts in marks."""

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        """Prints to anything; each output goes on where its prompt ends."""
        self._console = console
        self._sources = [f"{prompt.source}:{prompt.line}" for prompt in prompts]
        self._lines = {index: prompt.text.rpartition("\n")[2] for index, prompt in enumerate(prompts)}
        self._marked: set[int] = set()

    def __enter__(self) -> Self:
        """See `Screen`."""
        for index, source in enumerate(self._sources):
            self._print(index, f"continues {source}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See `Screen`."""
        for index in sorted(self._lines):
            self._end_line(index)

    def add(self, index: int, pieces: Iterable[tuple[str, bool]]) -> None:
        """See `Screen`."""
        for text, is_accepted in pieces:
            first, *others = text.split("\n")
            self._append(index, first, is_accepted)
            for line in others:
                self._end_line(index)
                self._append(index, line, is_accepted)

    def _append(self, index: int, text: str, is_accepted: bool) -> None:
        if text:
            self._mark(index, is_accepted)
            self._lines[index] = self._lines.get(index, "") + text

    def _mark(self, index: int, is_accepted: bool) -> None:
        if is_accepted and index not in self._marked:
            self._marked.add(index)
            self._lines[index] = self._lines.get(index, "") + OPENING
        elif not is_accepted and index in self._marked:
            self._marked.remove(index)
            self._lines[index] += CLOSING

    def _end_line(self, index: int) -> None:
        self._mark(index, is_accepted=False)
        line = self._lines.pop(index, "")
        if line.strip():
            self._print(index, line)

    def _print(self, index: int, line: str) -> None:
        self._console.print(f"[{index + 1}] {line}", highlight=False, markup=False, soft_wrap=True)


def legend(console: Console) -> Text:
    """How to read what such a console shows."""
    if console.is_terminal:
        parts = [
            ("the prompt", PROMPT_STYLE),
            ("drafted and accepted", ACCEPTED_STYLE),
            ("the target's own", OWN_STYLE),
        ]
        return Text("  ").join(Text(text, style=style) for text, style in parts)
    return Text(f"[number of the prompt] {OPENING}drafted and accepted{CLOSING}, the target's own")
