"""Checks the project's import rules and the length of its files; prints each offence and ends with 1 if there is one.

- A folder imports only the folders that `MAY_IMPORT` lists, always as `slipstream.FOLDER`.
- No modules import each other in a cycle; imports under TYPE_CHECKING and inside functions count too.
- No two folders, at any depth, import each other.
- No file of the product is longer than `MAX_LINES`, or shorter than `MIN_LINES` with a single user; generated stubs,
  packages' `__init__.py` and what ends in `main.py`, which starts a process, are exempt.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_LINES, MIN_LINES = 600, 60
PRODUCT = ("services", "scheduler", "gateway", "common", "cli", "client", "door")

MAY_IMPORT: dict[str, set[str]] = {
    "protos": set(),
    "common": {"protos"},
    "services": {"common", "protos"},
    "gateway": {"common", "protos"},
    "scheduler": {"common", "protos"},
    "client": {"common", "protos"},
    "door": {"client", "common", "protos"},
    "cli": {"bundled", "client", "common", "door", "gateway", "protos", "scheduler", "services"},
    "benchmarks": {
        "bundled",
        "cli",
        "client",
        "common",
        "door",
        "gateway",
        "protos",
        "scheduler",
        "services",
        "training",
    },
    "bundled": set(),
    "deploy": {"common", "gateway", "protos", "scheduler", "services"},
    "training": {"bundled", "common", "services"},
    "examples/cuda_drafter": {"protos"},
    "examples/numpy_drafter": {"protos"},
    "examples": {"bundled", "client", "training"},
    "scripts": {"bundled", "client", "common"},
}
"""The folders that each folder may import beside itself; of two that hold a file, the inner one counts."""

MUTUAL_FOLDERS: dict[tuple[str, str], int] = {
    ("common/device", "common/device/cpu"): 1,
    ("common/device", "common/device/cuda"): 1,
}
"""Folders that may still import each other, and the most imports in the direction with fewer; entries only go."""
SMALL_FILES = frozenset({"cli/exec_with_parent.py"})
"""Files that may still be too short; entries only go."""


class Import(NamedTuple):
    """One imported name."""

    line: int
    module: str
    """With a name after `from ... import` appended; empty for a relative import."""


@cache
def imports_in(text: str) -> list[Import]:
    """Returns every import of a module, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = "" if node.level else f"{node.module}."
            found += [Import(node.lineno, prefix and prefix + alias.name) for alias in node.names]
    return found


def direction_offences(path: str, text: str) -> list[str]:
    """Returns the imports of a file, given by its path from the root, that its folder may not make."""
    folder = max((name for name in MAY_IMPORT if path.startswith(f"{name}/")), key=len)
    accepted = {folder} | MAY_IMPORT[folder]
    offences = []
    for line, module in imports_in(text):
        first, _, rest = module.partition(".")
        if not module or first in MAY_IMPORT:
            offences.append(f"{path}:{line}: {folder} imports by another name than slipstream.FOLDER")
        elif first == "slipstream" and (target := rest.partition(".")[0]) not in accepted:
            offences.append(f"{path}:{line}: {folder} imports {target}")
    return offences


def import_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the files that each file imports. `texts`: by the files' paths from the root."""
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        graph[path] = set()
        for _, module in imports_in(text):
            parts = module.split(".")
            # A name in a module, or a module in a package: the longest path that is a file counts.
            for place in ("/".join(parts[1:]), "/".join(parts[1:-1])) if parts[0] == "slipstream" else ():
                found = next((name for name in (f"{place}.py", f"{place}/__init__.py") if name in texts), None)
                if found is not None:
                    graph[path].add(found)
                    break
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns cycles that share no file, each as a path that ends where it begins; none if there is no cycle."""
    left = {path: set(targets) for path, targets in graph.items()}
    found = []
    while left:
        # Files that import none of the others are in no cycle.
        free = {path for path, targets in left.items() if not targets & left.keys()}
        if free:
            left = {path: targets for path, targets in left.items() if path not in free}
            continue
        walk = [min(left)]
        while walk[-1] not in walk[:-1]:
            walk.append(min(left[walk[-1]] & left.keys()))
        found.append(walk[walk.index(walk[-1]) :])
        left = {path: targets for path, targets in left.items() if path not in found[-1]}
    return found


def mutual_folders(graph: Mapping[str, set[str]]) -> dict[tuple[str, str], int]:
    """Returns the pairs of folders that import each other, with the imports in the direction with fewer."""
    crossing = Counter(
        (path.rpartition("/")[0], target.rpartition("/")[0]) for path, targets in graph.items() for target in targets
    )
    return {
        (one, other): min(count, crossing[other, one])
        for (one, other), count in sorted(crossing.items())
        if one < other and (other, one) in crossing
    }


def folder_offences(graph: Mapping[str, set[str]], accepted: Mapping[tuple[str, str], int]) -> list[str]:
    """Returns the pairs of folders with more mutual imports than accepted."""
    return [
        f"{one} and {other} import each other: {count} imports in the direction with fewer"
        for (one, other), count in mutual_folders(graph).items()
        if count > accepted.get((one, other), 0)
    ]


def length_offences(texts: Mapping[str, str], graph: Mapping[str, set[str]]) -> list[str]:
    """Returns the files of the product that are too long, or too short for a single user."""
    num_users = Counter(target for targets in graph.values() for target in targets)
    found = []
    for path, text in texts.items():
        count = text.count("\n")
        if not path.startswith(tuple(f"{folder}/" for folder in PRODUCT)):
            continue
        if count > MAX_LINES:
            found.append(f"{path}: {count} lines, at most {MAX_LINES}")
        is_exempt = path in SMALL_FILES or path.endswith(("/__init__.py", "main.py"))
        if count < MIN_LINES and num_users[path] <= 1 and not is_exempt:
            found.append(f"{path}: {count} lines for a single user, at least {MIN_LINES}")
    return found


def sources(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Returns the Python files of folders but generated stubs, by their paths from the root."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths if "_pb2" not in path.name
    }


def offences(root: Path) -> list[str]:
    """Returns what breaks the rules, a line each."""
    texts = sources(root, MAY_IMPORT)
    graph = import_graph(texts)
    found = [offence for path, text in texts.items() for offence in direction_offences(path, text)]
    found += [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]
    return found + folder_offences(graph, MUTUAL_FOLDERS) + length_offences(texts, graph)


if __name__ == "__main__":
    lines = offences(Path(__file__).resolve().parent.parent)
    sys.exit("\n".join(lines) if lines else 0)
