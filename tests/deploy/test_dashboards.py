"""The committed dashboards: made by the code as it is, whole, and about metrics that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slipstream.benchmarks.dashboard_queries import (
    DASHBOARDS,
    FoundQuery,
    annotation_queries,
    boards,
    metric_of,
    panel_queries,
    panels_of,
    recording_rules,
    variable_queries,
)
from slipstream.common.metric_spec import MetricKind
from slipstream.deploy.grafana.build import texts
from slipstream.deploy.metrics_page import CATALOGUE

if TYPE_CHECKING:
    from slipstream.benchmarks.dashboard_queries import FoundPanel

SPECS = {spec.name: spec for section in CATALOGUE for spec in section.metrics}
UNITS = {"none", "percentunit", "µs", "ms", "s", "bytes", "reqps", "cps"}
ONLY_FOR_SCRIPTS: set[str] = set()
"""Metrics that no dashboard shows; say why beside each."""

PANELS = [
    pytest.param(panel, id=f"{name}-{panel.title}") for name, board in boards().items() for panel in panels_of(board)
]
BOARDS = [pytest.param(board, id=name) for name, board in boards().items()]


def test_they_are_those_that_the_code_makes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS.glob("*.json")}
    assert committed == texts(), "run python -m slipstream.deploy.grafana.build"


def test_every_metric_is_on_a_dashboard_or_excused() -> None:
    shown = {metric_of(name) for query in (*panel_queries(), *recording_rules()) for name in query.metrics}
    missing = SPECS.keys() - shown
    assert missing == ONLY_FOR_SCRIPTS


@pytest.mark.parametrize(
    "query", [*panel_queries(), *annotation_queries(), *variable_queries()], ids=lambda query: str(query.place)
)
def test_queries_ask_for_what_there_is(query: FoundQuery) -> None:
    assert query.metrics or query.expr.startswith(("up{", "sum(ALERTS{")), query.expr
    for name in query.metrics:
        if not name.startswith("slipstream_"):
            continue
        metric = metric_of(name)
        assert metric in SPECS, name
        assert (metric != name) == (SPECS[metric].kind is MetricKind.HISTOGRAM), name


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_is(panel: FoundPanel) -> None:
    assert panel.unit in UNITS
    assert len(panel.settings["description"]) > 20
    assert panel.settings["description"].endswith(".")
    assert panel.queries
    steps = panel.settings["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[0]["value"] is None
    values = [step["value"] for step in steps[1:]]
    assert values == sorted(values)
    assert all(query.expr for query in panel.queries)
    assert panel.settings["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("board", BOARDS)
def test_panels_do_not_overlap_and_fill_the_width(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    width_of_rows = {y: sum(1 for x, other in taken if other == y) for _, y in taken}
    assert set(width_of_rows.values()) == {24}


@pytest.mark.parametrize("board", BOARDS)
def test_a_dashboard_has_its_frame(board: dict[str, Any]) -> None:
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "model", "instance"]
    assert [annotation["name"] for annotation in board["annotations"]["list"]] == ["Restarts", "New epochs"]
    assert board["uid"].startswith("slipstream-")
    for query in (query for panel in panels_of(board) for query in panel.queries):
        assert query.expr.count("$instance") or "ALERTS" in query.expr, query.expr
