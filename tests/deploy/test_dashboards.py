"""The committed dashboards: made by the code as it is, whole, and about metrics that there are."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.common.rpc.metrics import MetricKind
from slipstream.deploy.grafana.build import texts
from slipstream.deploy.metrics_page import CATALOGUE
from slipstream.gateway.metrics import COMPAT_SPECS
from tests.deploy.dashboard_queries import (
    DASHBOARDS,
    FoundPanel,
    FoundQuery,
    annotation_queries,
    boards,
    metric_of,
    panel_queries,
    panels_of,
    recording_rules,
    variable_queries,
)

SPECS = {spec.name: spec for section in CATALOGUE for spec in section.metrics}
UNITS = {"none", "percentunit", "µs", "ms", "s", "bytes", "reqps", "cps"}
ONLY_FOR_SCRIPTS: set[str] = set()
"""Metrics that no dashboard shows; say why beside each."""

PANELS = [
    pytest.param(panel, id=f"{name}-{panel.title}") for name, board in boards().items() for panel in panels_of(board)
]
SHOWS = {
    "overlap": {
        *("slipstream_overlap_efficiency", "slipstream_step_seconds", "slipstream_bubble_seconds_total"),
        *("slipstream_busy_seconds_total", "slipstream_host_stall_seconds_total", "slipstream_build_info"),
    },
    "speculation": {
        *("slipstream_drafts_total", "slipstream_draft_tokens_total", "slipstream_accepted_tokens_total"),
        *("slipstream_accepted_tokens_per_position_total", "slipstream_num_draft_tokens"),
        *("slipstream_decode_steps_total", "slipstream_draft_rests_total"),
    },
    "service": {
        *("slipstream_generation_tokens_total", "slipstream_prompt_tokens_total", "slipstream_requests_total"),
        *("slipstream_time_to_first_token_seconds", "slipstream_inter_token_latency_seconds"),
        *("slipstream_e2e_request_latency_seconds", "slipstream_request_queue_time_seconds", "slipstream_rpcs_total"),
        *("slipstream_num_requests_running", "slipstream_num_requests_waiting", "slipstream_kv_pages_used"),
        *("slipstream_publish_to_send_seconds", "slipstream_coalesced_messages_total"),
    },
    "health": {
        *("slipstream_worker_up", "slipstream_worker_heartbeat_age_seconds", "slipstream_build_info"),
        *("slipstream_epoch", "process_start_time_seconds", "process_resident_memory_bytes"),
        *("slipstream_draft_losses_total", "slipstream_draft_swaps_total", "slipstream_draft_missing_seconds_total"),
    },
}
"""The metrics that each dashboard must show."""
BOARDS = [pytest.param(board, id=name) for name, board in boards().items()]


def test_they_are_those_that_the_code_makes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS.glob("*.json")}
    assert committed == texts(), "run python -m slipstream.deploy.grafana.build"


def test_every_metric_is_on_a_dashboard_or_excused() -> None:
    shown = {metric_of(name) for query in (*panel_queries(), *recording_rules()) for name in query.metrics}
    missing = SPECS.keys() - shown
    assert missing == ONLY_FOR_SCRIPTS | {spec.name for spec in COMPAT_SPECS}


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
    assert all("process_start_time_seconds" in one["expr"] for one in board["annotations"]["list"][:1])
    assert all(one["enable"] and one["datasource"]["uid"] == "${datasource}" for one in board["annotations"]["list"])
    _, model, instance = board["templating"]["list"]
    assert "$model" in instance["query"], "the instances that are offered are those of the model"
    assert all(one["multi"] and one["includeAll"] and one["current"]["value"] == "$__all" for one in (model, instance))


@pytest.mark.parametrize("name", SHOWS)
def test_a_dashboard_shows_what_it_is_for(name: str) -> None:
    panels = panels_of(boards()[f"slipstream-{name}.json"])
    shown = {metric_of(metric) for panel in panels for query in panel.queries for metric in query.metrics}
    assert SHOWS[name] - shown == set()


def overlap_panel(title: str) -> FoundPanel:
    """One of the panels that answer what is lost."""
    return next(panel for panel in panels_of(boards()["slipstream-overlap.json"]) if panel.title == title)


def test_where_a_step_s_time_goes_is_a_stack_in_microseconds_under_the_step_itself() -> None:
    panel = overlap_panel("Where the time of a decode step goes")
    assert (panel.kind, panel.unit) == ("timeseries", "µs")
    assert panel.settings["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    names = [query.legend for query in panel.queries]
    assert names[:2] == ["draft", "verify"]
    assert {"lost: verify → draft", "lost: draft → verify"} < set(names)
    assert names[-1] == "step"
    apart = {
        override["matcher"]["options"]
        for override in panel.settings["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "custom.stacking" and entry["value"]["mode"] == "none"
    }
    assert apart == {"step"}


def test_the_first_row_says_what_is_lost_and_where() -> None:
    share, edges = (overlap_panel(title) for title in ("Share of a step that is lost", "Lost at which edge"))
    assert share.unit == edges.unit == "percentunit"
    assert share.settings["gridPos"]["y"] == edges.settings["gridPos"]["y"] == 1
    assert [query.legend for query in edges.queries] == ["verify → draft", "draft → verify", "verify → verify"]
    for panel in (share, edges):
        steps = panel.settings["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert [step["color"] for step in steps] == ["green", "yellow", "red"]


def test_step_time_is_a_heat_map_of_the_histogram_s_buckets() -> None:
    panel = overlap_panel("Step time")
    assert (panel.kind, panel.unit) == ("heatmap", "s")
    (target,) = panel.settings["targets"]
    assert target["format"] == "heatmap"
    assert "sum by (le)" in target["expr"]
    assert "slipstream_step_seconds_bucket" in target["expr"]


def test_colors_are_for_either_theme() -> None:
    colors = {
        entry["value"]["fixedColor"]
        for board in boards().values()
        for panel in panels_of(board)
        for override in panel.settings["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "color"
    }
    assert not {"#FFFFFF", "white", "#000000", "black"} & colors
