"""The Health dashboard: which services run, since when, and what they take of the machine."""

from __future__ import annotations

from slipstream.common.rpc.metrics import BUILD_INFO, RPCS
from slipstream.deploy.grafana.frame import JOBS, framed, row
from slipstream.deploy.grafana.panels import graph, listing, numbers
from slipstream.deploy.grafana.queries import INTERVAL, Query, increase, rate, series, total
from slipstream.scheduler.link import HEARTBEAT_AGE, WORKER_UP
from slipstream.scheduler.metrics import (
    ATTACHED,
    ATTACHMENTS,
    CATCH_UP_SECONDS,
    EPOCH,
    LOSSES,
    MISSING_SECONDS,
    SWAPS,
)
from slipstream.services.worker.rank_metrics import RANK_FREE, RANK_RESIDENT, RANK_UP, RANK_WAITED

AWAY_BELOW_1 = ((1, "green"),)
AGE_LIMITS = ((3, "yellow"), (10, "red"))
CAUGHT_UP = " / ".join(total(series(f"{CATCH_UP_SECONDS.name}_{part}")) for part in ("sum", "count"))
LOSSES_IN_AN_HOUR = increase(LOSSES, window="1h", cause="=~died|timeout|refused")
CPU = f"rate({series('process_cpu_seconds_total', job=JOBS)}[{INTERVAL}])"
OPEN_FILES = f"{series('process_open_fds', job=JOBS)} / {series('process_max_fds', job=JOBS)}"


def _restarts(window: str) -> str:
    return total(f"changes({series('process_start_time_seconds', job=JOBS)}[{window}])", "job")


_SERVICES = row(
    "Services",
    numbers(
        "Scraped",
        "1 where Prometheus reaches a service's endpoint.",
        Query(series("up", job=JOBS), "{{job}} {{instance}}"),
        limits=AWAY_BELOW_1,
        base="red",
    ),
    numbers(
        "Workers that serve",
        "1 where a worker told its scheduler in the last heartbeat that it serves, and of a target on several "
        "devices where a rank is loaded.",
        Query(series(WORKER_UP), "{{service}} {{instance}}"),
        Query(series(RANK_UP), "rank {{rank}} {{instance}}"),
        limits=AWAY_BELOW_1,
        base="red",
    ),
    numbers(
        "Epoch",
        "Number of the attachment to verify. It grows when verify was lost and is back.",
        Query(series(EPOCH), "{{instance}}"),
        base="blue",
    ),
    numbers(
        "Alerts that fire",
        "Of all rules; the list is in Prometheus, and what to do in docs/operations.md.",
        Query('sum(ALERTS{alertname=~"Slipstream.*", alertstate="firing"}) or vector(0)', "firing"),
        limits=((1, "red"),),
    ),
    listing(
        "What runs",
        "Version, model, device, and what the workers are ordered with.",
        Query(series(BUILD_INFO), is_instant=True),
        columns=("instance", "service", "version", "model", "device", "fence", "mps", "algorithm"),
    ),
)

_LOSSES = row(
    "Losses and returns",
    numbers(
        "Drafting now",
        "1 while a draft takes part in the steps. 0 is plain decoding: the same output, slower.",
        Query(series(ATTACHED), "{{instance}}"),
        limits=AWAY_BELOW_1,
        base="yellow",
    ),
    numbers(
        "Restarts in an hour",
        "How often a process of each service was replaced by another one.",
        Query(_restarts("1h"), "{{job}}"),
        limits=((1, "yellow"), (5, "red")),
    ),
    numbers(
        "Without a draft, for each loss",
        "Mean time from the loss of a draft until one drafts again, over the last hour.",
        Query(f"{increase(MISSING_SECONDS, window='1h')} / clamp_min({LOSSES_IN_AN_HOUR}, 1)", "seconds"),
        unit="s",
        limits=((30, "yellow"), (120, "red")),
    ),
    numbers(
        "Catching up",
        "Mean time from a draft's attachment to its first step, since the scheduler's start.",
        Query(CAUGHT_UP, "seconds"),
        unit="s",
        limits=((5, "yellow"), (30, "red")),
    ),
    graph(
        "Drafts that were lost and that began",
        "Losses by cause: it died, was too late for a step, refused a command, was swapped or taken away.",
        Query(increase(LOSSES, "cause"), "lost: {{cause}}"),
        Query(increase(ATTACHMENTS), "began to draft"),
        span=8,
    ),
    graph(
        "Time without a draft",
        "Share of the time in which verify served without a draft although one was expected.",
        Query(f"rate({series(MISSING_SECONDS)}[{INTERVAL}])", "{{instance}}"),
        unit="percentunit",
        limits=((0.05, "yellow"), (0.5, "red")),
        most=1,
        span=8,
    ),
    graph(
        "Swaps and restarts",
        "Swaps of the draft by result, and processes that were replaced by another one, by service.",
        Query(increase(SWAPS, "result"), "swap: {{result}}"),
        Query(_restarts(INTERVAL), "restart: {{job}}"),
        span=8,
    ),
)

_OVER_TIME = row(
    "Over time",
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
)

_PROCESSES = row(
    "Processes",
    graph(
        "Processor time",
        "Processor seconds per second: 1 is a whole core. Of a target's ranks on a CPU the time in collectives.",
        Query(CPU, "{{job}} {{instance}}"),
        Query(rate(RANK_WAITED), "collectives: rank {{rank}} {{instance}}"),
        span=8,
    ),
    graph(
        "Memory",
        "Resident memory of each process, and of a target's ranks also what is free on their GPUs.",
        Query(series("process_resident_memory_bytes", job=JOBS), "{{job}} {{instance}}"),
        Query(series(RANK_RESIDENT), "rank {{rank}} {{instance}}"),
        Query(series(RANK_FREE), "free on a GPU: rank {{rank}} {{instance}}"),
        unit="bytes",
        span=8,
    ),
    graph(
        "Open files",
        "Share of the file descriptors that each process may have.",
        Query(OPEN_FILES, "{{job}} {{instance}}"),
        unit="percentunit",
        limits=((0.5, "yellow"), (0.8, "red")),
        span=8,
    ),
)

HEALTH = framed(
    "health",
    "Which services are there, since when, what they are, and what they take of the machine.",
    _SERVICES,
    _LOSSES,
    _OVER_TIME,
    _PROCESSES,
)
"""The dashboard."""
