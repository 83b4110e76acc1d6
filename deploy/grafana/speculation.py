"""The Speculation dashboard: what drafting brings, and what it costs."""

from __future__ import annotations

from slipstream.deploy.grafana.frame import framed, row
from slipstream.deploy.grafana.overlap import DECODE
from slipstream.deploy.grafana.panels import bars, graph, numbers
from slipstream.deploy.grafana.queries import Query, over, rate, series, total
from slipstream.gateway.metrics import GENERATION_TOKENS
from slipstream.scheduler.metrics import (
    ACCEPTED_PER_POSITION,
    ACCEPTED_TOKENS,
    BUSY_SECONDS,
    DECODE_STEPS,
    DRAFT_TOKENS,
    DRAFTS,
    NUM_DRAFT_TOKENS,
    RESTS,
    STEP_SECONDS,
)

DECODE_WALL = total(rate(STEP_SECONDS, part="sum", phase=DECODE))
DECODE_RATE = total(rate(STEP_SECONDS, part="count", phase=DECODE))
BY_POSITION = over(total(rate(ACCEPTED_PER_POSITION), "position"), total(rate(DRAFTS)))
LENGTH_LIMITS = ((1.5, "yellow"), (2.0, "green"))
GAIN_LIMITS = ((1.0, "yellow"), (1.3, "green"))
GAIN = (
    f"(1 + {total(rate(ACCEPTED_TOKENS))} / {total(rate(DRAFTS))}) * "
    f"{total(rate(BUSY_SECONDS, service='verify', phase=DECODE))} / {DECODE_WALL}"
)
GAIN_HELP = (
    "Estimate: tokens a request gets per unit of time, over what it would get without a draft if a plain step took as "
    "long as verify works now. A plain step is a little shorter, so this is an upper bound; below 1, drafting costs "
    "more than it brings."
)


def _accept_length(*by: str) -> str:
    # Without algorithms that do not draft now.
    return f"1 + {total(rate(ACCEPTED_TOKENS), *by)} / ({total(rate(DRAFTS), *by)} > 0)"


_NOW = row(
    "Now",
    numbers(
        "Mean accept length",
        "Tokens that a verify step brings a request: 1 and the accepted ones. 1 means that no draft was accepted.",
        Query(_accept_length("algorithm"), "{{algorithm}}"),
        limits=LENGTH_LIMITS,
        base="red",
        decimals=2,
        span=5,
        height=6,
    ),
    numbers(
        "Gain over plain decoding",
        GAIN_HELP,
        Query(GAIN, "gain"),
        limits=GAIN_LIMITS,
        base="red",
        decimals=2,
        span=5,
        height=6,
    ),
    bars(
        "Accepted, by position",
        "Share of all drafts whose token at this position was accepted. It falls from position to position; where "
        "it is near zero, fewer draft tokens would do.",
        Query(BY_POSITION, "position {{position}}"),
        unit="percentunit",
        limits=((0.2, "yellow"), (0.5, "green")),
        base="red",
        most=1,
        span=9,
        height=6,
    ),
    numbers(
        "Draft tokens per step (K)",
        "The most of a step; 0 where nothing drafts, or the draft rests.",
        Query(series(NUM_DRAFT_TOKENS), "{{instance}}"),
        base="blue",
        span=5,
        height=6,
    ),
)

_OVER_TIME = row(
    "Over time",
    graph(
        "Mean accept length, by algorithm",
        "Tokens that a verify step brings a request. A fall that no new kind of prompt explains is a draft that "
        "no longer fits its target.",
        Query(_accept_length("algorithm"), "{{algorithm}}"),
        limits=LENGTH_LIMITS,
        base="red",
        least=1,
    ),
    graph(
        "Accepted share, by position",
        "Share of all drafts whose token at this position was accepted.",
        Query(BY_POSITION, "position {{position}}"),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Draft tokens",
        "Tokens per second that were proposed, accepted and dropped.",
        Query(total(rate(DRAFT_TOKENS)), "proposed"),
        Query(total(rate(ACCEPTED_TOKENS)), "accepted"),
        Query(f"{total(rate(DRAFT_TOKENS))} - {total(rate(ACCEPTED_TOKENS))}", "dropped"),
        unit="cps",
    ),
    graph("Gain over plain decoding", GAIN_HELP, Query(GAIN, "gain"), limits=GAIN_LIMITS, base="red"),
    graph(
        "Share of a decode step, by service",
        "What drafting costs: the part of a decode step in which draft works, beside verify's.",
        Query(over(total(rate(BUSY_SECONDS, phase=DECODE), "service"), DECODE_WALL), "{{service}}"),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Tokens per step, all requests together",
        "Tokens that clients get per decode step: accept length times the requests in a step.",
        Query(over(total(rate(GENERATION_TOKENS)), DECODE_RATE), "tokens"),
    ),
    graph(
        "Decode steps, by mode",
        "Share of the decode steps that are drafted, plain because many prompts wait or no draft token pays "
        "(drafted_none), plain because the draft rests (or comes back from it), or plain without a draft. The "
        "draft rests while plain steps are faster.",
        Query(over(total(rate(DECODE_STEPS), "mode"), total(rate(DECODE_STEPS))), "{{mode}}"),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Rests of the draft",
        "Rests per second: as plain steps were faster, or as a trial of them, which costs less than 1 % of the time.",
        Query(total(rate(RESTS), "cause"), "{{cause}}"),
        unit="cps",
    ),
)

SPECULATION = framed(
    "speculation",
    "How many tokens a step brings, which positions are accepted, and whether drafting pays for itself.",
    _NOW,
    _OVER_TIME,
)
"""The dashboard."""
