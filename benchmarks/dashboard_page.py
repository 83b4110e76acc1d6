"""A dashboard as a page of its own: every panel where the dashboard's JSON puts it. This is not Grafana."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks.dashboard_charts import graph, heat_map, spark
from slipstream.benchmarks.dashboard_values import say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from slipstream.benchmarks.dashboard_values import PanelResult

NOT_GRAFANA = (
    "Drawn from this dashboard's own queries, answered by a real Prometheus. <b>Not Grafana</b>, which draws the same "
    "panels in its own way. Legends give means over the time shown."
)
COLUMNS, COLUMN, ROW, GAP = 24, 54, 40, 10
"""Grafana's grid, in pixels."""
MARGIN, HEAD, PADDING, TITLE, TEXT, LEGEND_ROW = 20, 84, 12, 24, 17, 20
WIDTH = 2 * MARGIN + COLUMNS * COLUMN - GAP

STYLE = f"""
* {{ box-sizing: border-box; margin: 0; }}
body {{ width: {WIDTH}px; background: #eef0f4; color: #1d2433; font: 13px Inter, "Liberation Sans", sans-serif;
  font-feature-settings: "tnum"; position: relative; }}
h1 {{ position: absolute; left: {MARGIN}px; top: 16px; font-size: 24px; font-weight: 700; letter-spacing: -0.01em; }}
.about {{ position: absolute; left: {MARGIN}px; top: 50px; color: #5b6475; font-size: 13px; }}
.run {{ position: absolute; right: {MARGIN}px; top: 20px; font-size: 15px; font-weight: 600; color: #3a4358; }}
h2 {{ position: absolute; font-size: 14px; font-weight: 600; color: #5b6475; padding: 14px 2px 0; }}
.panel {{ position: absolute; background: #fff; border: 1px solid #dde1e8; border-radius: 8px; padding: {PADDING}px;
  overflow: hidden; }}
.panel h3 {{ font-size: 14px; font-weight: 600; height: {TITLE - 4}px; white-space: nowrap; }}
.text {{ height: {TEXT}px; font-size: 11.5px; color: #7a8394; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }}
svg {{ display: block; }}
.axis {{ font-size: 11px; fill: #6b7485; }}
.inside {{ font-size: 17px; font-weight: 600; fill: #fff; white-space: pre; }}
.grid {{ stroke: #e6e9ee; stroke-width: 1; }}
.legend {{ display: grid; column-gap: 18px; font-size: 12px; margin-top: 4px; }}
.legend div {{ display: flex; height: {LEGEND_ROW}px; align-items: center; white-space: nowrap; overflow: hidden; }}
.legend i {{ flex: none; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }}
.legend span {{ overflow: hidden; text-overflow: ellipsis; }}
.legend b {{ padding-left: 8px; font-weight: 600; }}
.numbers {{ position: absolute; inset: 36px 0 0; display: flex; flex-direction: column; justify-content: center;
  padding: 0 14px 24px; }}
.numbers div {{ display: flex; align-items: baseline; justify-content: space-between; gap: 8px;
  white-space: nowrap; line-height: 1.35; }}
.numbers b {{ font-weight: 700; letter-spacing: -0.02em; }}
.numbers span {{ color: #6b7485; font-size: 12px; overflow: hidden; text-overflow: ellipsis; }}
.panel > .spark {{ position: absolute; left: 0; bottom: 0; }}
.bars {{ position: absolute; inset: 36px 14px 10px; display: flex; flex-direction: column;
  justify-content: space-evenly; }}
.bars div {{ display: grid; grid-template-columns: 136px 1fr 70px; align-items: center; gap: 12px;
  font-size: 16px; font-weight: 500; }}
.bars u {{ display: block; height: 20px; border-radius: 4px; background: #f0f2f5; overflow: hidden; }}
.bars u i {{ display: block; height: 100%; border-radius: 4px; }}
.bars b {{ text-align: right; font-weight: 700; }}
table {{ width: 100%; border-collapse: collapse; font-size: 12px; margin-top: 8px; }}
th, td {{ text-align: left; padding: 6px 8px 6px 0; border-bottom: 1px solid #e6e9ee; font-weight: 400; }}
th {{ color: #7a8394; }}
"""


