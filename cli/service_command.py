"""How each service is started: its command line, the address it serves at, and its log file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """One service to start."""

    name: str
    """What messages call it, and what its log is named for: "draft", "verify", "scheduler"."""
    argv: tuple[str, ...]
    """The command line, beginning with an absolute path."""
    address: str
    """gRPC target at which its health is asked, `unix:PATH` or `HOST:PORT`."""
    log_path: Path
    """Takes its standard output and error."""


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Command line of a module under this interpreter; -P, so that the working directory shadows no import."""
    return (sys.executable, "-P", "-m", module, *arguments)
