"""The bundled models behind a running `up`, fake services to supervise, and a fake MPS daemon."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import pytest

from slipstream.cli.up import mps
from slipstream.cli.up.process import ServiceCommand
from tests.harness.running import running_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.running import Running

_FAKE_SERVICE = Path(__file__).parent.parent / "harness" / "fake_service.py"
_FAKE_MPS_CONTROL = Path(__file__).parent.parent / "harness" / "fake_mps_control.py"


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State directory of the `up` that many tests share."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def metrics_port() -> int:
    """The first of three free ports that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, ExitStack() as others:
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                for number in (1, 2):
                    others.enter_context(socket.create_server(("127.0.0.1", port + number)))
                return port


@pytest.fixture(scope="session")
def up(state_dir: Path, metrics_port: int) -> Iterator[Running]:
    """The bundled pair, ready. Ends well after all that was asked of it."""
    options = ("--slots", "8", "--metrics-port", str(metrics_port), "--log-format", "json")
    with running_up(state_dir, *options) as up:
        yield up
        up.signal(signal.SIGINT)
        assert up.end() == 0


@pytest.fixture
def server(up: Running, state_dir: Path) -> str:
    """Address of the shared `up`."""
    assert not up.has_ended
    return (state_dir / "server").read_text()


class MakeCommand(Protocol):
    """Makes the command of a fake service that serves at a socket named for it."""

    def __call__(self, name: str, *options: str) -> ServiceCommand:
        """Options are those of `fake_service.py`."""


@pytest.fixture
def fake_service(tmp_path: Path) -> MakeCommand:
    """Commands of fake services that live in the test's folder."""

    def make(name: str, *options: str) -> ServiceCommand:
        address = f"unix:{tmp_path}/{name}.sock"
        return ServiceCommand(
            name=name,
            argv=(sys.executable, str(_FAKE_SERVICE), "--listen", address, *options),
            address=address,
            log_path=tmp_path / f"{name}.log",
        )

    return make


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child behind, alive or not reaped."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, f"left behind: {left}"


@pytest.fixture
def mps_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of an MPS daemon; the control program on the path is the fake."""
    control = tmp_path / "bin" / mps.CONTROL
    control.parent.mkdir()
    control.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {_FAKE_MPS_CONTROL} "$@"\n')
    control.chmod(0o700)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    return tmp_path / "mps"
