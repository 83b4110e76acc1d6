"""Faults that tests plant: what each action does to a process, and that services refuse them elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from slipstream.common.errors import ConfigError
from slipstream.common.fail_points import EXIT_STATUS, RECORD_VARIABLE, VARIABLE, failing_after, failing_before
from tests.harness.planted_faults import PlantedFaults

if TYPE_CHECKING:
    from pathlib import Path

NAME = "gateway.before_commit"
PROGRAM = f"""
import sys
from slipstream.common.fail_points import failing_before
work = failing_before({NAME!r}, print)
for turn in range(1, 5):
    work(turn, flush=True)
    sys.stdin.readline()
"""


def started(faults: PlantedFaults) -> subprocess.Popen[str]:
    """A process that comes to the point with each line that it gets."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], text=True, env=faults.environment, **pipes)


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
    with started(faults) as process:
        assert not faults.have_failed
        up_to_the_fault(process)
        assert process.wait(20) == status
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert faults.have_failed
    with started(faults) as process:
        assert process.communicate("\n\n\n\n", 20)[0] == "1\n2\n3\n4\n", "the next process does not fail again"


def test_a_process_stops_and_goes_on(tmp_path: Path) -> None:
    faults = PlantedFaults(tmp_path / "record", f"{NAME}:stop@2")
    with started(faults) as process:
        up_to_the_fault(process)
        assert os.waitpid(process.pid, os.WUNTRACED)[1] >> 8 == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        assert process.communicate("\n\n\n", 20)[0] == "2\n3\n4\n"


def test_a_thread_hangs(tmp_path: Path) -> None:
    faults = PlantedFaults(tmp_path / "record", f"{NAME}:hang@2")
    with started(faults) as process:
        up_to_the_fault(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate("\n\n\n", 0.5)
        assert faults.have_failed
        assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
        process.kill()


def test_a_point_without_a_fault_is_the_work_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work() -> None:
        """Does nothing."""

    assert failing_before(NAME, work) is work
    for name, value in PlantedFaults(tmp_path / "record", "gateway.after_commit:kill@1").variables.items():
        monkeypatch.setenv(name, value)
    assert failing_after(NAME, work) is work
    assert failing_after("gateway.after_commit", work) is not work


@pytest.mark.parametrize(
    ("points", "accepted"),
    [
        ("gateway.before_lunch:kill@1", NAME),
        (f"{NAME}:explode@1", "kill, exit, hang, stop"),
        (f"{NAME}:kill@0", "NAME:ACTION@TIME"),
        (f"{NAME}:kill", "NAME:ACTION@TIME"),
        ("", "NAME:ACTION@TIME"),
        (f"{NAME}:kill@1,", "NAME:ACTION@TIME"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, points: str, accepted: str
) -> None:
    monkeypatch.setenv(VARIABLE, points)
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=accepted):
        failing_before(NAME, print)


@pytest.mark.parametrize("service", ["gateway.main", "scheduler.main", "services.draft.main", "services.verify.main"])
@pytest.mark.parametrize("record", [None, "/nowhere"])
@pytest.mark.sampled(2)
def test_a_service_refuses_faults_that_no_test_planted(service: str, record: str | None, tmp_path: Path) -> None:
    options = {
        "gateway.main": ("--scheduler", f"unix:{tmp_path}/scheduler.sock"),
        "scheduler.main": ("--verify", f"unix:{tmp_path}/verify.sock"),
    }.get(service, ("--model", str(tmp_path)))
    environment = {name: value for name, value in os.environ.items() if name != RECORD_VARIABLE}
    environment |= {VARIABLE: f"{NAME}:kill@1", **({} if record is None else {RECORD_VARIABLE: record})}
    command = (sys.executable, "-m", f"slipstream.{service}", "--listen", f"unix:{tmp_path}/own.sock", *options)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert f"{VARIABLE}: got '{NAME}:kill@1', accepted: nothing: it is for tests" in ended.stderr
    assert not (tmp_path / "own.sock").exists()
