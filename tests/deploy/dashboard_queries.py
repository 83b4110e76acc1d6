"""Every query of the committed dashboards, recording rules and alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
RULES = DEPLOY / "prometheus" / "rules"

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"\b(?:[a-z]+:)?(?:slipstream|process|scrape)_[a-z0-9_]+(?::[a-z0-9_]+)?\b")
_COMPARISON = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*-?[\d.]+\s*$")
_LABEL_VALUES = re.compile(r"label_values\((.*), *([a-z_]+)\)$")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")


@dataclass(frozen=True, slots=True)
class FoundQuery:
    """A query, and where it stands."""

    place: str
    expr: str
    """With Grafana's variables."""
    legend: str = ""

    def filled(self, interval: str) -> str:
        """The query as Grafana would send it, for all instances."""
        return self.expr.replace("$__rate_interval", interval).replace("$instance", ".*").replace("$model", ".*")

    @property
    def metrics(self) -> set[str]:
        """Names of what it asks for, as they are exposed or recorded."""
        return set(_NAME.findall(_STRING.sub('""', self.expr)))

    @property
    def parts(self) -> list[str]:
        """The compared expressions, without the comparisons, which hold only when something is wrong."""
        return [_COMPARISON.sub("", part) for part in re.split(r" and on \(instance\) ", self.expr)]


@dataclass(frozen=True, slots=True)
class FoundPanel:
    """A panel with its queries."""

    title: str
    kind: str
    """Grafana's name of the panel's type."""
    unit: str
    settings: dict[str, Any]
    """The panel's JSON."""
    queries: tuple[FoundQuery, ...]


def boards() -> dict[str, dict[str, Any]]:
    """The dashboards' JSON, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels_of(board: dict[str, Any]) -> list[FoundPanel]:
    """Its panels, rows left out."""
    found = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        place = f"{board['title']}, {panel['title']}"
        queries = (FoundQuery(place, target["expr"], target["legendFormat"]) for target in panel["targets"])
        unit = panel["fieldConfig"]["defaults"]["unit"]
        found.append(FoundPanel(panel["title"], panel["type"], unit, panel, tuple(queries)))
    return found


def panel_queries() -> list[FoundQuery]:
    """Lists the queries of all panels of all dashboards."""
    return [query for board in boards().values() for panel in panels_of(board) for query in panel.queries]


def annotation_queries() -> list[FoundQuery]:
    """Lists the queries of all annotations, which find something only when something happened."""
    return [
        FoundQuery(f"{board['title']}, annotation {annotation['name']}", annotation["expr"])
        for board in boards().values()
        for annotation in board["annotations"]["list"]
    ]


def variable_queries() -> list[FoundQuery]:
    """Lists queries for all variables: each counts the series whose label's values are offered."""
    found = []
    for board in boards().values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                match = _LABEL_VALUES.match(variable["query"])
                assert match is not None, f"{variable['query']} is no label_values(…)"
                expr = f"count by ({match[2]}) ({match[1]})"
                found.append(FoundQuery(f"{board['title']}, variable {variable['name']}", expr))
    return found


def recording_rules() -> list[FoundQuery]:
    """Each under the name that it records."""
    return [FoundQuery(rule["record"], rule["expr"]) for rule in _rules() if "record" in rule]


def alert_rules() -> list[FoundQuery]:
    """Each under its name."""
    return [FoundQuery(rule["alert"], rule["expr"]) for rule in _rules() if "alert" in rule]


def runbooks() -> dict[str, str]:
    """Maps each alert to its runbook."""
    return {rule["alert"]: rule["annotations"]["runbook"] for rule in _rules() if "alert" in rule}


def metric_of(name: str) -> str:
    """The metric that a sample of this name belongs to."""
    return _SUFFIX.sub("", name) if name.startswith("slipstream_") else name


def _rules() -> Iterator[dict[str, Any]]:
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]
