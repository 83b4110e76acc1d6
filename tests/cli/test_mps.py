"""The MPS daemon's life, on a control program that does as it is told."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from slipstream.cli import mps
from slipstream.cli.mps import MpsMode, mps_daemon, outside_mps
from slipstream.cli.process import ServiceCommand
from slipstream.cli.up_config import placed
from slipstream.common.errors import ConfigError, FailedPreconditionError
from tests.harness.waiting import DEADLINES_S, runs, until


@pytest.fixture
def directory(mps_dir: Path) -> Path:
    """The daemon's directory."""
    return mps_dir


def told(directory: Path) -> list[str]:
    """The commands that the daemon was given."""
    return (directory / "pipe" / "journal").read_text().splitlines()


def children() -> list[psutil.Process]:
    """Whatever this process started and did not reap."""
    return psutil.Process().children(recursive=True)


async def test_serves_as_long_as_the_context(directory: Path) -> None:
    before = children()
    async with mps_daemon(MpsMode.ON, directory) as daemon:
        assert daemon is not None
        assert await daemon.servers() == [4711]
        assert daemon.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(directory / "pipe")
        assert (directory / "pipe").stat().st_mode & 0o777 == 0o700
        assert len(children()) > len(before)
    assert told(directory)[0] == f"start_server -uid {os.geteuid()}"
    assert told(directory)[-1] == "quit"
    assert children() == before


@pytest.mark.parametrize(("visible", "seen"), [("1", "0"), ("3, 1", "0,1"), ("GPU-8f", None), ("", None)])
async def test_clients_name_the_gpus_that_the_daemon_sees_by_its_numbers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    async with mps_daemon(MpsMode.ON, directory) as daemon:
        assert daemon is not None
        assert daemon.environment.get("CUDA_VISIBLE_DEVICES") == seen


async def test_lets_a_client_go_before_it_is_killed(directory: Path) -> None:
    async with mps_daemon(MpsMode.ON, directory) as daemon:
        assert daemon is not None
        await daemon.release(1234)
    assert "terminate_client 4711 1234" in told(directory)


async def test_a_daemon_that_is_gone_is_no_reason_not_to_kill(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mps_daemon(MpsMode.ON, directory) as daemon:
        assert daemon is not None
        control = directory / "pipe" / "control"
        os.kill(int(control.read_text()), signal.SIGKILL)
        control.unlink()
        await daemon.release(1234)
        assert "process 1234 is killed" in caplog.text
        assert "Cannot find MPS control daemon process" in caplog.text


async def test_off_starts_nothing(directory: Path) -> None:
    async with mps_daemon(MpsMode.OFF, directory) as daemon:
        assert daemon is None
    assert not list(directory.parent.glob("mps*"))


async def test_a_daemon_that_ends_is_an_error_that_says_where_its_log_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "dies")
    with pytest.raises(FailedPreconditionError, match=r"ended with status 1; see .*log"):
        async with mps_daemon(MpsMode.ON, directory):
            pass
    assert "no such device" in (directory / "log" / "control.log").read_text()


async def test_auto_goes_without_where_no_server_can_be_started(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_MPS", "refuses")
    before = children()
    for timeout_s in DEADLINES_S:
        monkeypatch.setattr(mps, "START_TIMEOUT_S", timeout_s)
        async with mps_daemon(MpsMode.AUTO, directory) as daemon:
            assert daemon is None
        if "not supported on this device" in caplog.text:
            break
    else:
        pytest.fail("the reason is not said")
    assert children() == before


async def test_auto_goes_without_where_the_program_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with mps_daemon(MpsMode.AUTO, tmp_path / "mps") as daemon:
        assert daemon is None
    assert "is not installed" in caplog.text


async def test_a_daemon_that_does_not_quit_is_killed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "deaf")
    monkeypatch.setattr(mps, "COMMAND_TIMEOUT_S", 1.0)
    before = children()
    async with mps_daemon(MpsMode.ON, directory) as daemon:
        assert daemon is not None
    assert children() == before


@pytest.mark.parametrize("has_died", [True, False])
async def test_its_server_ends_with_it(directory: Path, has_died: bool) -> None:
    async with mps_daemon(MpsMode.ON, directory):
        server = psutil.Process(int((directory / "pipe" / "server_process").read_text()))
        control = psutil.Process(int((directory / "pipe" / "control").read_text()))
        assert server.is_running()
        if has_died:
            control.kill()
    await until(lambda: not runs(server))
    assert not control.is_running()


async def test_a_cancellation_does_not_cut_its_end_short(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async with mps_daemon(MpsMode.ON, directory):
            pass

    before = children()
    monkeypatch.setenv("FAKE_MPS", "waits at quit")
    using = asyncio.ensure_future(use())
    await until(lambda: (directory / "pipe" / "journal").exists() and "quit" in told(directory))
    using.cancel()
    await asyncio.sleep(0)
    (directory / "pipe" / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert children() == before


async def test_a_cancellation_is_not_lost_with_a_daemon_that_auto_goes_without(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        async with mps_daemon(MpsMode.AUTO, directory):
            raise AssertionError("goes on")

    monkeypatch.setenv("FAKE_MPS", "refuses, waits at quit")
    monkeypatch.setattr(mps, "START_TIMEOUT_S", 0.5)
    using = asyncio.ensure_future(use())
    await until(lambda: (directory / "pipe" / "journal").exists() and "quit" in told(directory))
    using.cancel()
    await asyncio.sleep(0)
    (directory / "pipe" / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await using


async def test_a_path_that_no_socket_can_have_is_refused_by_name(directory: Path) -> None:
    with pytest.raises(ConfigError, match="state_dir"):
        async with mps_daemon(MpsMode.ON, directory / ("x" * 100)):
            pass


def test_nobody_serves_outside(tmp_path: Path) -> None:
    assert not Path(outside_mps(tmp_path)["CUDA_MPS_PIPE_DIRECTORY"]).exists()


async def test_workers_are_inside_and_the_scheduler_is_not(directory: Path) -> None:
    services = [
        ServiceCommand(name=name, argv=(), address=f"unix:/{name}", log_path=directory / name)
        for name in ("verify", "draft", "scheduler")
    ]
    outside = outside_mps(directory)
    async with mps_daemon(MpsMode.ON, directory) as daemon:
        assert daemon is not None
        inside = daemon.environment
        found = [placed(service, directory, daemon) for service in services]
        assert [service.environment for service in found] == [inside, inside, outside]
        assert [service.group for service in found] == ["workers", "workers", ""]
    found = [placed(service, directory, None) for service in services]
    assert [(service.environment, service.group) for service in found] == [(outside, "")] * 3
