"""`slipstream status`: what a server says about itself and its services, once or again and again."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slipstream.cli.cancellation import StopSignals
from slipstream.cli.draft_swaps import fetch_reports
from slipstream.cli.health import check
from slipstream.cli.state_dir import default_state_dir, server_of
from slipstream.client import AsyncClient
from slipstream.common.errors import ConfigError, SlipstreamError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
    from typing import Unpack

    from slipstream.cli.options import ConnectionOptions
    from slipstream.cli.process import ServiceReport
    from slipstream.client.connection import AccessOptions
    from slipstream.common.rpc.metrics import Scrape
    from slipstream.common.wire.server import ServerState, ServiceState

UNREACHABLE = "UNREACHABLE"
ELSEWHERE = "ELSEWHERE"
"""The service's socket can only be opened on its own host, which is another, or by its own user."""
HEALTHY = ("SERVING", ELSEWHERE)
DEFAULT_INTERVAL_S, MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 0.1, 3600.0
_TIMEOUT_S = 5.0
_SCRAPE_TIMEOUT_S = 2.0
_UNFOLDED_WIDTH, _PLAIN_WIDTH = 240, 160


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
        """True if all services that are part of the server now answer; a missing draft is no part."""
        return all(health in HEALTHY for health in self.health.values())

    def service(self, name: str) -> ServiceState:
        """Returns the service of this name, which must exist."""
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
            words.append(f"up to {state.num_draft_tokens} draft tokens a step")
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
        title = f"Slipstream {self.state.version} at {self.server}, {self.describe()}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        restarts = ["restarts"] if self.reports else []
        for heading in ("service", "health", "pid", *restarts, "address", "metrics port", "model"):
            table.add_column(heading, overflow="fold")
        for service in self.state.services:
            health, report = self.health[service.name], self.reports.get(service.name)
            shown = f"[{'green' if health in HEALTHY else 'bold red'}]{health}[/]"
            again = [_restarts(report)] if restarts else []
            port, model = f"{service.metrics_port or '-'}", service.model or "-"
            table.add_row(service.name, shown, f"{service.pid}", *again, service.address, port, model)
        for name, one in self.reports.items():
            if name not in self.health:
                row = f"[yellow]{one.state}[/]", f"{one.pid or '-'}", _restarts(one), one.address or "-", "-", "-"
                table.add_row(name, *row)
        console = Console(width=None if sys.stdout.isatty() else _UNFOLDED_WIDTH)
        console.print(table)
        if self.state.sampling_defaults is not None:
            console.print(f"sampling parameters of requests that name none: {self.state.sampling_defaults}")


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
            # Python 3.11's asyncio.wait_for loses a cancellation that arrives with the answer.
            async with asyncio.timeout(_TIMEOUT_S):
                state = await client.server_info()
        except TimeoutError as error:
            raise UnavailableError(f"no answer from a server at {server} for {_TIMEOUT_S:g} s") from error
    healths = await asyncio.gather(*(_health(server, service, access) for service in state.services))
    names = [service.name for service in state.services]
    return ServerStatus(server=server, state=state, health=dict(zip(names, healths, strict=True)))


def located(connection: ConnectionOptions, state_dir: Path | None) -> ConnectionOptions:
    """Returns the connection, to the `up` in `state_dir` if that is given. Raises UnavailableError if none is ready."""
    return connection if state_dir is None else replace(connection, server=server_of(state_dir))


async def run_status(connection: ConnectionOptions, state_dir: Path | None, *, as_json: bool) -> int:
    """Prints the status once; returns 1 if a service is not healthy. Raises UnavailableError without a server."""
    reports = await fetch_reports(state_dir or default_state_dir())
    found = located(connection, state_dir)
    status = (await fetch_status(found.server, **found.access)).with_reports(reports)
    if as_json:
        print(json.dumps(status.as_json()))
    else:
        status.print()
    return 0 if status.is_healthy else 1


