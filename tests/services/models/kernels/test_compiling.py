"""The kernels compile for a Hopper GPU, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "kernel"),
    [
        (("attention_kernels", "rotation", "block_ops"), "attend_kernel"),
        (("products", "filter_kernels"), "product_kernel"),
        (("sampling_kernels",), "settle_kernel"),
    ],
)
def test_kernels_compile(modules: tuple[str, ...], kernel: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = (sys.executable, "-m", "tests.services.models.kernels.compiling", *modules)
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert kernel in finished.stdout.split()
