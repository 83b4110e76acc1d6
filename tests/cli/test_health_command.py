"""`slipstream health` against servers that say what they like."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from slipstream.cli import health as health_module
from slipstream.cli.health import check_or_kill
from slipstream.cli.main import app
from slipstream.common.errors import UnavailableError
from tests.harness.grpc_server import unserved_address
from tests.harness.running import slipstream
from tests.harness.supervised import MakeCommand
from tests.harness.waiting import is_listening, until


@pytest.fixture
def servicer() -> health.HealthServicer:
    """The server's answer."""
    return health.HealthServicer()


@pytest.fixture
def address(servicer: health.HealthServicer, tmp_path: Path) -> Iterator[str]:
    """Address of a server that has nothing but its health."""
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"unix:{tmp_path}/server.sock"
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


def test_ends_with_0_for_serving_alone(servicer: health.HealthServicer, address: str) -> None:
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    found = slipstream("health", address)
    assert (found.returncode, found.stdout, found.stderr) == (0, "SERVING\n", "")
    for answer in ("NOT_SERVING", "UNKNOWN"):
        servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(answer))
        found = slipstream("health", address)
        assert (found.returncode, found.stdout) == (1, "")
        assert found.stderr == f"slipstream: error: {address} says {answer}\n"


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with unserved_address() as unserved:
        for address in (f"unix:{tmp_path}/nobody.sock", unserved):
            found = slipstream("health", address)
            assert found.returncode == 1
            assert found.stderr.startswith(f"slipstream: error: {address} does not answer: ")
            assert found.stderr.count("\n") == 1


def test_kills_a_process_that_is_stopped_and_no_other(
    servicer: health.HealthServicer, address: str, fake_service: MakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert asyncio.run(check_or_kill(address)) == "NOT_SERVING"
    command = fake_service("stopped")
    with pytest.raises(UnavailableError, match=r"does not answer: (?!its)"):
        asyncio.run(check_or_kill(command.address))
    with subprocess.Popen(command.argv, stdout=subprocess.DEVNULL) as stopped:
        asyncio.run(health_module.wait_until_serving(command.address))
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        monkeypatch.setattr(health_module, "_CHECK_TIMEOUT_S", 0.5)
        with pytest.raises(UnavailableError, match=f"does not answer: its process {stopped.pid} was killed"):
            asyncio.run(check_or_kill(command.address))
        assert stopped.wait(60) == -signal.SIGKILL
    found = slipstream("health", "127.0.0.1:1", "--kill-hung")
    assert found.stderr.startswith("slipstream: error: --kill-hung: got '127.0.0.1:1', accepted: unix:PATH")


async def test_a_door_whose_gateway_hangs_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "door.sock")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = ("--listen", f"unix:{path}", "--gateway", f"127.0.0.1:{silent.getsockname()[1]}")
        door = await asyncio.create_subprocess_exec(sys.executable, "-m", "slipstream.door.main", *words)
        try:
            await until(lambda: is_listening(path))
            async with health_module.health_checks(f"http://unix:{path}") as answers:
                assert await answers(60.0)
            monkeypatch.setattr(health_module, "_DOOR_TIMEOUT_S", 0.5)
            with pytest.raises(UnavailableError, match="does not answer"):
                await health_module.check(f"http://unix:{path}")
        finally:
            door.kill()
            await door.wait()


@pytest.mark.parametrize(("error", "is_told"), [(BlockingIOError(), False), (ValueError(), True)])
def test_what_grpcs_poller_fails_to_read_is_not_told(
    error: Exception, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    async def serving(*_: object, **__: object) -> str:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)
        return "SERVING"

    monkeypatch.setattr(health_module, "check", serving)
    assert CliRunner().invoke(app, ["health", "unix:/none"]).exit_code == 0
    assert bool(caplog.records) == is_told


def test_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "prometheus_client", "rich")
    code = (
        "import sys\nfrom slipstream.cli.main import app\n"
        "try:\n    app(['health', 'unix:/nobody'])\nexcept BaseException:\n    pass\n"
        f"print('slipstream.cli.health' in sys.modules, [name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.strip() == "True []"
