"""Recording rules and alerts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from slipstream.deploy.metrics_page import CATALOGUE
from tests.deploy.dashboard_queries import (
    DEPLOY,
    FoundQuery,
    alert_rules,
    metric_of,
    recording_rules,
    runbooks,
)
from tests.harness.compose_files import scraped

ROOT = DEPLOY.parent
PROMETHEUS = DEPLOY / "prometheus"
NAMES = {spec.name for section in CATALOGUE for spec in section.metrics}
RECORDED = {rule.place for rule in recording_rules()}


def promtool(*arguments: str | Path) -> None:
    """Runs it; fails with what it says."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_valid() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_rules_do_what_they_say() -> None:
    promtool("test", "rules", *sorted((PROMETHEUS / "tests").glob("*.yml")))


def test_every_rule_has_a_test() -> None:
    cases = [
        case for path in (PROMETHEUS / "tests").glob("*.yml") for case in yaml.safe_load(path.read_text())["tests"]
    ]
    expressions = " ".join(test["expr"] for case in cases for test in case.get("promql_expr_test", ()))
    fired = {test["alertname"] for case in cases for test in case.get("alert_rule_test", ()) if test["exp_alerts"]}
    assert {rule.place for rule in alert_rules()} == fired
    assert {name for name in RECORDED if name not in expressions} == set()


@pytest.mark.parametrize("rule", [*recording_rules(), *alert_rules()], ids=lambda rule: str(rule.place))
def test_rules_ask_for_what_there_is(rule: FoundQuery) -> None:
    # What an SMG has, tests/deploy/test_smg.py asks one.
    assert rule.metrics or rule.expr.startswith(("up{", "smg_worker_health "))
    ours = {metric_of(name) for name in rule.metrics if not name.startswith("process_")}  # of every Prometheus client
    assert ours <= NAMES | RECORDED


def test_recorded_series_are_used() -> None:
    used = {name for rule in alert_rules() for name in rule.metrics}
    assert used >= RECORDED


def test_every_alert_leads_to_its_paragraph() -> None:
    for alert, link in runbooks().items():
        page, _, anchor = link.partition("#")
        headings = re.findall(r"^### (\w+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert alert in headings
        assert anchor == alert.lower()


def test_jobs_are_called_as_dashboards_expect_them() -> None:
    jobs, names = scraped(), ("gateway", "scheduler", "draft", "verify", "grammar")
    assert jobs.keys() == {f"slipstream-{name}" for name in names}
    assert len({job["labels"]["instance"] for job in jobs.values()}) == 1
