"""Tests that `slipstream up` ends in order: without a reader, and while the MPS daemon starts or quits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.harness.waiting import block_until, runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(30)

UP = Path(__file__).parent.parent / "harness" / "up_on_fakes.py"


@contextmanager
def up_on_fakes(state_dir: Path, *options: str, stderr: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """Starts it, as the leader of a session; it is killed with the context, if it has not ended by then."""
    command = ("env", "--default-signal=INT,HUP", sys.executable, str(UP), str(state_dir), *options)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
    ) as up:
        try:
            yield up
        finally:
            up.kill()


def until(is_so: Callable[[], bool], up: subprocess.Popen[bytes]) -> None:
    """Returns when it is so; the command must live that long, and the test's timeout bounds it."""
    while not is_so():
        assert up.poll() is None
        time.sleep(0.02)


def has_stopped_its_service(state_dir: Path) -> bool:
    """True if it was asked to end once, and has."""
    return (state_dir / "journal").read_text().count("SIGTERM") == 1 and not (state_dir / "scheduler.sock").exists()


def fake_process(up: subprocess.Popen[bytes], name: str) -> psutil.Process:
    """The process of a fake service."""
    children = psutil.Process(up.pid).children()
    return next(child for child in children if any(f"/{name}.sock" in word for word in child.cmdline()))


def test_it_starts_a_dead_gateway_again_and_ends_in_order(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("wb") as file, up_on_fakes(tmp_path, stderr=file.fileno()) as up:
        until((tmp_path / "server").exists, up)
        dead = fake_process(up, "gateway")
        dead.kill()
        until(lambda: errors.read_text().count("gateway: ready") == 2, up)
        assert fake_process(up, "gateway").pid != dead.pid
        up.send_signal(signal.SIGINT)
        assert up.wait(10) == 0
    assert "gateway was killed by SIGKILL and is started again; its log is now" in errors.read_text()
    assert has_stopped_its_service(tmp_path)
    assert not (tmp_path / "gateway.sock").exists()


def test_it_ends_in_order_when_its_terminal_is_gone(tmp_path: Path) -> None:
    terminal, side = os.openpty()
    with up_on_fakes(tmp_path, "--terminal", os.ttyname(side)) as up:
        until((tmp_path / "server").exists, up)
        os.close(side)
        os.close(terminal)
        assert up.wait(10) == 0
    assert has_stopped_its_service(tmp_path)


def test_it_ends_in_order_when_the_reader_of_its_output_is_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with up_on_fakes(tmp_path, stderr=writer) as up:
        os.close(writer)
        until((tmp_path / "server").exists, up)
        os.close(reader)
        up.send_signal(signal.SIGINT)
        assert up.wait(10) == 0
    assert has_stopped_its_service(tmp_path)


def test_it_fails_with_the_message_of_a_draft_that_cannot_be_served(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("wb") as file, up_on_fakes(tmp_path, "--draft", "/", stderr=file.fileno()) as up:
        assert up.wait(20) == 1
    assert "draft ended with exit status 2 before it was ready; the end of its log" in errors.read_text()
    assert errors.read_text().count("fake service cannot load its model") == 1
    assert not (tmp_path / "scheduler.sock").exists()


def test_it_serves_on_without_a_draft_that_cannot_be_served_any_more(tmp_path: Path) -> None:
    errors, broken = tmp_path / "errors", tmp_path / "broken"
    options = ("--draft", str(broken), "--max-restarts", "1")
    with errors.open("wb") as file, up_on_fakes(tmp_path, *options, stderr=file.fileno()) as up:
        until((tmp_path / "server").exists, up)
        broken.touch()
        until(lambda: "is not tried again: the others serve without it" in errors.read_text(), up)
        up.send_signal(signal.SIGINT)
        assert up.wait(10) == 0
    assert has_stopped_its_service(tmp_path)


@pytest.fixture
def pipes(mps_dir: Path) -> Path:
    """Directory of the MPS daemon."""
    return mps_dir / "pipe"


def told(pipes: Path) -> list[str]:
    """The commands that the daemon was given, by their first words."""
    journal = pipes / "journal"
    return [line.split()[0] for line in journal.read_text().splitlines()] if journal.exists() else []


def daemon_processes(pipes: Path) -> list[psutil.Process]:
    """The daemon, and its server."""
    return [psutil.Process(int((pipes / name).read_text())) for name in ("control", "server_process")]


def test_a_signal_while_the_mps_daemon_starts_ends_both(
    tmp_path: Path, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "waits at start_server")
    with up_on_fakes(tmp_path, "--mps") as up:
        until(lambda: "start_server" in told(pipes), up)
        processes = psutil.Process(up.pid).children(recursive=True)
        assert len(processes) == 3  # the daemon, its server, and who says "start_server"
        up.send_signal(signal.SIGTERM)
        assert up.wait(10) == 0
    assert told(pipes) == ["start_server", "quit"]
    block_until(lambda: not any(map(runs, processes)))


def test_a_signal_while_the_mps_daemon_quits_hides_no_error(
    tmp_path: Path, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "waits at quit")
    errors = tmp_path / "errors"
    with errors.open("wb") as file, up_on_fakes(tmp_path, "--mps", stderr=file.fileno()) as up:
        until((tmp_path / "server").exists, up)
        processes = daemon_processes(pipes)
        fake_process(up, "scheduler").kill()
        until(lambda: "quit" in told(pipes), up)
        up.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in errors.read_text(), up)
        (pipes / "go").touch()
        assert up.wait(10) == 1
    assert "scheduler was killed by SIGKILL" in errors.read_text()
    block_until(lambda: not any(map(runs, processes)))
