"""Who may import whom, checked over every import statement of the project."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "protos": set[str](),
    "common": {"protos"},
    "services": {"common", "protos"},
    "gateway": {"common", "protos", "scheduler"},
    "scheduler": {"common", "gateway", "protos"},
    "client": {"common", "protos"},
    "cli": {"bundled", "client", "common", "gateway", "protos", "scheduler", "services"},
    "benchmarks": {"bundled", "cli", "client", "common", "gateway", "protos", "scheduler", "services"},
    "bundled": set[str](),
    "deploy": {"common", "gateway", "scheduler", "services"},
    "training": {"bundled", "common", "services"},
    "examples": {"protos"},
    "scripts": {"bundled", "client"},
}
"""For each folder, the folders that it may import beside itself. Only `benchmarks` may import `cli`; none may import
`benchmarks`, `deploy` or `training`."""


class Import(NamedTuple):
    """One import of ours: where it stands, and the folder that it reaches into ("" for a relative import)."""

    place: str
    source: str
    target: str


def _imports(text: str, folder: str, name: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(text, name)):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Import(place, folder, "")
            continue
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            first, _, rest = module.partition(".")
            if first == "slipstream":
                yield Import(place, folder, rest.partition(".")[0])
            elif first in MAY_IMPORT:
                yield Import(place, folder, "")


def _offences(imports: Iterator[Import]) -> list[str]:
    return [
        f"{place}: {source} imports {target or 'by another name than slipstream.…'}"
        for place, source, target in imports
        if target != source and target not in MAY_IMPORT[source]
    ]


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_go_one_way(folder: str) -> None:
    offences: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        offences += _offences(_imports(path.read_text(encoding="utf-8"), folder, str(path.relative_to(ROOT))))
    assert not offences, "\n".join(offences)


def test_every_python_folder_has_its_rule() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    assert folders - set(MAY_IMPORT) <= {"tests", "build", "dist"}


@pytest.mark.parametrize(
    ("folder", "statement"),
    [
        ("services", "from slipstream.scheduler.core.sequence import Sequence"),
        ("scheduler", "from slipstream import services"),
        ("common", "import slipstream.client"),
        ("client", "def f():\n    from slipstream.cli import main"),
        ("services", "from ..common import errors"),
        ("cli", "import common.errors"),
        ("protos", "from slipstream.common.errors import SlipstreamError"),
        ("examples", "from slipstream.services.models.noise import gumbel_noise"),
    ],
)
def test_an_offence_is_seen(folder: str, statement: str) -> None:
    assert _offences(_imports(statement, folder, "x.py"))