async def _health(server: str, service: ServiceState, access: AccessOptions) -> str:
    # The gateway's own address may be a wildcard, or another than the one that leads there from here.
    is_server = service.name == "gateway"
    address = server if is_server else service.address
    try:
        if address.startswith("unix:") and not Path(address.removeprefix("unix:")).parent.is_dir():
            return ELSEWHERE
    except PermissionError:  # of another user's server
        return ELSEWHERE
    try:
        return await (check(address, **access) if is_server else check(address))
    except UnavailableError:
        return UNREACHABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A server at one moment."""

    at_s: float
    """On the monotonic clock."""
    status: ServerStatus
    metrics: Scrape | None
    """Samples of the gateway's and the scheduler's metrics, with a label `job`. None: they cannot be read."""
    why_no_metrics: str = ""

    def restarted(self, earlier: Reading) -> list[str]:
        """Names of the measured services that are other processes than in `earlier`: counters begin anew there."""
        both = (self, earlier)
        pids, others = ({service.name: service.pid for service in one.status.state.services} for one in both)
        # In containers the next process can have the same id.
        begun, before = (one.metrics.by("job", "process_start_time_seconds") if one.metrics else {} for one in both)
        return [
            name
            for name in ("scheduler", *self.status.gateways)
            if pids.get(name) != others.get(name)
            or len({times[name] for times in (begun, before) if name in times}) > 1
        ]

    def since(self, earlier: Reading | None) -> dict[str, Any] | None:
        """Returns rates and means of the time between. None: a first reading, another process, or no metrics."""
        if earlier is None or earlier.metrics is None or self.metrics is None or self.restarted(earlier):
            return None
        # Imported here: `up` needs no metrics of its own, and starts without what they take.
        from slipstream.gateway.metrics import GENERATION_TOKENS
        from slipstream.scheduler.metrics import ACCEPTED_TOKENS, BUBBLE_SECONDS, DRAFTS, STEP_SECONDS

        added, seconds = self.metrics.since(earlier.metrics), self.at_s - earlier.at_s
        num_steps, drafts = added.total(f"{STEP_SECONDS.name}_count"), added.total(DRAFTS.name)
        # From the end of one step to the end of the next, and the part of it in which no worker worked.
        wall_s, bubble_s = added.total(f"{STEP_SECONDS.name}_sum"), added.total(BUBBLE_SECONDS.name)
        bubbles = {edge: s / num_steps for edge, s in added.by("edge", BUBBLE_SECONDS.name).items() if s > 0}
        return {
            "seconds": seconds,
            "overlap_efficiency": 1 - bubble_s / wall_s if wall_s else None,
            "steps_per_s": num_steps / seconds,
            "step_s": wall_s / num_steps if num_steps else None,
            "bubbles_s": bubbles,
            "mean_accept_length": 1 + added.total(ACCEPTED_TOKENS.name) / drafts if drafts else None,
            "tokens_per_s": added.total(GENERATION_TOKENS.name) / seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a server at one moment, as `status --watch` shows it."""

    at: datetime
    """With the time zone."""
    reading: Reading | None
    """None: no server answers."""
    error: str = ""
    interval: dict[str, Any] | None = None
    """Figures since the previous look, see `Reading.since`."""
    event: str = ""
    """Last change, and when: the server went away, answers again, was started anew."""

    def as_json(self) -> dict[str, object]:
        """For `json.dumps`."""
        status: dict[str, object] = {"healthy": False} if self.reading is None else self.reading.status.as_json()
        at, event, error = self.at.isoformat(timespec="milliseconds"), self.event or None, self.error or None
        return {"time": at, "event": event, "error": error, "interval": self.interval} | status


async def looks(read: Callable[[], Awaitable[Reading]]) -> AsyncIterator[Look]:
    """Asks the server and its services for each look, without end. A server that does not answer is no error.

    `read` reads the server; it raises SlipstreamError while there is none.
    """
    last: Reading | None = None
    gone_since_s: float | None = None
    event = ""
    while True:
        at = datetime.now().astimezone()
        try:
            reading = await read()
        except SlipstreamError as error:
            if gone_since_s is None:
                gone_since_s, event = time.monotonic(), f"no answer since {at:%H:%M:%S}"
            yield Look(at=at, reading=None, error=str(error), event=event)
            continue
        away = "" if gone_since_s is None else f", after {reading.at_s - gone_since_s:.1f} s without an answer"
        if last is not None and (restarted := reading.restarted(last)):
            event = f"the {' and the '.join(restarted)} was started anew, seen at {at:%H:%M:%S}{away}"
        elif last is not None and last.status.state.epoch != (epoch := reading.status.state.epoch):
            event = f"workers attached anew, epoch {epoch}, seen at {at:%H:%M:%S}{away}"
        elif away:
            event = f"answers since {at:%H:%M:%S}{away}"
        interval = reading.since(last)
        last, gone_since_s = reading, None
        yield Look(at=at, reading=reading, error=reading.why_no_metrics, interval=interval, event=event)


