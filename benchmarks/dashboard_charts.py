"""Charts of a dashboard's panels as inline SVG: lines and stacks over time, heat maps, small curves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from slipstream.benchmarks.dashboard_values import byte_unit, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from slipstream.benchmarks.dashboard_values import PanelResult

Edges: TypeAlias = "Sequence[tuple[str, Mapping[float, float]]]"
"""The upper edges of a stack's parts, from the lowest on, by name."""

AXIS_WIDTH, AXIS_HEIGHT, TOP, RIGHT = 66, 20, 8, 8
"""Pixels around a chart: values at its left, times below it."""
LABELLED_HEIGHT = 20
"""A part of a stack that is so many pixels high is named in the picture."""
HEAT = ("#fff3e6", "#fdd9b0", "#fdb56f", "#f48a3c", "#d95a18", "#9a3506")


@dataclass(frozen=True, slots=True)
class Frame:
    """Where values lie in a chart of `width` times `height` pixels."""

    width: float
    height: float
    start: float
    end: float
    least: float
    most: float

    def x(self, time: float) -> float:
        """Pixels from the left."""
        share = (time - self.start) / max(self.end - self.start, 1e-9)
        return round(AXIS_WIDTH + share * (self.width - AXIS_WIDTH - RIGHT), 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (value - self.least) / (self.most - self.least)
        return round(self.height - AXIS_HEIGHT - share * (self.height - AXIS_HEIGHT - TOP), 1)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Pairs of time and value as an SVG path's."""
        return "L".join(f"{self.x(time)} {self.y(value)}" for time, value in points)


def graph(result: PanelResult, width: float, height: float) -> str:
    """Values over time, as lines or stacked."""
    named = {name: points for name, points in result.named() if points}
    stack = {name: points for name, points in named.items() if result.is_stacked and name not in result.lines}
    heights = _stacked(stack)
    values = [value for points in named.values() for value in points.values()]
    values += [value for _, points in heights for value in points.values()]
    least, most, ticks = _range(result, values)
    frame = Frame(width, height, result.start, result.end, least, most)
    colors = result.colors()
    parts = [_axes(frame, ticks, result.panel.unit)]
    parts += _areas(frame, heights, colors)
    for name, points in named.items():
        if name not in stack:
            path = f'<path d="M{frame.path(sorted(points.items()))}" fill="none" stroke="{colors[name]}"'
            parts.append(f'{path} stroke-width="{2.4 if result.lines else 1.8}"/>')
    parts += [_limit(frame, limit, color) for limit, color in result.limits[1:] if least < limit <= most]
    parts += _names(frame, heights, stack, result.panel.unit)
    return _svg(width, height, parts)


def heat_map(result: PanelResult, width: float, height: float) -> str:
    """How many values fell between one bound and the next, over time: the darker, the more."""
    bounds, counts, times = _buckets(result)
    if not bounds:
        return _svg(width, height, [])
    frame = Frame(width, height, times[0], times[-1] + _spacing(times), 0, len(bounds))
    most = max((count for row in counts for count in row), default=0) or 1
    parts = [_time_axis(frame)]
    for number, (bound, row) in enumerate(zip(bounds, counts, strict=True)):
        top, bottom = frame.y(number + 1), frame.y(number)
        for time, count in zip(times, row, strict=True):
            left = frame.x(time)
            size = f'width="{frame.x(time + _spacing(times)) - left - 1:.1f}" height="{bottom - top - 1:.1f}"'
            parts.append(f'<rect x="{left}" y="{top}" {size} rx="1.5" fill="{_heat(count / most)}"/>')
        label = f"≤ {say(bound, result.panel.unit)}" if math.isfinite(bound) else "more"
        parts.append(_text(AXIS_WIDTH - 8, (top + bottom) / 2 + 4, label, "end"))
    return _svg(width, height, parts)


def spark(points: Mapping[float, float], color: str, width: float, height: float) -> str:
    """A value's course, without axes."""
    if len(points) < 2 or len(set(points.values())) < 2:
        return ""
    start, end, least, most = min(points), max(points), min(points.values()), max(points.values())
    # A value that hardly changes looks like one.
    room = max(most - least, 0.1 * abs(most))
    places = [
        ((time - start) / (end - start) * width, height - 2 - (value - least) / room * (height - 6))
        for time, value in sorted(points.items())
    ]
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    area = f'<path d="M0 {height}L{line}L{width} {height}Z" fill="{color}" opacity="0.12"/>'
    return _svg(width, height, [area, f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="1.4"/>'])


def ticks_of(least: float, most: float, unit: str, *, about: int = 5) -> list[float]:
    """Round values from one to the other, about so many."""
    scale = byte_unit(most)[0] if unit == "bytes" else 1
    rough = max(most - least, 1e-12) / scale / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = scale * next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range(result: PanelResult, values: Sequence[float]) -> tuple[float, float, list[float]]:
    """The lowest value, the highest, and what stands at the axis."""
    defaults = result.panel.settings["fieldConfig"]["defaults"]
    given = defaults.get("min")
    least = min(values, default=0.0) if given is None else given
    most = max(values, default=1.0)
    if most - least < 1e-9:
        # A limit says what would be much; without one, a flat line has room above it.
        limits = [limit for limit, _ in result.limits[1:] if limit > least]
        most = limits[0] if limits else least + max(abs(least), 1.0)
    ticks = ticks_of(least, most, result.panel.unit)
    return ticks[0], ticks[-1], ticks


def _stacked(stack: Mapping[str, Mapping[float, float]]) -> Edges:
    """The upper edge of each series on top of those before it."""
    times = sorted({time for points in stack.values() for time in points})
    below = dict.fromkeys(times, 0.0)
    edges: list[tuple[str, Mapping[float, float]]] = []
    for name, points in stack.items():
        below = {time: below[time] + points.get(time, 0.0) for time in times}
        edges.append((name, below))
    return edges


def _areas(frame: Frame, edges: Edges, colors: Mapping[str, str]) -> list[str]:
    parts = []
    for name, lower, upper in _bands(edges):
        outline = frame.path([*upper.items(), *reversed(list(lower.items()))])
        parts.append(f'<path d="M{outline}Z" fill="{colors[name]}" opacity="0.88"/>')
    return parts


def _names(frame: Frame, edges: Edges, stack: Mapping[str, Mapping[float, float]], unit: str) -> list[str]:
    """The names of the parts of a stack, with their means, where there is room."""
    parts = []
    for name, lower, upper in _bands(edges):
        middle = list(upper)[len(upper) // 2]
        top, bottom = frame.y(upper[middle]), frame.y(lower[middle])
        if bottom - top >= LABELLED_HEIGHT:
            label = f"{name}  {say(sum(stack[name].values()) / len(stack[name]), unit)}"
            parts.append(_text(frame.x(middle), (top + bottom) / 2 + 6, label, "middle", "inside"))
    return parts


def _bands(edges: Edges) -> Iterator[tuple[str, Mapping[float, float], Mapping[float, float]]]:
    """Each name with its lower and its upper edge."""
    lower: Mapping[float, float] = dict.fromkeys(edges[0][1], 0.0) if edges else {}
    for name, upper in edges:
        yield name, lower, upper
        lower = upper


def _axes(frame: Frame, ticks: Sequence[float], unit: str) -> str:
    lines = []
    for tick in ticks:
        y = frame.y(tick)
        line = f'<line x1="{AXIS_WIDTH}" x2="{frame.width - RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
        lines.append(line + _text(AXIS_WIDTH - 8, y + 4, say(tick, unit), "end"))
    return "".join(lines) + _time_axis(frame)


def _time_axis(frame: Frame) -> str:
    seconds = ticks_of(0, frame.end - frame.start, "s")
    inside = [second for second in seconds if frame.start + second <= frame.end + 1e-6]
    labels = []
    for second in inside:
        x = frame.x(frame.start + second)
        anchor = "start" if not second else "end" if x > frame.width - RIGHT - 20 else "middle"
        labels.append(_text(x, frame.height - 4, f"{second:g} s", anchor))
    return "".join(labels)


def _limit(frame: Frame, limit: float, color: str) -> str:
    y = frame.y(limit)
    place = f'x1="{AXIS_WIDTH}" x2="{frame.width - RIGHT}" y1="{y}" y2="{y}"'
    halo = f'<line {place} stroke="#fff" stroke-width="3.2" opacity="0.7"/>'
    return f'{halo}<line {place} stroke="{color}" stroke-width="1.4" stroke-dasharray="6 4"/>'


def _buckets(result: PanelResult) -> tuple[list[float], list[list[float]], list[float]]:
    """Upper bounds, how many values lie below each and above the one before at each time, and the times."""
    found = sorted((float(name), points) for name, points in result.named())
    times = sorted({time for _, points in found for time in points})
    below = dict.fromkeys(times, 0.0)
    rows = []
    for _, points in found:
        rows.append([max(0.0, points.get(time, 0.0) - below[time]) for time in times])
        below = {time: points.get(time, 0.0) for time in times}
    used = [number for number, row in enumerate(rows) if any(row)]
    if not used:
        return [], [], times
    first, last = max(0, used[0] - 1), min(len(rows), used[-1] + 2)
    return [bound for bound, _ in found[first:last]], rows[first:last], times


def _spacing(times: Sequence[float]) -> float:
    return min((later - earlier for earlier, later in pairwise(times)), default=1.0)


def _heat(share: float) -> str:
    return "#f7f8fa" if share <= 0 else HEAT[min(len(HEAT) - 1, int(math.sqrt(share) * len(HEAT)))]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "axis") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    return f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">{"".join(parts)}</svg>'
