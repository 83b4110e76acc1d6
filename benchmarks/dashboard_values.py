"""What a dashboard's panels show: the results of their queries under the names, units and colours that they ask for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.benchmarks.dashboard_queries import FoundPanel, FoundQuery
    from slipstream.benchmarks.prometheus_server import Series

COLORS = {
    "green": "#2f9e5b",
    "yellow": "#d69a00",
    "orange": "#e8743b",
    "red": "#d93a49",
    "blue": "#3b74d1",
    "text": "#1d2433",
}
"""For Grafana's names of colours."""
PALETTE = ("#4c86e8", "#e39a2d", "#3fa66b", "#a56fd6", "#2fa6b5", "#d9618c", "#8a7a66", "#7d8899")
"""For series that have no colour of their own."""


@dataclass(frozen=True, slots=True)
class PanelResult:
    """A panel, and what Prometheus answered to each of its queries for the time from `start` to `end`."""

    panel: FoundPanel
    results: tuple[tuple[Series, ...], ...]
    start: float
    end: float

    def named(self) -> list[tuple[str, dict[float, float]]]:
        """The finite points of all series, value by time, under the names that a legend shows."""
        return [
            (legend(query, series), {time: value for time, value in series.points if math.isfinite(value)})
            for query, found in zip(self.panel.queries, self.results, strict=True)
            for series in found
        ]

    def newest(self) -> list[tuple[str, float]]:
        """The newest value of each series that has one."""
        return [(name, points[max(points)]) for name, points in self.named() if points]

    def means(self) -> dict[str, float]:
        """The mean of each series that has a value."""
        return {name: sum(points.values()) / len(points) for name, points in self.named() if points}

    @property
    def limits(self) -> list[tuple[float, str]]:
        """From which value on which colour; the first from minus infinity on."""
        steps = self.panel.settings["fieldConfig"]["defaults"]["thresholds"]["steps"]
        return [(-math.inf if step["value"] is None else step["value"], COLORS[step["color"]]) for step in steps]

    def color_of(self, value: float) -> str:
        """That of the highest limit that the value reaches."""
        return [color for limit, color in self.limits if value >= limit][-1]

    def colors(self) -> dict[str, str]:
        """Of each series: its own, or one of the palette."""
        fixed = {name: found["color"]["fixedColor"] for name, found in self._overrides().items() if "color" in found}
        names = dict.fromkeys(name for name, _ in self.named())
        spare = iter(PALETTE * (1 + len(names) // len(PALETTE)))
        return {name: COLORS.get(fixed[name], fixed[name]) if name in fixed else next(spare) for name in names}

    @property
    def is_stacked(self) -> bool:
        """Whether series lie on each other, but for `lines`."""
        stacking: str = self.panel.settings["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"]
        return stacking == "normal"

    @property
    def lines(self) -> set[str]:
        """Series that lie over a stack, and not in it."""
        return {name for name, found in self._overrides().items() if "custom.stacking" in found}

    def _overrides(self) -> Mapping[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for override in self.panel.settings["fieldConfig"]["overrides"]:
            properties = {entry["id"]: entry["value"] for entry in override["properties"]}
            found.setdefault(override["matcher"]["options"], {}).update(properties)
        return found


def legend(query: FoundQuery, series: Series) -> str:
    """The name of a series: the query's legend with its labels filled in."""
    if query.legend == "__auto":
        return ", ".join(value for name, value in series.labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), query.legend).strip()


def say(value: float, unit: str) -> str:
    """A value with its unit, as people read it."""
    if unit == "percentunit":
        percent = f"{100 * value:.1f}" if abs(value) >= 0.01 else f"{100 * value:.2g}"
        return percent.removesuffix(".0") + " %"
    if unit == "s":
        factor, name = next(((f, n) for f, n in ((1, "s"), (1e3, "ms")) if abs(value) * f >= 1), (1e6, "µs"))
        return f"{_digits(value * factor)} {name}" if value else "0 s"
    if unit == "bytes":
        factor, name = byte_unit(value)
        return f"{_digits(value / factor)} {name}" if value else "0"
    suffix = {"none": "", "reqps": " req/s", "cps": " /s"}.get(unit, f" {unit}")
    return _digits(value) + suffix


def byte_unit(value: float) -> tuple[int, str]:
    """What this many bytes are counted in."""
    return next(((f, n) for f, n in ((2**30, "GiB"), (2**20, "MiB")) if value >= f), (2**10, "KiB"))


def _digits(value: float) -> str:
    """Three that count."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
