"""The health of a service, and what a server says about itself and its services."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.client import AsyncClient
from slipstream.client.connection import open_async_channel
from slipstream.common.errors import ConfigError, UnavailableError
from slipstream.common.rpc.address import UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Unpack

    from slipstream.cli.up.process import ServiceReport
    from slipstream.client.connection import AccessOptions
    from slipstream.common.api.server_state import ServerState, ServiceState

UNREACHABLE = "UNREACHABLE"
ELSEWHERE = "ELSEWHERE"
"""The service's socket can only be opened on its own host, which is another."""
HEALTHY = ("SERVING", ELSEWHERE)

NUM_CHECKS = 4
"""Health checks in a row that a service leaves without an answer before it is killed; each waits 2 s."""
_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.05
_CHECK_TIMEOUT_S = 2.0
_TIMEOUT_S = 5.0
_UNFOLDED_WIDTH = 240
# Health is asked on this host, where a proxy has no business and a retry costs nothing.
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)
WHOLE_SERVER = health_pb2.HealthCheckRequest(service="")


async def wait_until_serving(address: str) -> None:
    """Returns when the server at `address` says SERVING. Tries for ever: bound it, and watch its process."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):
                # A stream that fails leaks memory (grpc/grpc#43360): it begins when a server is there.
                await stub.Check(WHOLE_SERVER, timeout=_CHECK_TIMEOUT_S, wait_for_ready=True)
                async for response in stub.Watch(WHOLE_SERVER):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(_RETRY_S)


async def check(address: str, **access: Unpack[AccessOptions]) -> str:
    """Health of the server at `address` now: "SERVING", "NOT_SERVING" or "UNKNOWN".

    Raises UnavailableError when no server answers there.
    """
    async with open_async_channel(address, CHANNEL_OPTIONS, access) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(WHOLE_SERVER, timeout=_CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"{address} does not answer: {error.details()}") from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


async def check_or_kill(address: str) -> str:
    """Returns the health of the service at unix:PATH. Kills the process that listens there and does not answer.

    Raises UnavailableError when no process listens there, and when one was killed.
    """
    parsed = parse_address(address, field="ADDRESS")
    if not isinstance(parsed, UnixAddress):
        raise ConfigError("kill_hung", address, "unix:PATH, whose process is known")
    num_missed = 0
    while True:
        try:
            return await check(address)
        except UnavailableError as error:
            if (pid := _listener(parsed)) is None:
                raise
            num_missed += 1
            if num_missed == NUM_CHECKS:
                os.kill(pid, signal.SIGKILL)
                raise UnavailableError(f"{address} does not answer: its process {pid} was killed") from error


def _listener(address: UnixAddress) -> int | None:
    """Id of the process that listens there; None if there is none, or none that can be seen from here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog of a process that is stopped
        try:
            probe.connect(str(address.path))
        except OSError:
            return None
        # Those of the process that called `listen`, in our own namespace: 0 if it is not there.
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid or None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A server with its services."""

    server: str
    state: ServerState
    health: Mapping[str, str]
    """By service: as in grpc.health.v1, or UNREACHABLE or ELSEWHERE."""
    reports: Mapping[str, ServiceReport] = field(default_factory=dict)
    """By service, from the `up` that keeps them, if one of this host does."""

    def with_reports(self, reports: Iterable[ServiceReport]) -> ServerStatus:
        """Adds what an `up` says; nothing if the services are not those that it keeps."""
        by_name = {report.name: report for report in reports}
        is_theirs = any(
            service.pid == by_name[service.name].pid for service in self.state.services if service.name in by_name
        )
        return replace(self, reports=by_name) if is_theirs else self

    @property
    def is_healthy(self) -> bool:
        """True if all services answer that are part of the server now; a draft that is missing is none."""
        return all(health in HEALTHY for health in self.health.values())

    def service(self, name: str) -> ServiceState:
        """The service of this name, which there must be."""
        return next(service for service in self.state.services if service.name == name)

    @property
    def gateways(self) -> list[str]:
        """Names of the gateways: "gateway", or "gateway-0" and so on."""
        return [service.name for service in self.state.services if service.name.partition("-")[0] == "gateway"]

    def describe(self) -> str:
        """Algorithm, state of the draft, kind of fences, and whether under MPS, in words."""
        state = self.state
        words = [f"algorithm {state.algorithm}"]
        if state.algorithm != "none":
            words.append(f"{state.num_draft_tokens} draft tokens a step")
        if state.draft_state:
            is_resting = state.draft_state == "resting"
            name = f"draft {'attached' if is_resting else state.draft_state}"
            name = "without a draft" if state.draft_state == "missing" else name
            problem = f" ({state.draft_problem})" if state.draft_problem else ""
            words.append(f"{name} for {_duration(state.draft_state_seconds)}{problem}")
            words += ["resting now"] * is_resting
        if borrowed := sum(service.shared_weight_bytes for service in state.services):
            words.append(f"draft borrows {borrowed / 2**20:.1f} MiB of the target's weights")
        if state.max_batched_tokens:
            words.append(f"up to {state.max_batched_tokens} tokens a step beside decoding")
        return ", ".join([*words, f"{state.fence} fences", *(["MPS"] if state.under_mps else [])])

    def as_json(self) -> dict[str, object]:
        """For `json.dumps`."""
        services = [{**asdict(service), "health": self.health[service.name]} for service in self.state.services]
        supervised = [asdict(report) for report in self.reports.values()]
        found = {"server": self.server, "healthy": self.is_healthy, **asdict(self.state), "services": services}
        return {**found, "supervised": supervised} if supervised else found

    def print(self) -> None:
        """Prints all services as a table, which is only folded where there is a terminal too narrow for it."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        title = f"Slipstream {self.state.version} at {self.server}, {self.describe()}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        restarts = ["restarts"] if self.reports else []
        for heading in ("service", "health", "pid", *restarts, "address", "metrics port", "model"):
            table.add_column(heading, overflow="fold")
        for service in self.state.services:
            health = self.health[service.name]
            table.add_row(
                service.name,
                f"[{'green' if health in HEALTHY else 'bold red'}]{health}[/]",
                f"{service.pid}",
                *([_restarts(self.reports.get(service.name))] if restarts else []),
                service.address,
                f"{service.metrics_port or '-'}",
                service.model or "-",
            )
        for name, report in self.reports.items():
            if name not in self.health:
                pid = f"{report.pid or '-'}"
                table.add_row(
                    name, f"[yellow]{report.state}[/]", pid, _restarts(report), report.address or "-", "-", "-"
                )
        Console(width=None if sys.stdout.isatty() else _UNFOLDED_WIDTH).print(table)


