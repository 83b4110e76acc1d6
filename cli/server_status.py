"""What a server says about itself and its services, and how each of them is."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from slipstream.cli.health import check
from slipstream.common.errors import UnavailableError
from slipstream.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from rich.table import Table

_INFO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service, where it is and how it is."""

    name: str
    address: str
    pid: int
    metrics_port: int
    """Port of its Prometheus endpoint; 0 if it has none."""
    model: str
    device: str
    health: str
    """SERVING, NOT_SERVING, UNKNOWN, UNREACHABLE, or ELSEWHERE when only its own host could ask."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self.health in ("SERVING", "ELSEWHERE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A server with its services."""

    server: str
    version: str
    model: str
    algorithm: str
    num_draft_tokens: int
    num_running: int
    num_waiting: int
    services: tuple[ServiceStatus, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether every service is."""
        return all(service.is_healthy for service in self.services)

    def as_json(self) -> dict[str, object]:
        """All of it, for `json.dumps`."""
        return {"healthy": self.is_healthy, **asdict(self)}

    def table(self) -> Table:
        """All services, for a terminal."""
        from rich.table import Table

        drafting = f"K={self.num_draft_tokens}" if self.algorithm != "none" else "nothing drafts"
        table = Table(title=f"Slipstream {self.version} at {self.server} ({self.algorithm}, {drafting})")
        for heading in ("service", "pid", "address", "metrics", "health", "model", "device"):
            table.add_column(heading, overflow="fold")
        for service in self.services:
            metrics = f"http://127.0.0.1:{service.metrics_port}/metrics" if service.metrics_port else "-"
            health = f"[{'green' if service.is_healthy else 'bold red'}]{service.health}[/]"
            about = (service.model or "-", service.device or "-")
            table.add_row(service.name, str(service.pid), service.address, metrics, health, *about)
        return table


async def fetch_status(server: str) -> ServerStatus:
    """Asks the server, then each of its services. Raises UnavailableError when the server does not answer."""
    async with grpc.aio.insecure_channel(server) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        try:
            info = await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"no answer from a server at {server}: {error.details()}") from error
    services = await asyncio.gather(*(_service_status(server, service) for service in info.services))
    return ServerStatus(
        server=server,
        version=info.version,
        model=info.model,
        algorithm=info.algorithm,
        num_draft_tokens=info.num_draft_tokens,
        num_running=info.num_running,
        num_waiting=info.num_waiting,
        services=tuple(services),
    )


async def _service_status(server: str, info: generation_pb2.ServiceInfo) -> ServiceStatus:
    # The scheduler's own address may be a wildcard, or another than the one that leads there from here.
    address = server if info.name == "scheduler" else info.address
    return ServiceStatus(
        name=info.name,
        address=info.address,
        pid=info.pid,
        metrics_port=info.metrics_port,
        model=info.model,
        device=info.device,
        health=await _health(address),
    )


async def _health(address: str) -> str:
    if address.startswith("unix:") and not Path(address.removeprefix("unix:")).parent.is_dir():
        return "ELSEWHERE"
    try:
        return await check(address)
    except UnavailableError:
        return "UNREACHABLE"
