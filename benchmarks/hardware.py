"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def host(device: str = "cpu") -> str:
    """This machine and its Python, in words; with its GPU and driver, where that is what computes ("cuda")."""
    machine = f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{_gpu()}, {machine}" if device == "cuda" else machine


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
