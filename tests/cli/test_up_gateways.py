"""`slipstream up --gateways`: real gateways on one port, one of which dies."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from slipstream.client import Client
from slipstream.common.errors import AddressInUseError, UnavailableError
from slipstream.common.rpc.listener import Listener
from tests.harness.running import leftovers, running_up, status, until

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.wire.server import ServiceState

pytestmark = pytest.mark.timeout(90)


def _gateways(server: str) -> dict[str, ServiceState]:
    with Client(server) as client:
        return {service.name: service for service in client.server_info().services if "gateway" in service.name}


@pytest.mark.slow
def test_gateways_serve_one_port_and_come_back(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with running_up(state_dir, "--gateways", "2", "--device", "cpu", "--slots", "4", "--threads", "1") as up:
        server = (state_dir / "server").read_text()
        before = _gateways(server)
        assert before.keys() == {"gateway-0", "gateway-1"}
        assert len({gateway.metrics_port for gateway in before.values()}) == 2
        with pytest.raises(AddressInUseError), Listener.claim(server, is_shared=True):
            pass
        os.kill(before["gateway-1"].pid, signal.SIGKILL)
        until(lambda: _is_back(server, before["gateway-1"]), up)
        created = [_create(server, f"job-{number}") for number in range(8)]
        for number in range(8):
            with Client(server) as client:
                # By another connection, which another gateway may have taken.
                tokens = [token for chunk in client.watch_job(f"job-{number}") for token in chunk.token_ids]
                assert len(tokens) == 5
                assert client.get_job(f"job-{number}").attempt == created[number]
        shown = status(state_dir)
        assert shown["healthy"]
        names = [service["name"] for service in shown["services"]]
        assert names == ["gateway-0", "gateway-1", "scheduler", "verify", "draft"]
        assert _gateways(server)["gateway-0"].pid == before["gateway-0"].pid
        up.signal(signal.SIGTERM)
        assert up.end() == 0
    assert leftovers(state_dir) == []


def _is_back(server: str, before: ServiceState) -> bool:
    try:
        return all(_gateways(server)["gateway-1"].pid not in (0, before.pid) for _ in range(4))
    except UnavailableError:
        # The new one has no scheduler yet.
        return False


def _create(server: str, job_id: str) -> int:
    with Client(server) as client:
        return client.create_job("def f(", job_id=job_id, max_new_tokens=5, ignore_eos=True).attempt
