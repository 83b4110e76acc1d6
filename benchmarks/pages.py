"""Markdown of the pages of figures, and the results that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LINE = 120
WRITTEN = "Written by `python benchmarks/figures.py --write` from the files that each section names."


def load(name: str) -> Any:
    """Reads a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def is_measured(name: str) -> bool:
    """True if there is such a result file."""
    return (RESULTS / f"{name}.json").exists()


def section(title: str, script: str, result: str, where: str, words: str, *more: str) -> list[str]:
    """The paragraphs of a section: a heading, links to script and results with the machine, words, and the rest."""
    links = f"[`{script}.py`](../benchmarks/{script}.py), [JSON](../benchmarks/results/{result}.json)"
    return [f"## {title}", text(f"{links}{where and '; '}{where}."), text(words), *more]


def text(paragraph: str) -> str:
    """The paragraph in lines."""
    return fill(paragraph, LINE, break_long_words=False, break_on_hyphens=False)


def markdown_table(header: str, rows: Iterable[str]) -> str:
    """A table; cells are separated by " | "."""
    lines = [f"| {row} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header.split(" | ")), *lines[1:]])
