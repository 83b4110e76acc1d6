"""The `Timeline` service over a real connection, beside a conductor of this process."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from slipstream.protos import trace_pb2_grpc
from slipstream.scheduler.telemetry.timeline import SERVICE_NAME, TimelineServicer
from tests.harness.grpc_server import running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness.worker_processes import Client


@asynccontextmanager
async def timeline_server(client: Client) -> AsyncIterator[str]:
    """Serves what the conductor's epoch records; yields the address."""
    service = (SERVICE_NAME, trace_pb2_grpc.add_TimelineServicer_to_server, TimelineServicer(lambda: client.epoch))
    async with running_server(service) as server:
        yield server.address
