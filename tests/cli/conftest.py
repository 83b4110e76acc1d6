"""The bundled models behind a running `up`, fake services to supervise, and a fake MPS daemon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import psutil
import pytest

from slipstream.bundled import standalone_dir
from slipstream.cli import mps
from slipstream.common.wire.server import ServiceState
from slipstream.protos import generation_pb2, generation_pb2_grpc
from slipstream.scheduler.config import DEFAULT_DRAFT_TOKENS
from tests.harness.doors import write_chat_model
from tests.harness.example_states import STATE
from tests.harness.local_epoch import PATIENCE_MS
from tests.harness.planted_faults import ROOT
from tests.harness.running import Running, free_ports, running_up, status, until
from tests.harness.supervised import MakeCommand, fake_command

_FAKE_MPS_CONTROL = Path(__file__).parent.parent / "harness" / "fake_mps_control.py"


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State directory of the `up` that many tests share."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def metrics_port() -> int:
    """The first of six free ports that follow each other."""
    return free_ports(6)


@pytest.fixture(scope="session")
def up(state_dir: Path, metrics_port: int) -> Iterator[Running]:
    """The bundled pair, ready, started with a proxy that does not answer. Ends well after all that was asked of it.

    It drafts from the beginning on, on a busy machine, too.
    """
    options = ("--slots", "8", "--metrics-port", str(metrics_port), "--log-format", "json")
    drafts = ("--fixed-draft-tokens", str(DEFAULT_DRAFT_TOKENS), "--draft-timeout-ms", str(PATIENCE_MS))
    with ExitStack() as held:
        with pytest.MonkeyPatch.context() as environment:
            for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
                environment.delenv(name, raising=False)
            environment.setenv("http_proxy", "http://127.0.0.1:9")
            up = held.enter_context(running_up(state_dir, *options, *drafts))
        until(lambda: _is_complete(status(state_dir)), up)
        yield up
        up.signal(signal.SIGINT)
        assert up.end() == 0


def _is_complete(shown: dict[str, Any]) -> bool:
    """Whether draft and grammar worker, which a server may lack when it is ready, take part."""
    names = {service["name"] for service in shown["services"]}
    return shown["draft_state"] == "attached" and "grammar" in names


@pytest.fixture
def server(up: Running, state_dir: Path) -> str:
    """Address of the shared `up`."""
    assert not up.has_ended
    return (state_dir / "server").read_text()


@pytest.fixture(scope="session")
def held_server() -> Iterator[str]:
    """Address of a server whose jobs go on until they are cancelled: a sample gets three tokens and waits for more."""
    command = (sys.executable, "-m", "tests.harness.generation_server")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address
        yield address


CHAT_MODEL = "tiny"
CHAT_TEMPLATE = (
    "{% if tools %}# tools: <tool_call>\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target with a chat template, and in float32: there a batch changes no token."""
    return write_chat_model(tmp_path_factory.mktemp("models") / CHAT_MODEL, CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def chat_state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State directory of `chat_up`."""
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="session")
def chat_up(chat_model: Path, chat_state_dir: Path) -> Iterator[Running]:
    """The chat model and a draft, ready, with a grammar worker and OpenAI's interface. Ends well after all tests."""
    options = ("--target", str(chat_model), "--draft", str(standalone_dir()), "--openai-port", "0", "--device", "cpu")
    with running_up(chat_state_dir, *options, "--slots", "8", "--grammar-timeout-ms", "60000") as up:
        yield up
        up.signal(signal.SIGINT)
        assert up.end() == 0


@pytest.fixture
def chat_server(chat_up: Running, chat_state_dir: Path) -> str:
    """Address of `chat_up`'s gateway."""
    assert not chat_up.has_ended
    return (chat_state_dir / "server").read_text()


@pytest.fixture(scope="session")
def openai_url(chat_up: Running) -> str:
    """URL of `chat_up`'s interface of OpenAI's."""
    found = re.search(r"OpenAI's interface: (\S+)", chat_up.output())
    assert found, chat_up.output()
    return found[1]


@pytest.fixture
def fake_service(tmp_path: Path) -> MakeCommand:
    """Commands of fake services that live in the test's folder."""
    return partial(fake_command, tmp_path)


def is_of(process: psutil.Process, others: set[psutil.Process]) -> bool:
    """Whether others started it, as an `up` that several tests share starts services; true if it has ended by now.

    Python's tracker of shared memory belongs to the test process, whichever test needs it first.
    """
    with suppress(psutil.NoSuchProcess):
        return bool(others & set(process.parents())) or "resource_tracker" in "".join(process.cmdline())
    return True


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child behind, alive or not reaped."""
    before = set(psutil.Process().children(recursive=True))
    yield
    found = psutil.Process().children(recursive=True)
    left = {process for process in found if process not in before and not is_of(process, before)}
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


class _Server(generation_pb2_grpc.GenerationServicer):
    def __init__(self, *services: ServiceState) -> None:
        self._state = replace(STATE, num_draft_tokens=4, fence="host", services=services)

    async def GetServerInfo(self, request: object, context: object) -> generation_pb2.GetServerInfoResponse:  # noqa: N802
        return self._state.to_pb()


class ServeState(Protocol):
    """Serves `GetServerInfo` with these services; gives the address."""

    async def __call__(self, *services: ServiceState) -> str:
        """Called on the event loop."""


@pytest.fixture
async def serve_state() -> AsyncIterator[ServeState]:
    """Starts servers that only say what they are, and stops them."""
    servers: list[grpc.aio.Server] = []

    async def start(*services: ServiceState) -> str:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(_Server(*services), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)
