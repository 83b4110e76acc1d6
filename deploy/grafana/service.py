"""The Service dashboard: latencies, load and room, as clients meet them."""

from __future__ import annotations

from slipstream.common.rpc.metrics import RPCS
from slipstream.deploy.grafana.frame import JOBS, framed, row
from slipstream.deploy.grafana.panels import graph, numbers
from slipstream.deploy.grafana.queries import Query, quantile, quantiles, rate, series, total
from slipstream.gateway.metrics import (
    COALESCED,
    CUT_OFF,
    END_TO_END,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    GIVEN_UP,
    INTER_TOKEN,
    JOURNAL_DAMAGE,
    PROMPT_TOKENS,
    PUBLISH_TO_SEND,
    QUEUE_CAPACITY,
    QUEUE_TIME,
    REQUESTS,
    RUNNING,
    WAITING,
)
from slipstream.scheduler.metrics import (
    KV_PAGE_BYTES,
    KV_PAGES,
    KV_PAGES_USED,
    NOT_FINITE,
    PREEMPTIONS,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERY_TOKENS,
    SLOTS,
)

NEARLY_FULL = ((0.8, "yellow"), (0.95, "red"))
FIRST_TOKEN_LIMITS = ((1, "yellow"), (5, "red"))
INTER_TOKEN_LIMITS = ((0.1, "yellow"), (0.5, "red"))
SEND_LIMITS = ((0.01, "yellow"), (0.05, "red"))
KV_SHARE = f"{total(series(KV_PAGES_USED), 'instance', 'service')} / {total(series(KV_PAGES), 'instance', 'service')}"
KV_BYTES = f"{series(KV_PAGES_USED)} * {series(KV_PAGE_BYTES)}"

_NOW = row(
    "Now",
    numbers(
        "Requests running",
        "Outputs, n of a request, that were given a slot and have not ended; preempted ones count.",
        Query(total(series(RUNNING)), "running"),
        base="blue",
        span=4,
    ),
    numbers(
        "Queue",
        "Outputs that wait for their first slot, as a share of those that may; at 100 % further ones are refused.",
        Query(f"{total(series(WAITING))} / {total(series(QUEUE_CAPACITY))}", "queue"),
        unit="percentunit",
        limits=NEARLY_FULL,
        span=4,
    ),
    numbers(
        "Tokens per second",
        "Tokens that clients get.",
        Query(total(rate(GENERATION_TOKENS)), "tokens"),
        unit="cps",
        base="blue",
        span=4,
    ),
    numbers(
        "Time to first token, p99",
        "99 of 100 requests have their first token within this time of their arrival.",
        Query(quantile(FIRST_TOKEN, 0.99), "p99"),
        unit="s",
        limits=FIRST_TOKEN_LIMITS,
        span=4,
    ),
    numbers(
        "Inter-token latency, p99",
        "99 of 100 tokens come within this time of the one before.",
        Query(quantile(INTER_TOKEN, 0.99), "p99"),
        unit="s",
        limits=INTER_TOKEN_LIMITS,
        span=4,
    ),
    numbers(
        "KV memory in use",
        "Share of the KV pages that requests hold for their tokens and those of the next steps.",
        Query(KV_SHARE, "{{service}} {{instance}}"),
        unit="percentunit",
        limits=NEARLY_FULL,
        span=4,
    ),
)

