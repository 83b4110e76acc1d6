"""The corpus: what is left out, and on which side a file stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.bundled import prompts
from slipstream.training.corpus import SourceFile, collect, is_skipped, summary


def test_collected_files(tmp_path: Path) -> None:
    files = {
        "b.py": "x = 1\n",
        "a.py": "é = 2\n",
        "twin.py": "x = 1\n",
        "empty.py": " \n",
        "notes.txt": "x = 3\n",
        "site-packages/other.py": "x = 4\n",
        "encodings/table.py": "x = 5\n",
        "_sysconfigdata_x.py": "x = 6\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    collected = list(collect(tmp_path))
    assert [(file.name, file.text) for file in collected] == [("a.py", "é = 2\n"), ("b.py", "x = 1\n")]
    assert collected[0].num_bytes == 7
    assert summary(collected)["sha256"] == summary(list(collect(tmp_path)))["sha256"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("abc.py", False),
        ("lib2to3/tests/test_all.py", False),
        ("lib2to3/tests/data/x.py", True),
        ("config-3.11/x.py", True),
        ("html/entities.py", True),
        ("html/parser.py", False),
    ],
)
def test_skipped_names(name: str, expected: bool) -> None:
    assert is_skipped(name) == expected


def test_prompts_come_from_files_that_training_never_saw() -> None:
    assert {SourceFile(name=prompt.source, text="").split for prompt in prompts()} == {"heldout"}
    names = [f"{number}.py" for number in range(4000)]
    held_out = [name for name in names if SourceFile(name=name, text="").split == "heldout"]
    assert 150 < len(held_out) < 250, "about every twentieth"
