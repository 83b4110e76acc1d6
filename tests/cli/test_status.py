"""`status` of a server whose services are in all states."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.status import fetch_status
from slipstream.cli.up.supervisor import Supervisor
from slipstream.common.api.server_state import ServiceState

if TYPE_CHECKING:
    from tests.cli.conftest import MakeCommand, ServeState

pytestmark = pytest.mark.timeout(30)


async def test_each_service_is_asked(serve_state: ServeState, fake_service: MakeCommand) -> None:
    async with Supervisor(ready_timeout_s=20, drain_timeout_s=5) as supervisor:
        ready = fake_service("ready")
        supervisor.start(ready)
        await supervisor.wait_ready()
        address = await serve_state(
            ServiceState(name="ready", address=ready.address, pid=1),
            ServiceState(name="gone", address=ready.address + ".gone", pid=2),
            ServiceState(name="far", address="unix:/nonexistent/far.sock", pid=3),
        )
        status = await fetch_status(address)
    assert status.health == {"ready": "SERVING", "gone": "UNREACHABLE", "far": "ELSEWHERE"}
    assert not status.is_healthy
    assert json.loads(json.dumps(status.as_json()))["services"][1]["health"] == "UNREACHABLE"


async def test_what_cannot_be_asked_from_here_is_not_held_against_it(serve_state: ServeState) -> None:
    address = await serve_state(ServiceState(name="far", address="unix:/nonexistent/far.sock", pid=3))
    assert (await fetch_status(address)).is_healthy
