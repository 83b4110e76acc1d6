"""The demo's screen while tokens come: live boxes on a terminal, marked lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from slipstream.bundled import Prompt

ACCEPTED_STYLE, OWN_STYLE, PROMPT_STYLE = "bold green", "yellow", "dim"
_ROWS_KEPT_FREE = 3
_COLUMNS = 2


class DemoScreen:
    """The outputs of several prompts: the end of each in a box, or each line when it is finished, with marks."""

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        """Each output goes on where its prompt ends."""
        self._console = console
        self._titles = [f"{prompt.source}:{prompt.line}" for prompt in prompts]
        self._texts = [Text().append(prompt.text, PROMPT_STYLE) for prompt in prompts]
        self._lines = [prompt.text.rpartition("\n")[2] for prompt in prompts]
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=12)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        for index, title in enumerate(self._titles):
            self._print(index, f"continues {title}")
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for index, line in enumerate(self._lines):
            self._print(index, line)

    def add(self, index: int, pieces: Iterable[tuple[str, bool]]) -> None:
        """Takes text of the prompt with this index, each piece with whether it was drafted and accepted."""
        for text, is_accepted in pieces:
            self._texts[index].append(text, ACCEPTED_STYLE if is_accepted else OWN_STYLE)
            marked = "«" + text.replace("\n", "»\n«") + "»" if is_accepted else text
            *done, self._lines[index] = (self._lines[index] + marked).replace("»«", "").replace("«»", "").split("\n")
            for line in done:
                self._print(index, line)

    def _print(self, index: int, line: str) -> None:
        if line.strip() and not self._console.is_terminal:
            self._console.print(f"[{index + 1}] {line}", highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Table:
        num_rows = -(-len(self._texts) // _COLUMNS)
        height = max(3, (self._console.height - _ROWS_KEPT_FREE) // num_rows)
        width = self._console.width // _COLUMNS
        table = Table.grid(expand=True)
        boxes = [self._box(index, width, height) for index in range(len(self._texts))]
        for first in range(0, len(boxes), _COLUMNS):
            table.add_row(*boxes[first : first + _COLUMNS])
        return table

    def _box(self, index: int, width: int, height: int) -> Panel:
        lines = self._texts[index].wrap(self._console, width - 4, tab_size=4)
        shown = Text("\n").join(lines[-(height - 2) :])
        return Panel(shown, title=self._titles[index], title_align="left", width=width, height=height)


def legend(console: Console) -> Text:
    """Explains what such a console shows."""
    if not console.is_terminal:
        return Text("[number of the prompt] «drafted and accepted», the target's own")
    styles = {"the prompt": PROMPT_STYLE, "drafted and accepted": ACCEPTED_STYLE, "the target's own": OWN_STYLE}
    return Text("  ").join(Text(text, style) for text, style in styles.items())
