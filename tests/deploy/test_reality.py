"""The real services under load, a real Prometheus that scrapes them, and every query of dashboards and rules."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.common.rpc import metrics as common_metrics
from slipstream.common.rpc.metrics import Scrape
from slipstream.deploy.metrics_page import CATALOGUE
from tests.deploy.dashboard_queries import (
    FoundQuery,
    alert_rules,
    annotation_queries,
    panel_queries,
    recording_rules,
    variable_queries,
)
from tests.deploy.observed_stack import SERVICES, Observed, Prometheus, busy, find_prometheus, observed_stack

INTERVAL_MS = 250
RATE_INTERVAL = "3s"
DEADLINE_S = 90.0


def exposed(port: int) -> str:
    """Returns the current text of a metrics endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text: bytes = response.read()
    return text.decode()


def names_in(text: str) -> set[str]:
    """Our metrics in it."""
    found = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(text)
    }
    return {name for name in found if name.startswith("slipstream_")}


async def complaint(prometheus: Prometheus, place: str, expr: str) -> str | None:
    """Describes the fault in a query's result: no finite values, or an infinite one; None if there is none.

    A quotient of rates is not a number for a kind of step that was not needed in the interval.
    """
    values = [value for series in await prometheus.query(expr) for _, value in series.points]
    if any(map(math.isfinite, values)) and not any(map(math.isinf, values)):
        return None
    return f"{place}: {expr}: {values or 'nothing'}"


def expressions() -> list[tuple[str, str]]:
    """Lists what must have a result on a busy server: whole queries, and the parts of alerts and annotations."""
    whole = [*panel_queries(), *variable_queries(), *recording_rules()]
    # The target is on one device.
    found = [(query.place, query.filled(RATE_INTERVAL)) for query in whole if "slipstream_rank_" not in query.expr]
    alerts = [rule for rule in alert_rules() if not rule.expr.startswith("smg_")]  # no SMG is there
    for query in (*alerts, *annotation_queries()):
        parts = FoundQuery(query.place, query.filled(RATE_INTERVAL)).parts
        found += [(query.place, part) for part in parts]
    return found


async def until_all_are_there(prometheus: Prometheus) -> None:
    """Returns when every expression has a finite result; fails with those that have none at the deadline."""
    waiting: list[str] = []
    remaining = expressions()
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while remaining and asyncio.get_running_loop().time() < deadline:
        found = await asyncio.gather(*(complaint(prometheus, place, expr) for place, expr in remaining))
        remaining = [pair for pair, problem in zip(remaining, found, strict=True) if problem is not None]
        waiting = [problem for problem in found if problem is not None]
        await asyncio.sleep(INTERVAL_MS / 1000)
    assert not remaining, "\n".join(waiting)


def check_endpoints(observed: Observed) -> None:
    """Checks that the services expose the metrics in the code's table, and that promtool finds no fault."""
    texts = {service: exposed(observed.metrics_ports[service]) for service in SERVICES}
    for service, text in texts.items():
        sections = [section for section in CATALOGUE if service in section.services]
        assert names_in(text) == {spec.name for section in sections for spec in section.metrics}, service
    for service in ("draft", "verify"):
        opened = Scrape.read(texts[service]).total(
            common_metrics.HOST_STALL_SECONDS.name, service=service, site="attach"
        )
        assert opened > 0
    for text in texts.values():
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_query_has_a_result_while_the_server_is_busy(tmp_path: Path) -> None:
    if find_prometheus() is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    async with observed_stack(tmp_path, interval_ms=INTERVAL_MS, slots=4) as observed:
        # More clients than slots: the queue is in use, too.
        async with busy(observed.address, num_clients=6, max_new_tokens=24, regex="[a-z ]{200}"):
            await until_all_are_there(observed.prometheus)
            await asyncio.to_thread(check_endpoints, observed)
        assert await observed.prometheus.query('up{job=~"slipstream-.*"} == 0') == []