async def read_server(server: str, **access: Unpack[AccessOptions]) -> Reading:
    """Asks this server. Raises a SlipstreamError when it does not answer; without its metrics, the reading says why."""
    from slipstream.common.rpc.metrics import joined, scrape

    status = await fetch_status(server, **access)
    pages: dict[str, Scrape] = {}
    metrics, why = None, ""
    for name in ("scheduler", *status.gateways):
        port = status.service(name).metrics_port
        if not port:
            why = f"the {name} has no metrics"
            continue
        try:
            pages[name] = await scrape(port, timeout_s=_SCRAPE_TIMEOUT_S)
        except (OSError, HTTPException, ValueError) as error:
            why = f"the metrics of the {name}, on port {port} of the server's host, cannot be read from here: {error}"
    if not why:
        metrics = joined(pages)
    return Reading(at_s=time.monotonic(), status=status, metrics=metrics, why_no_metrics=why)


def frame(look: Look) -> Table:
    """Returns a look as a table: a name and a text in each row."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(f"{look.at:%H:%M:%S}", Text(look.event, "yellow"))
    if look.error:
        table.add_row("error", Text(look.error, "bold red"))
    if look.interval is not None:
        _add_interval(table, look.interval)
    if look.reading is not None:
        _add_server(table, look.reading.status)
    return table


def _add_interval(table: Table, found: dict[str, Any]) -> None:
    efficiency, step_s = found["overlap_efficiency"], found["step_s"]
    if efficiency is None or not step_s:
        table.add_row("overlap", "-  no steps")
    else:
        style = "green" if efficiency >= 0.97 else "yellow" if efficiency >= 0.9 else "bold red"
        table.add_row("overlap", Text(f"{efficiency:.1%} of the steps' time is work", style))
        table.add_row("step", f"{1e3 * step_s:.3g} ms; {found['steps_per_s']:.1f} steps per second")
        bubbles = [f"{edge} {1e3 * s:.3g} ms ({s / step_s:.1%})" for edge, s in found["bubbles_s"].items()]
        table.add_row("bubbles", ", ".join(bubbles) or "none")
    accepted = found["mean_accept_length"]
    table.add_row("accept", "-  no drafts" if accepted is None else f"{accepted:.2f} tokens a step")
    table.add_row("tokens", f"{found['tokens_per_s']:.1f} per second")


def _add_server(table: Table, status: ServerStatus) -> None:
    state = status.state
    waiting = f"{state.num_waiting} of {state.queue_capacity} waiting"
    table.add_row("requests", f"{state.num_running} of {state.num_slots} running, {waiting}")
    used = state.num_pages - state.num_free_pages
    share = f", {used / state.num_pages:.1%}" if used else ""
    preemptions = f"; {state.num_preemptions} preemptions" if state.num_preemptions else ""
    table.add_row("KV", f"{used} of {state.num_pages} pages{share}{preemptions}")
    table.add_row("runs", Text(f"{state.model}; {status.describe()}; epoch {state.epoch}"))
    for service in state.services:
        health = status.health[service.name]
        line = Text(health, "green" if health in HEALTHY else "bold red")
        table.add_row(service.name, line.append(f"  pid {service.pid}  {service.address}", "dim"))


async def run_watch(
    connection: ConnectionOptions, state_dir: Path | None, *, interval_s: float | None, as_json: bool
) -> int:
    """Shows a look now and after each interval: on a terminal redrawn, elsewhere as lines. Returns 0 after a signal.

    Raises ConfigError naming `interval_s`.
    """
    interval_s = DEFAULT_INTERVAL_S if interval_s is None else interval_s
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigError("interval_s", interval_s, f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")

    async def read() -> Reading:
        return await read_server(located(connection, state_dir).server, **connection.access)

    is_live = not as_json and sys.stdout.isatty() and not Console().is_dumb_terminal
    plain = Console(width=_PLAIN_WIDTH, color_system=None)
    with Live(Text("asking ..."), auto_refresh=False) if is_live else nullcontext() as screen:

        def show(look: Look) -> None:
            if screen is not None:
                screen.update(frame(look), refresh=True)
            elif as_json:
                print(json.dumps(look.as_json(), allow_nan=False), flush=True)
            else:
                print_lines(plain, look)

        async def watch() -> None:
            due_s = time.monotonic()
            async for look in looks(read):
                show(look)
                due_s = max(due_s + interval_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())

        await StopSignals().cancel(watch())
    return 0


def print_lines(console: Console, look: Look) -> None:
    """Prints the table's lines, with an empty line after them."""
    with console.capture() as captured:
        console.print(frame(look))
    print(*(line.rstrip() for line in captured.get().splitlines()), "", sep="\n", file=console.file, flush=True)
