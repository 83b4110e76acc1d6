"""Faults that tests plant: what each action does to a process, and that every point is at a method of the product."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness.planted_faults import EXIT_STATUS, POINTS, PlantedFaults
from tests.harness.waiting import block_until

NAME = "gateway.before_commit"
PROGRAM = """
import sys
from pathlib import Path
from slipstream.gateway.journal_file import JournalFile, JournalMode
file = JournalFile.open(Path(sys.argv[1]), JournalMode.PROCESS)
for turn in range(1, 5):
    file.commit([], [b"row"])
    print(turn, flush=True)
    sys.stdin.readline()
"""


def started(faults: PlantedFaults, tmp_path: Path) -> subprocess.Popen[str]:
    """A process that reaches the point with each line that it gets."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = (sys.executable, "-c", PROGRAM, str(tmp_path / "journal"))
    return subprocess.Popen(command, text=True, env=faults.environment, cwd=tmp_path, **pipes)


def up_to_the_fault(process: subprocess.Popen[str]) -> None:
    """Takes the process to its second time at the point."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", EXIT_STATUS)])
def test_a_process_dies_once_at_its_point(tmp_path: Path, action: str, status: int) -> None:
    faults = PlantedFaults(tmp_path / "record", f"{NAME}:{action}@2")
    with started(faults, tmp_path) as process:
        assert not faults.have_failed
        up_to_the_fault(process)
        assert process.wait(20) == status
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert faults.have_failed
    with started(faults, tmp_path) as process:
        assert process.communicate("\n\n\n\n", 20)[0] == "1\n2\n3\n4\n", "the next process does not fail again"


def test_a_process_stops_and_goes_on(tmp_path: Path) -> None:
    faults = PlantedFaults(tmp_path / "record", f"{NAME}:stop@2")
    with started(faults, tmp_path) as process:
        up_to_the_fault(process)
        assert os.waitpid(process.pid, os.WUNTRACED)[1] >> 8 == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        assert process.communicate("\n\n\n", 20)[0] == "2\n3\n4\n"


def test_a_thread_hangs(tmp_path: Path) -> None:
    faults = PlantedFaults(tmp_path / "record", f"{NAME}:hang@2")
    with started(faults, tmp_path) as process:
        up_to_the_fault(process)
        block_until(lambda: faults.have_failed)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate("\n\n\n", 0.5)
        assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
        process.kill()


@pytest.mark.parametrize(
    ("points", "accepted"),
    [
        ("gateway.before_lunch:kill@1", NAME),
        (f"{NAME}:explode@1", "kill, exit, hang, stop"),
        (f"{NAME}:kill@0", "NAME:ACTION@TIME"),
        (f"{NAME}:kill", "NAME:ACTION@TIME"),
        ("", "NAME:ACTION@TIME"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(tmp_path: Path, points: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=accepted):
        PlantedFaults(tmp_path / "record", points)


def test_every_point_is_at_a_method_of_the_product() -> None:
    for method in (method for methods in POINTS.values() for method in methods):
        class_name, _, name = method.name.partition(".")
        assert callable(getattr(getattr(importlib.import_module(method.module), class_name), name))
