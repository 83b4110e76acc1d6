"""`status` of a server whose services are in all states."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
import pytest

from slipstream.cli.status import fetch_status
from slipstream.cli.up.supervisor import Supervisor
from slipstream.common.api.server_state import ServerState, ServiceState
from slipstream.protos import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from slipstream.protos import generation_pb2
    from tests.cli.conftest import MakeCommand

pytestmark = pytest.mark.timeout(30)


class _Server(generation_pb2_grpc.GenerationServicer):
    def __init__(self, *services: ServiceState) -> None:
        self._state = ServerState(
            version="0",
            model="target",
            vocab_size=10,
            context_tokens=10,
            algorithm="standalone",
            num_draft_tokens=4,
            run_ahead=1,
            num_slots=2,
            page_tokens=16,
            num_pages=3,
            num_free_pages=2,
            queue_capacity=5,
            num_waiting=0,
            num_running=1,
            epoch=1,
            services=services,
            fence="host",
        )

    async def GetServerInfo(self, request: object, context: object) -> generation_pb2.GetServerInfoResponse:  # noqa: N802
        return self._state.to_pb()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., object]]:
    """Serves these services' names; gives the address."""
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


async def test_each_service_is_asked(serve: Callable[..., object], fake_service: MakeCommand) -> None:
    async with Supervisor(ready_timeout_s=20, drain_timeout_s=5) as supervisor:
        ready = fake_service("ready")
        supervisor.start(ready)
        await supervisor.wait_ready()
        address = await serve(
            ServiceState(name="ready", address=ready.address, pid=1),
            ServiceState(name="gone", address=ready.address + ".gone", pid=2),
            ServiceState(name="far", address="unix:/nonexistent/far.sock", pid=3),
        )
        status = await fetch_status(address)
    assert status.health == {"ready": "SERVING", "gone": "UNREACHABLE", "far": "ELSEWHERE"}
    assert not status.is_healthy
    assert json.loads(json.dumps(status.as_json()))["services"][1]["health"] == "UNREACHABLE"


async def test_what_cannot_be_asked_from_here_is_not_held_against_it(serve: Callable[..., object]) -> None:
    address = await serve(ServiceState(name="far", address="unix:/nonexistent/far.sock", pid=3))
    assert (await fetch_status(address)).is_healthy