_TRAFFIC = row(
    "Traffic",
    graph(
        "Requests, by outcome",
        "How requests ended. stop and length are those that came to their end; refused is the full queue; "
        "error is ours.",
        Query(total(rate(REQUESTS), "outcome"), "{{outcome}}"),
        unit="reqps",
        is_stacked=True,
        colors={"error": "red", "refused": "orange", "stop": "green", "length": "blue"},
    ),
    graph(
        "Tokens",
        "Tokens per second of prompts that began, those of them that the prefix cache had, and of output.",
        Query(total(rate(PROMPT_TOKENS)), "prompt"),
        Query(total(rate(PREFIX_QUERY_TOKENS)), "looked for in the prefix cache"),
        Query(total(rate(PREFIX_HIT_TOKENS)), "found in the prefix cache"),
        Query(total(rate(GENERATION_TOKENS)), "output"),
        unit="cps",
    ),
    graph(
        "Calls, by method and status",
        "gRPC calls that ended. UNAVAILABLE and INTERNAL are ours; RESOURCE_EXHAUSTED is the full queue.",
        Query(total(rate(RPCS, job=JOBS), "method", "code"), "{{method}} {{code}}"),
        unit="reqps",
    ),
    graph(
        "Streams cut off",
        "Streams per second whose client read nothing, sequences given up with which work was lost repeatedly, and "
        "those whose logits were NaN or infinite. And what a damaged journal has cost since the gateway's start.",
        Query(total(rate(CUT_OFF)), "cut off"),
        Query(total(rate(GIVEN_UP)), "sequences given up"),
        Query(total(rate(NOT_FINITE)), "logits not finite"),
        Query(total(series(JOURNAL_DAMAGE), "lost"), "damaged journal: {{lost}}"),
        unit="reqps",
        limits=((0.1, "yellow"),),
    ),
)

_LATENCY = row(
    "Latency",
    graph(
        "Time to first token",
        "From the arrival of a request to its first token.",
        *quantiles(FIRST_TOKEN),
        unit="s",
        limits=FIRST_TOKEN_LIMITS,
    ),
    graph(
        "Inter-token latency",
        "Between tokens of a request; tokens of one step share the time since the step before.",
        *quantiles(INTER_TOKEN),
        unit="s",
        limits=INTER_TOKEN_LIMITS,
    ),
    graph("End to end", "From the arrival of a request to its end.", *quantiles(END_TO_END), unit="s"),
    graph(
        "Time in the queue",
        "From the arrival of a request until it has a slot.",
        *quantiles(QUEUE_TIME),
        unit="s",
        limits=((1, "yellow"), (5, "red")),
    ),
    graph(
        "From publish to send",
        "From a step's result on the host to the write of its message to a client: what the gateway adds.",
        *quantiles(PUBLISH_TO_SEND),
        unit="s",
        limits=SEND_LIMITS,
    ),
    graph(
        "Messages that came late",
        "Messages per second with the output of more than one step, because the gateway or a client was behind.",
        Query(total(rate(COALESCED)), "late"),
        unit="reqps",
    ),
)

_ROOM = row(
    "Room",
    graph(
        "Running and waiting",
        "Requests with a slot and without, and how many slots there are. Where slots are free and requests wait, "
        "KV memory is the bound.",
        Query(total(series(RUNNING)), "running"),
        Query(total(series(WAITING)), "waiting"),
        Query(total(series(SLOTS)), "slots"),
    ),
    graph(
        "KV memory in use",
        "Share of the KV pages that requests hold. The numbers of pages are shared: both pools fill alike.",
        Query(KV_SHARE, "{{service}} {{instance}}"),
        unit="percentunit",
        limits=NEARLY_FULL,
        most=1,
    ),
    graph(
        "KV memory in use, in bytes",
        "What the held pages take in each service's pool.",
        Query(total(KV_BYTES, "service"), "{{service}}"),
        unit="bytes",
        is_stacked=True,
    ),
    graph(
        "Preemptions",
        "Times per second that a running sequence gave its KV pages back for want of pages, to go on later. Each "
        "costs taking its tokens in again.",
        Query(total(rate(PREEMPTIONS)), "preempted"),
        unit="reqps",
        limits=((0.1, "yellow"),),
    ),
)

SERVICE = framed(
    "service",
    "What clients ask for and what they get: traffic, latencies, queue, KV memory, and how requests end.",
    _NOW,
    _TRAFFIC,
    _LATENCY,
    _ROOM,
)
"""The dashboard."""
