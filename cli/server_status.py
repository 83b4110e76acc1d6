"""What a server says about itself and its services, and how each of them is."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.health import check
from slipstream.client import AsyncClient
from slipstream.common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.common.api.server_state import ServerState, ServiceState

_TIMEOUT_S = 5.0
_UNFOLDED_WIDTH = 240

HEALTHY = ("SERVING", "ELSEWHERE")
UNREACHABLE = "UNREACHABLE"
ELSEWHERE = "ELSEWHERE"
"""Its socket can only be opened on its own host, and that is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A server with its services."""

    server: str
    state: ServerState
    health: Mapping[str, str]
    """Of each service: as in grpc.health.v1, or UNREACHABLE or ELSEWHERE."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is known to be wrong with any service."""
        return all(health in HEALTHY for health in self.health.values())

    def service(self, name: str) -> ServiceState:
        """The service of this name, which there must be."""
        return next(service for service in self.state.services if service.name == name)

    def as_json(self) -> dict[str, object]:
        """All of it, for `json.dumps`."""
        services = [{**asdict(service), "health": self.health[service.name]} for service in self.state.services]
        return {"server": self.server, "healthy": self.is_healthy, **asdict(self.state), "services": services}

    def print(self) -> None:
        """Prints all services as a table, which is only folded where there is a terminal too narrow for it."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        state = self.state
        drafting = f", {state.num_draft_tokens} draft tokens a step" if state.algorithm != "none" else ""
        order = f"{state.fence} fences" + (", MPS" if state.under_mps else "")
        title = f"Slipstream {state.version} at {self.server}, algorithm {state.algorithm}{drafting}, {order}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("service", "health", "pid", "address", "metrics port", "model"):
            table.add_column(heading, overflow="fold")
        for service in state.services:
            health = self.health[service.name]
            table.add_row(
                service.name,
                f"[{'green' if health in HEALTHY else 'bold red'}]{health}[/]",
                f"{service.pid}",
                service.address,
                f"{service.metrics_port or '-'}",
                service.model or "-",
            )
        Console(width=None if sys.stdout.isatty() else _UNFOLDED_WIDTH).print(table)


async def fetch_status(server: str) -> ServerStatus:
    """Asks the server, then each of its services. Raises UnavailableError when the server does not answer."""
    async with AsyncClient(server) as client:
        try:
            state = await asyncio.wait_for(client.server_info(), _TIMEOUT_S)
        except (UnavailableError, TimeoutError) as error:
            why = str(error) or f"nothing for {_TIMEOUT_S:g} s"
            raise UnavailableError(f"no answer from a server at {server}: {why}") from error
    healths = await asyncio.gather(*(_health(server, service) for service in state.services))
    names = [service.name for service in state.services]
    return ServerStatus(server=server, state=state, health=dict(zip(names, healths, strict=True)))


async def _health(server: str, service: ServiceState) -> str:
    # The scheduler's own address may be a wildcard, or another than the one that leads there from here.
    address = server if service.name == "scheduler" else service.address
    if address.startswith("unix:") and not Path(address.removeprefix("unix:")).parent.is_dir():
        return ELSEWHERE
    try:
        return await check(address)
    except UnavailableError:
        return UNREACHABLE
