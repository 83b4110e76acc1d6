"""PromQL, written so that every query keeps to the dashboard's instances and interval."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.rpc.metrics import MetricKind, MetricSpec

INSTANCE = 'instance=~"$instance"'
INTERVAL = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel."""

    expr: str
    legend: str = ""
    """With `{{label}}` for labels."""
    is_instant: bool = False
    """Only the newest value."""


def series(metric: MetricSpec | str, **labels: str) -> str:
    """The series of a metric; a value may begin with its operator, `=~`, `!=` or `!~`."""
    name = metric if isinstance(metric, str) else metric.name
    given = [label + _operator_and_value(value) for label, value in labels.items()]
    return f"{name}{{{', '.join([INSTANCE, *given])}}}"


def _operator_and_value(value: str) -> str:
    operator = value[:2] if value[:2] in ("=~", "!=", "!~") else ""
    return f'{operator or "="}"{value.removeprefix(operator)}"'


def rate(metric: MetricSpec, *, part: str = "", **labels: str) -> str:
    """Growth per second; `part` is a histogram's `bucket`, `sum` or `count`."""
    assert (metric.kind is MetricKind.HISTOGRAM) == bool(part), f"{metric.name} is a {metric.kind.value}"
    return f"rate({series(f'{metric.name}_{part}' if part else metric.name, **labels)}[{INTERVAL}])"


def increase(metric: MetricSpec | str, *by: str, window: str = INTERVAL, **labels: str) -> str:
    """How much a counter grew, by these labels."""
    return total(f"increase({series(metric, **labels)}[{window}])", *by)


def total(expr: str, *by: str) -> str:
    """The sum, by these labels."""
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def over(part: str, whole: str, *, scale: str = "") -> str:
    """`part`, which may have labels, over `whole`, which has none."""
    return f"{scale}{' * ' if scale else ''}{part} / on () group_left () {whole}"


def quantile(metric: MetricSpec, q: float) -> str:
    """A quantile of a histogram, over all selected instances."""
    return f"histogram_quantile({q:g}, {total(rate(metric, part='bucket'), 'le')})"


def quantiles(metric: MetricSpec) -> list[Query]:
    """The usual three."""
    return [Query(quantile(metric, q), f"p{100 * q:g}") for q in (0.5, 0.9, 0.99)]
