"""Results in a file: read as they were written, in one piece, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks.result_files import read_rows, write_rows

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A result."""

    name: str
    value: float | None


def test_rows_that_are_written_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert read_rows(file, Row) == []
    write_rows([Row("one", 1.5)], file)
    write_rows([Row("one", 1.5), Row("two", None)], file)
    assert read_rows(file, Row) == [Row("one", 1.5), Row("two", None)]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", ["", "[1]", '[{"other": 1}]'])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=r"other\.json does not hold results"):
        read_rows(tmp_path / "other.json", Row)
