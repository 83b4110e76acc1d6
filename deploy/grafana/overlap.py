"""The Overlap dashboard: which share of a step is lost, and at which edge."""

from __future__ import annotations

from slipstream.common.rpc.metrics import BUILD_INFO, HOST_STALL_SECONDS
from slipstream.deploy.grafana.frame import framed, row
from slipstream.deploy.grafana.panels import bars, graph, heat_map, listing, numbers
from slipstream.deploy.grafana.queries import Query, over, rate, series, total
from slipstream.gateway.metrics import GRAMMAR_COMPILE, REFUSED_GRAMMARS
from slipstream.scheduler.metrics import (
    BUBBLE_SECONDS,
    BUSY_SECONDS,
    DRAFT_TO_VERIFY,
    GRAMMAR_LOSSES,
    OVERLAP_EFFICIENCY,
    RUN_AHEAD,
    STEP_SECONDS,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
)
from slipstream.services.grammar.metrics import MASK_SECONDS, MASKS

DECODE = "decode"
LOST_LIMITS = ((0.03, "yellow"), (0.10, "red"))
MICROSECONDS = "1e6"
WALL = rate(STEP_SECONDS, part="sum")
DECODE_STEPS = total(rate(STEP_SECONDS, part="count", phase=DECODE))
STEPS = total(rate(STEP_SECONDS, part="count"))
STEP_MS = f"1e3 * {total(WALL, 'instance', 'phase')} / {total(rate(STEP_SECONDS, part='count'), 'instance', 'phase')}"
LOST_SHARE = f"{total(rate(BUBBLE_SECONDS), 'instance')} / {total(WALL, 'instance')}"
EDGE_NAMES = {
    VERIFY_TO_DRAFT: "verify → draft",
    DRAFT_TO_VERIFY: "draft → verify",
    VERIFY_TO_VERIFY: "verify → verify",
}
EDGE_COLORS = {VERIFY_TO_DRAFT: "#F2495C", DRAFT_TO_VERIFY: "#FF9830", VERIFY_TO_VERIFY: "#FADE2A"}
COLORS = {
    "draft": "#5794F2",
    "verify": "#73BF69",
    **{f"lost: {EDGE_NAMES[edge]}": color for edge, color in EDGE_COLORS.items()},
    "step": "text",
}


def _lost_by_edge() -> list[Query]:
    lost = {name: total(rate(BUBBLE_SECONDS, edge=edge)) for edge, name in EDGE_NAMES.items()}
    return [Query(f"{seconds} / {total(WALL)}", name) for name, seconds in lost.items()]


def _stalls(service: str, **labels: str) -> str:
    stalled = total(rate(HOST_STALL_SECONDS, service=service, **labels), "service", "site")
    return over(stalled, STEPS, scale=MICROSECONDS)


def _per_step(expr: str) -> str:
    return over(expr, DECODE_STEPS, scale=MICROSECONDS)


_LOST = row(
    "Lost time",
    numbers(
        "Share of a step that is lost",
        "Time in which neither draft nor verify had work, over the time that steps took, while requests ran. "
        "Below 3 % the device is busy nearly all the time. Idle time without requests does not count.",
        Query(LOST_SHARE, "{{instance}}"),
        unit="percentunit",
        limits=LOST_LIMITS,
        decimals=1,
    ),
    bars(
        "Lost at which edge",
        "The same share, by the work before and after the lost time. verify → draft: the next "
        "step's draft came too late. draft → verify: verify did. verify → verify: steps without a draft in their "
        "path. A long bar points at who sends late: see the host's stalls below.",
        *_lost_by_edge(),
        unit="percentunit",
        limits=LOST_LIMITS,
        span=9,
        height=4,
        most=0.5,
    ),
    numbers(
        "Step",
        "Mean time from the end of one step to the end of the next, in milliseconds, by phase.",
        Query(STEP_MS, "{{phase}} {{instance}}"),
        unit="ms",
        base="blue",
        span=5,
    ),
    numbers(
        "Run-ahead",
        "Steps that may be under way beyond the one whose result is awaited. At 0 the host's own time lies "
        "between the steps and shows as lost at verify → draft.",
        Query(series(RUN_AHEAD), "{{instance}}"),
        base="blue",
        span=4,
    ),
)

