"""Pictures of the dashboards: every panel is drawn, whatever its queries found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.deploy.dashboard_pictures import PICTURES, RESULTS, PanelResult, draw, say
from tests.deploy.dashboard_queries import FoundPanel, boards, panels_of
from tests.deploy.observed_stack import Series

BOARDS = boards()
PICTURED = {
    "overlap-run-ahead-0": "slipstream-overlap.json",
    "overlap-run-ahead-1": "slipstream-overlap.json",
    **{name: f"slipstream-{name}.json" for name in ("speculation", "service", "health")},
}


def found(panel: FoundPanel) -> PanelResult:
    """A panel's result: buckets for a heat map, else two series for each query, with a hole in the middle."""

    def series(value: float, **labels: str) -> Series:
        return Series({"instance": "a<b", **labels}, ((1000.0, value), (1010.0, math.nan), (1030.0, value)))

    if panel.kind == "heatmap":
        return PanelResult(panel, ((series(1, le="0.001"), series(3, le="0.01"), series(4, le="+Inf")),))
    rows = (series(0.5, service="draft"), series(1.0, service="verify"))
    return PanelResult(panel, tuple(rows for _ in panel.queries))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("is_empty", [False, True])
def test_every_panel_is_drawn(name: str, is_empty: bool, tmp_path: Path) -> None:
    results = [found(panel) for panel in panels_of(BOARDS[name])]
    if is_empty:
        results = [PanelResult(result.panel, ((),) * len(result.panel.queries)) for result in results]
    draw("a board", "what ran", results, tmp_path / "board.png")
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")


def test_a_number_has_the_colour_of_its_threshold() -> None:
    panels = panels_of(BOARDS["slipstream-overlap.json"])
    lost = found(next(panel for panel in panels if panel.title == "Share of a step that is lost"))
    assert len({lost.colour_of(value) for value in (0.01, 0.05, 0.25)}) == 3


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.306, "percentunit", "30.6 %"),
        (0.02, "percentunit", "2 %"),
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


@pytest.mark.parametrize("name", PICTURED)
def test_committed_pictures_have_the_panels_of_their_dashboards(name: str) -> None:
    assert (PICTURES / f"{name}.png").stat().st_size < 400_000
    values = json.loads(RESULTS.read_text(encoding="utf-8"))["dashboards"][name]
    panels = panels_of(BOARDS[PICTURED[name]])
    assert values.keys() == {panel.title for panel in panels if panel.kind not in ("table", "heatmap")}
