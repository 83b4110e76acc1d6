"""The Health dashboard: which services run, since when, and what they take of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.rpc.metrics import BUILD_INFO, RPCS
from slipstream.deploy.grafana.frame import JOBS, framed
from slipstream.deploy.grafana.panels import graph, listing, numbers
from slipstream.deploy.grafana.queries import INTERVAL, Query, rate, series, total
from slipstream.scheduler.telemetry.server_metrics import EPOCH
from slipstream.scheduler.workers.heartbeats import HEARTBEAT_AGE, WORKER_UP

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard

    from slipstream.deploy.grafana.panels import Panel

AWAY_BELOW_1 = ((1, "green"),)
AGE_LIMITS = ((3, "yellow"), (10, "red"))


def health() -> Dashboard:
    """Returns the dashboard."""
    return framed(
        "health",
        "health",
        "Which services are there, since when, what they are, and what they take of the machine.",
        [("Services", _services()), ("Over time", _over_time()), ("Processes", _processes())],
    )


def _services() -> list[Panel]:
    return [
        numbers(
            "Scraped",
            "1 where Prometheus reaches a service's endpoint.",
            Query(series("up", job=JOBS), "{{job}} {{instance}}"),
            unit="none",
            limits=AWAY_BELOW_1,
            base="red",
        ),
        numbers(
            "Workers that serve",
            "1 where a worker told its scheduler in the last heartbeat that it serves.",
            Query(series(WORKER_UP), "{{service}} {{instance}}"),
            unit="none",
            limits=AWAY_BELOW_1,
            base="red",
        ),
        numbers(
            "Epoch",
            "Number of the attachment to the workers. It grows by one when a worker was lost and is back.",
            Query(series(EPOCH), "{{instance}}"),
            unit="none",
            base="blue",
        ),
        numbers(
            "Alerts that fire",
            "Of all rules; the list is in Prometheus, and what to do in docs/operations.md.",
            Query('sum(ALERTS{alertname=~"Slipstream.*", alertstate="firing"}) or vector(0)', "firing"),
            unit="none",
            limits=((1, "red"),),
        ),
        listing(
            "What runs",
            "Version, model, device, and what the workers are ordered with.",
            Query(series(BUILD_INFO), is_instant=True),
            columns=("instance", "service", "version", "model", "device", "fence", "mps", "algorithm"),
        ),
    ]


def _over_time() -> list[Panel]:
    return [
        graph(
            "Age of the last heartbeat",
            "Time since each worker last answered its scheduler, which asks once a second.",
            Query(series(HEARTBEAT_AGE), "{{service}} {{instance}}"),
            unit="s",
            limits=AGE_LIMITS,
        ),
        graph(
            "Up since",
            "Age of each process. A fall to zero is a restart.",
            Query(f"time() - {series('process_start_time_seconds', job=JOBS)}", "{{job}} {{instance}}"),
            unit="s",
        ),
        graph(
            "Calls that failed",
            "gRPC calls that did not end with OK, by service and status. CANCELLED is a client that went away.",
            Query(total(rate(RPCS, job=JOBS, code="!=OK"), "job", "code"), "{{job}} {{code}}"),
            unit="reqps",
        ),
        graph(
            "Time of a scrape",
            "How long Prometheus waited for each endpoint.",
            Query(series("scrape_duration_seconds", job=JOBS), "{{job}} {{instance}}"),
            unit="s",
            limits=((1, "yellow"),),
        ),
    ]


def _processes() -> list[Panel]:
    cpu = f"rate({series('process_cpu_seconds_total', job=JOBS)}[{INTERVAL}])"
    files = f"{series('process_open_fds', job=JOBS)} / {series('process_max_fds', job=JOBS)}"
    return [
        graph(
            "Processor time",
            "Processor seconds per second: 1 is a whole core.",
            Query(cpu, "{{job}} {{instance}}"),
            unit="none",
            span=8,
        ),
        graph(
            "Memory",
            "Resident memory of each process.",
            Query(series("process_resident_memory_bytes", job=JOBS), "{{job}} {{instance}}"),
            unit="bytes",
            span=8,
        ),
        graph(
            "Open files",
            "Share of the file descriptors that each process may have.",
            Query(files, "{{job}} {{instance}}"),
            unit="percentunit",
            limits=((0.5, "yellow"), (0.8, "red")),
            span=8,
        ),
    ]