def page(board: dict[str, Any], about: str, results: Sequence[PanelResult]) -> str:
    """The page's HTML; `about` says what ran. Its size is `size(results)`."""
    rows = [panel for panel in board["panels"] if panel["type"] == "row"]
    headings = [
        f'<h2 style="left:{MARGIN}px;top:{_top(row["gridPos"]["y"])}px">{escape(row["title"])}</h2>' for row in rows
    ]
    panels = "".join(map(_panel, results))
    title = escape(board["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<body style="height:{size(results)[1]}px"><h1>{title}</h1><p class="run">{escape(about)}</p>'
        f'<p class="about">{NOT_GRAFANA}</p>{"".join(headings)}{panels}</body></html>\n'
    )


def size(results: Sequence[PanelResult]) -> tuple[int, int]:
    """Width and height of the page, in pixels."""
    places = [result.panel.settings["gridPos"] for result in results]
    return WIDTH, _top(max(place["y"] + place["h"] for place in places)) + MARGIN - GAP


def _panel(result: PanelResult) -> str:
    place = result.panel.settings["gridPos"]
    width, height = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
    box = f"left:{MARGIN + place['x'] * COLUMN}px;top:{_top(place['y'])}px;width:{width}px;height:{height}px"
    inside = _DRAWERS[result.panel.kind](result, width - 2 * PADDING - 2, height - 2 * PADDING - TITLE - 2)
    return f'<div class="panel" style="{box}"><h3>{escape(result.panel.title)}</h3>{inside}</div>'


def _numbers(result: PanelResult, width: float, height: float) -> str:
    found = result.newest()
    if not found:
        return '<div class="numbers"><span>no value</span></div>'
    size = 42 if len(found) == 1 else 22 if len(found) < 4 else 16
    lines = [_number(result, name if len(found) > 1 else "", value, size) for name, value in found]
    curve = ""
    if len(found) == 1:
        points = next(points for _, points in result.named() if points)
        drawn = spark(points, result.color_of(found[0][1]), width + 2 * PADDING, round(height / 3))
        curve = f'<div class="spark">{drawn}</div>'
    return f'{curve}<div class="numbers">{"".join(lines)}</div>'


def _number(result: PanelResult, name: str, value: float, size: int) -> str:
    text = say(value, result.panel.unit)
    shown = f'<b style="font-size:{size}px;color:{result.color_of(value)}">{text}</b>'
    return f"<div>{shown}<span>{escape(name)}</span></div>"


def _bars(result: PanelResult, width: float, height: float) -> str:
    del width, height
    found = result.newest()
    given = result.panel.settings["fieldConfig"]["defaults"].get("max")
    most = given or max((value for _, value in found), default=0) or 1
    bars = [
        f'<div><span>{escape(name)}</span><u><i style="width:{100 * min(1, value / most):.1f}%;'
        f'background:{result.color_of(value)}"></i></u><b>{say(value, result.panel.unit)}</b></div>'
        for name, value in found
    ]
    return f'<div class="bars">{"".join(bars)}</div>'


def _graph(result: PanelResult, width: float, height: float) -> str:
    colors, means = result.colors(), result.means()
    longest = max(map(len, means), default=0)
    columns = max(1, int(width / (90 + 7.5 * longest)))
    columns = min(columns, 6)
    names = [
        f'<div><i style="background:{colors[name]}"></i><span>{escape(name)}</span>'
        f"<b>{say(mean, result.panel.unit)}</b></div>"
        for name, mean in means.items()
    ]
    room = height - TEXT - LEGEND_ROW * math.ceil(len(names) / columns) - 4
    legend = f'<div class="legend" style="grid-template-columns:repeat({columns},1fr)">{"".join(names)}</div>'
    return _text(result) + graph(result, width, room) + legend


def _heat_map(result: PanelResult, width: float, height: float) -> str:
    return _text(result) + heat_map(result, width, height - TEXT)


def _table(result: PanelResult, width: float, height: float) -> str:
    del width, height
    organize = result.panel.settings["transformations"][0]["options"]
    columns = sorted(organize["indexByName"], key=organize["indexByName"].get)
    labels = [series.labels for found in result.results for series in found]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    rows = [
        "".join(f"<td>{escape(one.get(column, '') or '–')}</td>" for column in columns)
        for one in sorted(labels, key=lambda one: str(one.get("service")))
    ]
    return _text(result) + f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _text(result: PanelResult) -> str:
    """The description's first sentence, or as much of it as there is room for."""
    return f'<p class="text">{escape(result.panel.settings["description"])}</p>'


def _top(row: int) -> int:
    return HEAD + row * ROW


_DRAWERS: Mapping[str, Callable[[PanelResult, float, float], str]] = {
    "stat": _numbers,
    "bargauge": _bars,
    "timeseries": _graph,
    "heatmap": _heat_map,
    "table": _table,
}
