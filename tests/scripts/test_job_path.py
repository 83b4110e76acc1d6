"""A job passes through few files of the product."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "job_path.py"
MAX_FILES, MAX_LINES = 66, 22_500


@pytest.mark.slow
def test_a_job_enters_few_files() -> None:
    """Through four real processes on the CPU, with the bundled model and its EAGLE-3 head."""
    found = job_path(SCRIPT)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    by_service = {name: [file for file, users in report["files"].items() if name in users] for name in _CORE}
    assert all(core in by_service[name] for name, core in _CORE.items()), "every process was traced"
    assert report["num_files"] <= MAX_FILES, "\n".join(report["files"])
    assert report["num_lines"] <= MAX_LINES


def test_what_comes_by_the_clock_does_not_count(tmp_path: Path) -> None:
    """Each job enters `check`, as does the time without one; the first enters `once`, too."""
    script = runpy.run_path(str(SCRIPT))
    job, check, once = "gateway/jobs.py:10", "gateway/server.py:20", "gateway/keys.py:30"
    entered = [(number, function) for number in range(1, script["IDLE"]) for function in (job, check)]
    entered += [(script["IDLE"], check), (1, once)]
    (tmp_path / "gateway.files").write_text("".join(f"{number} {function}\n" for number, function in entered))
    assert script["read_files"](tmp_path, ["gateway"]) == {"gateway/jobs.py": ["gateway"]}


@pytest.mark.slow
def test_services_that_enter_no_file_of_the_checkout_are_an_error(tmp_path: Path) -> None:
    """The script's own checkout counts; the services come from the one that is installed."""
    (tmp_path / "scripts").mkdir()
    found = job_path(Path(shutil.copy(SCRIPT, tmp_path / "scripts")))
    assert found.returncode == 1
    assert f"enters no file of {tmp_path}: slipstream is imported from {ROOT}" in found.stderr
    assert not found.stdout


def job_path(script: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script."""
    command = (sys.executable, str(script), "--json")
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


_CORE = {
    "gateway": "gateway/jobs.py",
    "scheduler": "scheduler/loop.py",
    "draft": "services/draft/drafters.py",
    "verify": "services/verify/target.py",
}