def _restarts(report: ServiceReport | None) -> str:
    if report is None:
        return "-"
    return f"{report.num_restarts}" + (f" ({report.last_end})" if report.last_end else "")


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


async def fetch_status(server: str, **access: Unpack[AccessOptions]) -> ServerStatus:
    """Asks the server, then each of its services. Raises UnavailableError when the server does not answer."""
    async with AsyncClient(server, **access) as client:
        try:
            state = await asyncio.wait_for(client.server_info(), _TIMEOUT_S)
        except TimeoutError as error:
            raise UnavailableError(f"no answer from a server at {server} for {_TIMEOUT_S:g} s") from error
    healths = await asyncio.gather(*(_health(server, service, access) for service in state.services))
    names = [service.name for service in state.services]
    return ServerStatus(server=server, state=state, health=dict(zip(names, healths, strict=True)))


async def _health(server: str, service: ServiceState, access: AccessOptions) -> str:
    # The gateway's own address may be a wildcard, or another than the one that leads there from here.
    is_server = service.name == "gateway"
    address = server if is_server else service.address
    if address.startswith("unix:") and not Path(address.removeprefix("unix:")).parent.is_dir():
        return ELSEWHERE
    try:
        return await (check(address, **access) if is_server else check(address))
    except UnavailableError:
        return UNREACHABLE
