"""Each of the four services is killed and ended under streaming clients: once here, 20 times by the benchmark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.benchmarks.outages import Plan, measure, write_run
from slipstream.benchmarks.runner import Names
from slipstream.benchmarks.up_server import SERVICES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["kill", "term"])
@pytest.mark.parametrize("service", SERVICES)
async def test_clients_see_no_error_when_a_service_dies_or_is_ended(service: str, fault: str) -> None:
    run = await measure(
        Plan(times=1, clients=4, max_new_tokens=200, services=Names((service,)), faults=Names((fault,)))
    )
    assert run["errors"] == []
    assert run["jobs"] >= 4
    (row,) = run["outages"]
    assert (row["service"], row["fault"], row["times"]) == (service, fault, 1)
    assert row["gap_worst_ms"] >= row["gap_p50_ms"] > 0
    # Without its draft the server goes on; whatever else dies has to start first, which takes seconds.
    assert service != "draft" or row["gap_worst_ms"] < 4 * run["watchdog_ms"]


def test_a_file_keeps_what_it_has_of_other_services(tmp_path: Path) -> None:
    def run(jobs: int, *services: str, mps: str = "off") -> dict[str, Any]:
        rows = [{"service": service, "fault": "kill"} for service in services]
        return {"plan": {"model": "bundled", "device": "cuda", "mps": mps}, "jobs": jobs, "outages": rows}

    path = tmp_path / "outages_h200.json"
    for one in (run(1, "draft"), run(2, "draft", "verify"), run(3, "draft"), run(4, "draft", mps="on")):
        write_run(one, path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(one["jobs"], [row["service"] for row in one["outages"]]) for one in found] == [
        (2, ["verify"]),
        (3, ["draft"]),
        (4, ["draft"]),
    ]
