"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def host() -> str:
    """This machine and its Python, in words."""
    return f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
