"""`slipstream health` against servers that say what they like."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.harness.running import slipstream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


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
    for status in ("NOT_SERVING", "UNKNOWN"):
        servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
        found = slipstream("health", address)
        assert (found.returncode, found.stdout) == (1, "")
        assert found.stderr == f"slipstream: error: {address} says {status}\n"


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"unix:{tmp_path}/nobody.sock", f"127.0.0.1:{port}"):
        found = slipstream("health", address)
        assert found.returncode == 1
        assert found.stderr.startswith(f"slipstream: error: {address} does not answer: ")
        assert found.stderr.count("\n") == 1


def test_an_address_that_is_none() -> None:
    found = slipstream("health", "verify")
    assert found.returncode == 2
    assert found.stderr.startswith("slipstream: error: ADDRESS: got 'verify', accepted: HOST:PORT")


def test_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "prometheus_client", "rich")
    code = (
        "import sys\nfrom slipstream.cli.main import app\n"
        "try:\n    app(['health', 'unix:/nobody'])\nexcept BaseException:\n    pass\n"
        f"print('slipstream.cli.status' in sys.modules, [name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.strip() == "True []"
