"""Results as a JSON list in a file, which other runs add to."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from _typeshed import DataclassInstance

T = TypeVar("T")


def write_rows(rows: Sequence[DataclassInstance], path: Path) -> None:
    """In one piece: whoever ends this run finds what was there before."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read_rows(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """What was written there, each made by `make`; nothing where there is no file.

    Raises ValueError for a file of something else.
    """
    if not path.exists():
        return []
    try:
        return [make(row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold results of this benchmark: {error}") from error
