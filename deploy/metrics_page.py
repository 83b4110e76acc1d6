"""Makes docs/metrics.md from the metrics' definitions.

python -m slipstream.deploy.metrics_page
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.rpc import metrics as common_metrics
from slipstream.common.rpc.metrics import MetricKind
from slipstream.common.wire.events import WORKER_STALLS
from slipstream.gateway import metrics as gateway_metrics
from slipstream.scheduler import link, metrics
from slipstream.services.grammar import metrics as grammar_metrics
from slipstream.services.worker import rank_metrics

if TYPE_CHECKING:
    from slipstream.common.rpc.metrics import MetricSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


GATEWAY, SCHEDULER, WORKERS = ("gateway",), ("scheduler",), ("draft", "verify")


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that belong together."""

    title: str
    text: str
    metrics: tuple[MetricSpec, ...]
    services: tuple[str, ...] = SCHEDULER
    """The services whose endpoints have them, whatever their settings."""


CATALOGUE = (
    Section(
        "Steps",
        "Where the time of steps goes, from stamps that the workers leave in shared memory: measuring adds no "
        "synchronisation. The scheduler has them for all services, so that their labels match. For consecutive steps, "
        "`wall = busy draft + busy verify + bubbles`; where prompts come in on a CPU, draft and verify work at once, "
        "and the busy times are more than that.",
        metrics.STEP_SPECS,
    ),
    Section("Requests", "What clients get. On the gateway's endpoint.", gateway_metrics.SPECS, GATEWAY),
    Section(
        "For routers",
        "As routers of vLLM's servers read them, with `--compat-metrics`. On the gateway's endpoint; each of several "
        "gateways has its own requests.",
        gateway_metrics.COMPAT_SPECS,
        (),
    ),
    Section("Server", "What it is and how full it is. On the scheduler's endpoint.", metrics.SERVER_SPECS),
    Section(
        "Drafts that come and go",
        "On the scheduler's endpoint. Losses count drafts that drafted.",
        metrics.DRAFT_SPECS,
    ),
    Section(
        "Constraints",
        "On the scheduler's endpoint. Verify's wait for masks is a stall, with the site `masks`.",
        (metrics.GRAMMAR_LOSSES,),
    ),
    Section("The grammar worker", "On its endpoint.", grammar_metrics.SPECS, ("grammar",)),
    Section("Workers, as the scheduler sees them", "On the scheduler's endpoint.", link.SPECS),
    Section(
        "Ranks of a target on several devices",
        "On verify's endpoint, which is rank 0's, with `--tensor-parallel-size` above 1. On a GPU collectives are in "
        "graphs, and their time is not measured; what is free on rank 0's GPU is not asked.",
        rank_metrics.SPECS,
        (),
    ),
    Section(
        "Host threads",
        "On the endpoints of scheduler, draft and verify.",
        (common_metrics.HOST_STALL_SECONDS,),
        SCHEDULER + WORKERS,
    ),
    Section(
        "Every service",
        "On each endpoint, that of a door too.",
        (common_metrics.RPCS,),
        (*GATEWAY, *SCHEDULER, *WORKERS, "grammar"),
    ),
    Section(
        "What runs",
        "On the endpoints of gateway, scheduler, draft and verify.",
        (common_metrics.BUILD_INFO,),
        GATEWAY + SCHEDULER + WORKERS,
    ),
)
"""Every metric of ours."""

HEAD = """# Metrics

<!-- Made by `python -m slipstream.deploy.metrics_page` from the code; edit the definitions there. -->

Each service has a Prometheus endpoint of its own (`--metrics-port`, path `/metrics`, on loopback). Times are in
seconds, sizes in bytes. A histogram `x` is read as `x_bucket`, `x_sum` and `x_count`.
[`operations.md`](operations.md) says how to read the dashboards made of them, and what to do when an alert fires.

Labels that come again and again:

| label | values |
|---|---|
"""
LABELS = {
    "fence": "how streams wait for each other: `host` on a CPU, `timeline` or `event` on a GPU",
    "mps": "whether the workers share the GPU through MPS: `on`, `off`",
    "algorithm": "how tokens are drafted: `standalone`, `eagle3`, `ngram`, … or `none`",
    "phase": "`decode`, `prefill` for steps that take in prompts, or `mixed` for those that do both",
    "service": "`gateway`, `scheduler`, `draft`, `verify`, `grammar`",
    "edge": "between which works the time was lost: `verify_to_draft`, `draft_to_verify`, or `verify_to_verify` in "
    "steps without a draft in their path",
    "site": "where a host thread was blocked. The scheduler's loop: "
    + ", ".join(f"`{site}`" for site in metrics.SITES.values())
    + ". A worker's device thread: "
    + ", ".join(f"`{site.name.lower()}`" for site in WORKER_STALLS),
}

TAIL = """
## The processes

Beside these, every endpoint has what Prometheus' own client tells of a process: `process_cpu_seconds_total`,
`process_resident_memory_bytes`, `process_virtual_memory_bytes`, `process_start_time_seconds`, `process_open_fds`,
`process_max_fds`.
"""


def text() -> str:
    """Returns the text of the page."""
    labels = "".join(f"| `{label}` | {values} |\n" for label, values in LABELS.items())
    return HEAD + labels + "".join(map(_section, CATALOGUE)) + TAIL


def _section(section: Section) -> str:
    rows = "".join(map(_row, section.metrics))
    return f"\n## {section.title}\n\n{section.text}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n{rows}"


def _row(metric: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    buckets = ""
    if metric.kind is MetricKind.HISTOGRAM:
        buckets = f" Buckets from {metric.buckets[0]:g} to {metric.buckets[-1]:g} s."
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help}{buckets} |\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