_PARTS = row(
    "Where a step's time goes",
    graph(
        "Where the time of a decode step goes",
        "Stacked: what a mean decode step consists of, in microseconds. The line is the whole step by its own "
        "measure: where it lies on top of the stack, nothing is left unexplained.",
        *(
            Query(_per_step(total(rate(BUSY_SECONDS, phase=DECODE, service=service))), service)
            for service in ("draft", "verify")
        ),
        *(
            Query(_per_step(total(rate(BUBBLE_SECONDS, phase=DECODE, edge=edge))), f"lost: {name}")
            for edge, name in EDGE_NAMES.items()
        ),
        Query(_per_step(total(rate(STEP_SECONDS, part="sum", phase=DECODE))), "step"),
        unit="µs",
        is_stacked=True,
        lines=["step"],
        colors=COLORS,
        span=24,
        height=10,
    ),
    graph(
        "Share that is lost, by edge",
        "The lost time as a share of all steps' time, prompts included.",
        *_lost_by_edge(),
        unit="percentunit",
        limits=LOST_LIMITS,
        is_stacked=True,
        colors={EDGE_NAMES[edge]: color for edge, color in EDGE_COLORS.items()},
    ),
    heat_map(
        "Step time",
        "How many decode steps took how long. Two bands are two batch sizes, or a bubble that comes and goes.",
        Query(
            total(f"increase({series(f'{STEP_SECONDS.name}_bucket', phase=DECODE)}[$__rate_interval])", "le"),
            "{{le}}",
        ),
        unit="s",
    ),
)

_CAUSES = row(
    "Why",
    graph(
        "Host stalls, per step",
        "Microseconds of a step in which the scheduler's loop was blocked, by place. result: waiting for the "
        "oldest step, harmless while the device has work. draft_backlog: prompts come faster than draft takes "
        "them in. acknowledgement: a command was held back until a worker had acknowledged another.",
        Query(_stalls("scheduler"), "{{site}}"),
        unit="µs",
    ),
    graph(
        "Host stalls of the workers, per step",
        "Microseconds of a step in which a worker's device thread was blocked, by place. staging: the device is a "
        "whole ring of steps behind. attach and drain: an epoch begins, its graphs are captured, or it ends. "
        "Anything but 0 between those is a host that does not run ahead.",
        Query(_stalls("=~draft|verify"), "{{service}} {{site}}"),
        unit="µs",
    ),
    graph(
        "Masks of constraints, per step",
        "Microseconds of a step in which the grammar worker made masks, beside verify's forward, and in which "
        "verify waited for them before it sampled: only the second is lost.",
        Query(over(total(rate(MASK_SECONDS)), STEPS, scale=MICROSECONDS), "making them"),
        Query(_stalls("verify", site="masks"), "lost: verify waits"),
        unit="µs",
    ),
    graph(
        "Constraints",
        "In a second: masks that were filled, grammars that were compiled and refused before admission, and "
        "grammar workers that were lost or late.",
        Query(total(rate(MASKS)), "masks"),
        Query(total(rate(GRAMMAR_COMPILE, part="count")), "compiled grammars"),
        Query(total(rate(REFUSED_GRAMMARS)), "refused grammars"),
        Query(total(rate(GRAMMAR_LOSSES)), "lost grammar workers"),
        unit="cps",
    ),
    graph(
        "Overlap efficiency",
        "1 - lost / step time over the last 10 seconds, as the scheduler has it. No value without requests.",
        Query(f"{series(OVERLAP_EFFICIENCY)} >= 0", "{{instance}}"),
        unit="percentunit",
        limits=((0.90, "yellow"), (0.97, "green")),
        base="red",
        least=None,
        most=1,
    ),
    graph(
        "Busy, by service and phase",
        "Share of the time in which each worker worked. Draft and verify take turns when decoding; with prompts "
        "they work side by side.",
        Query(total(rate(BUSY_SECONDS), "service", "phase"), "{{service}} {{phase}}"),
        unit="percentunit",
    ),
    listing(
        "Measured with",
        "The fence, MPS and algorithm that the figures above belong to.",
        Query(series(BUILD_INFO, service="scheduler"), is_instant=True),
        columns=("instance", "model", "device", "fence", "mps", "algorithm", "version"),
        height=4,
    ),
)

OVERLAP = framed(
    "overlap",
    "Which share of a step is lost, and at which edge. The first row answers it for the newest seconds, the "
    "second shows when and how it came to be.",
    _LOST,
    _PARTS,
    _CAUSES,
)
"""The dashboard."""
