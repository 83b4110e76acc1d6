"""The audit of the pinned packages, with a stand-in for pip-audit: it must fail for flaws, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "audit_packages.py"
STAND_IN = """
import json, sys
pins = [line.split("==") for line in open(sys.argv[-1]).read().split()]
def answer(name, version):
    return {answer}
{before}
found = [{{"name": name, "version": version, **answer(name, version)}} for name, version in pins]
print(json.dumps({{"dependencies": found}}))
"""


def audit(folder: Path, answer: str, before: str = "") -> tuple[int, str]:
    """Runs the script; `answer` is what pip-audit says of a package."""
    (folder / "pip_audit.py").write_text(STAND_IN.format(answer=answer, before=before))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_packages_without_flaws(tmp_path: Path) -> None:
    status, output = audit(tmp_path, '{"vulns": []} if name != "torch" else {"skip_reason": "not on PyPI"}')
    assert status == 0
    assert output.endswith(" packages looked up, 1 unknown, 0 with flaws\n")


def test_a_flaw_is_named_and_fails(tmp_path: Path) -> None:
    flaw = '{"vulns": [{"id": "PYSEC-1", "fix_versions": ["9.9"]}] if name == "grpcio" else []}'
    status, output = audit(tmp_path, flaw)
    assert status == 1
    assert "audit: grpcio 1.84.0: PYSEC-1, fixed in 9.9\n" in output
    assert "1 with flaws" in output


@pytest.mark.parametrize(
    ("answer", "before", "reason"),
    [
        ('{"skip_reason": "Dependency not found on PyPI"}', "", "no advisories: Dependency not found on PyPI"),
        ("{}", "sys.exit('ConnectionError: no route')", "pip-audit ended with 1: ConnectionError: no route"),
    ],
    ids=["an index without advisories", "no network"],
)
def test_where_nothing_can_be_looked_up_the_reason_is_printed(
    tmp_path: Path, answer: str, before: str, reason: str
) -> None:
    status, output = audit(tmp_path, answer, before)
    assert (status, output.startswith("audit: skipped, "), output.count("\n")) == (0, True, 1)
    assert reason in output
