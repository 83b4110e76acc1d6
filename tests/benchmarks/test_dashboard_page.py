"""Dashboards as pages: every panel at its place, whatever its queries found, and the committed pictures of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks.dashboard_charts import ticks_of
from slipstream.benchmarks.dashboard_page import COLUMN, MARGIN, page, size
from slipstream.benchmarks.dashboard_pictures import PICTURES, RESULTS
from slipstream.benchmarks.dashboard_queries import boards, panels_of
from slipstream.benchmarks.dashboard_values import COLORS, PanelResult, say
from slipstream.benchmarks.headless_chromium import NoPictureError, find_chromium, page_size, take_picture
from slipstream.benchmarks.prometheus_server import Series

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.benchmarks.dashboard_queries import FoundPanel

START, END = 1000.0, 1030.0
MAX_PICTURE_BYTES = 300_000
BOARDS = boards()
PICTURED = {
    "overlap-run-ahead-0": "slipstream-overlap.json",
    "overlap-run-ahead-1": "slipstream-overlap.json",
    **{name: f"slipstream-{name}.json" for name in ("speculation", "service", "health")},
}


def series(value: float, **labels: str) -> Series:
    """A constant, with a hole in the middle."""
    points = ((START, value), (START + 10, math.nan), (END, value))
    return Series({"instance": "a<b", **labels}, points)


def found(panel: FoundPanel, value: float = 0.5) -> PanelResult:
    """What queries may find: buckets for a heat map, else two series each."""
    if panel.kind == "heatmap":
        rows = (*(series(bound, le=str(bound)) for bound in (0.001, 0.01)), series(0.02, le="+Inf"))
        return PanelResult(panel, (rows,), START, END)
    rows = (series(value, service="draft"), series(2 * value, service="verify"))
    return PanelResult(panel, tuple(rows for _ in panel.queries), START, END)


def named(title: str) -> FoundPanel:
    """A panel of the Overlap dashboard."""
    return next(panel for panel in panels_of(BOARDS["slipstream-overlap.json"]) if panel.title == title)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_is_where_the_dashboard_has_it(name: str) -> None:
    results = [found(panel) for panel in panels_of(BOARDS[name])]
    html = page(BOARDS[name], "what ran", results)
    assert "<b>Not Grafana</b>" in html
    assert "what ran" in html
    assert html.count('<div class="panel"') == len(results)
    for result in results:
        place = result.panel.settings["gridPos"]
        box = rf"left:{MARGIN + place['x'] * COLUMN}px;top:\d+px;width:\d+px;height:\d+px"
        assert re.search(rf'{box}"><h3>{re.escape(result.panel.title.replace("<", "&lt;"))}</h3>', html)
    assert "a<b" not in html
    assert "nan" not in html


@pytest.mark.parametrize("name", BOARDS)
def test_a_query_that_found_nothing_leaves_the_rest(name: str) -> None:
    results = [replace(found(panel), results=((),) * len(panel.queries)) for panel in panels_of(BOARDS[name])]
    assert page(BOARDS[name], "", results).count("<h3>") == len(results)


def test_a_number_has_its_unit_and_the_color_of_its_limit() -> None:
    board = BOARDS["slipstream-overlap.json"]
    panel = named("Share of a step that is lost")
    for value, color in ((0.01, "green"), (0.05, "yellow"), (0.25, "red")):
        html = page(board, "", [replace(found(panel), results=((series(value),),))])
        assert f'color:{COLORS[color]}">{100 * value:g} %</b>' in html


def test_parts_are_stacked_and_the_whole_lies_over_them() -> None:
    panel = named("Where the time of a decode step goes")
    result = replace(found(panel), results=tuple((series(1000),) for _ in panel.queries))
    assert result.is_stacked
    assert result.lines == {"step"}
    html = page(BOARDS["slipstream-overlap.json"], "", [result])
    assert html.count('Z" fill=') == 5, "draft, verify and three edges"
    assert f'fill="none" stroke="{COLORS["text"]}"' in html
    assert "verify  " in html


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.306, "percentunit", "30.6 %"),
        (0.02, "percentunit", "2 %"),
        (0.00125, "percentunit", "0.12 %"),
        (0.0184, "s", "18.4 ms"),
        (12e-6, "s", "12 µs"),
        (0, "s", "0 s"),
        (2886.4, "µs", "2,886 µs"),
        (1.4 * 2**20, "bytes", "1.4 MiB"),
        (23.04, "reqps", "23 req/s"),
        (4, "none", "4"),
    ],
)
def test_values_are_said_as_people_read_them(value: float, unit: str, text: str) -> None:
    assert say(value, unit) == text


@pytest.mark.parametrize(("least", "most", "unit"), [(0, 8645, "µs"), (0.617, 0.647, "percentunit"), (0, 3e9, "bytes")])
def test_axes_have_round_values_around_what_is_drawn(least: float, most: float, unit: str) -> None:
    ticks = ticks_of(least, most, unit)
    assert ticks[0] <= least < ticks[1]
    assert ticks[-2] < most <= ticks[-1]
    assert 3 <= len(ticks) <= 8


def test_chromium_draws_a_page_whole(tmp_path: Path) -> None:
    try:
        find_chromium()
    except NoPictureError:
        pytest.skip("chromium is not installed (Debian: chromium)")
    results = [found(panel) for panel in panels_of(BOARDS["slipstream-service.json"])]
    html, png = tmp_path / "service.html", tmp_path / "service.png"
    html.write_text(page(BOARDS["slipstream-service.json"], "", results), encoding="utf-8")
    take_picture(html, size(results), png)
    assert page_size(png) == size(results)


def test_without_chromium_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(NoPictureError, match="chromium"):
        find_chromium()


@pytest.mark.parametrize("name", PICTURED)
def test_committed_pictures_show_the_dashboards_as_they_are(name: str) -> None:
    panels = panels_of(BOARDS[PICTURED[name]])
    png = PICTURES / f"{name}.png"
    assert page_size(png) == size([found(panel) for panel in panels]), "run benchmarks/dashboard_pictures.py"
    assert png.stat().st_size < MAX_PICTURE_BYTES
    values = json.loads(RESULTS.read_text(encoding="utf-8"))["dashboards"][name]
    assert values.keys() == {panel.title for panel in panels if panel.kind not in ("table", "heatmap")}
