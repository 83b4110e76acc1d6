"""A job passes through few files of the product."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "job_path.py"
MAX_FILES = 70


@pytest.mark.slow
def test_a_job_enters_few_files() -> None:
    """Through four real processes on the CPU, with the bundled model and its EAGLE-3 head."""
    command = (sys.executable, str(SCRIPT), "--json")
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    by_service = {name: [file for file, users in report["files"].items() if name in users] for name in _CORE}
    assert all(core in by_service[name] for name, core in _CORE.items()), "every process was traced"
    assert report["num_files"] <= MAX_FILES, "\n".join(report["files"])


_CORE = {
    "gateway": "gateway/manager.py",
    "scheduler": "scheduler/core/loop.py",
    "draft": "services/draft/drafters.py",
    "verify": "services/verify/target.py",
}
