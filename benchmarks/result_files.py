"""Result files: JSON with the machine that it was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import DataclassInstance

T = TypeVar("T")


def host(device: str = "cpu") -> str:
    """Describes this machine and its Python; for "cuda" also the GPU and its driver."""
    machine = f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{_gpu()}, {machine}" if device == "cuda" else machine


def write_json(content: Any, path: Path | None) -> None:
    """Writes a file that replaces the old one as a whole. Without a path it does nothing."""
    if path is not None:
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def read_json(path: Path | None, default: Any) -> Any:
    """Reads a file; without one, returns `default`."""
    return default if path is None or not path.exists() else json.loads(path.read_text(encoding="utf-8"))


def write_rows(rows: Sequence[DataclassInstance], path: Path | None) -> None:
    """Writes a list of measurements."""
    write_json([asdict(row) for row in rows], path)


def read_rows(path: Path | None, make: Callable[..., T]) -> list[T]:
    """Reads a list of measurements, each made by `make` from its fields; empty where there is no file.

    Raises ValueError for a file of another kind.
    """
    if path is None or not path.exists():
        return []
    try:
        return [make(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold results of this benchmark: {error}") from error


def _gpu() -> str:
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    found = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    name, driver = found[0].split(", ")
    return f"{name}, driver {driver}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
