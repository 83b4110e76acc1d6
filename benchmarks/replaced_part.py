"""Takes a part out of a service's own code and puts another in its place: in this process, for a measurement."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def replace_part(module: str, name: str, replacement: object) -> None:
    """`name`: as it is called in `module`, with dots for what lies in a class."""
    *path, last = name.split(".")
    holder: Any = import_module(module)
    for part in path:
        holder = getattr(holder, part)
    assert hasattr(holder, last), f"{module} has no {name}: it is called otherwise by now"
    setattr(holder, last, replacement)
