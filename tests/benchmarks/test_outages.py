"""Services that die, ten times the load, and hostile requests, each once in small under clients."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.benchmarks.outages import Plan, measure, write_run
from slipstream.benchmarks.overload import Plan as OverloadPlan
from slipstream.benchmarks.overload import faults, overload, shortcomings
from slipstream.benchmarks.probes import (
    MOST_MEMORY_MIB,
    MOST_STALL_MS,
    PROBES,
    SLOTS,
    Target,
    health_checks,
    run_probe,
    write_key,
)
from slipstream.benchmarks.runner import Names
from slipstream.benchmarks.stack import SERVICES, Option, Stack
from slipstream.benchmarks.watched_gateway import watched_gateway
from slipstream.bundled import target_dir
from slipstream.cli.load_requests import Lengths
from tests.harness.example_states import STATE
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, serving


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


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_requests_beyond_the_capacity_are_refused_and_the_others_served(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    plan = OverloadPlan(
        seconds=2.5,
        warm_up_s=1.0,
        capacity_seconds=1.5,
        capacity_warm_up_s=0.5,
        slots=4,
        queue=4,
        sample_s=0.1,
        seed=seed,
    )
    async with Stack(tmp_path / "logs") as stack:
        report = await overload(stack, Lengths(scale=0.1, context_tokens=256), plan)
    assert not faults(report)
    assert report["load"]["num_rejected"] > report["load"]["num_completed"] > 0
    assert report["load"]["rejection_ms"]["count"] == report["load"]["num_rejected"]
    assert report["goodput"] > 0
    assert set(report["footprints"]) == {"gateway", "scheduler", "verify", "draft"}
    assert all(isinstance(shortcoming, str) for shortcoming in shortcomings(report))


MOST_ON_A_BUSY_MACHINE_MS = 3 * MOST_STALL_MS
SECONDS, SCALE = 0.5, 0.1


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_request_holds_the_event_loop(tmp_path: Path) -> None:
    server = replace(STATE, vocab_size=4096, context_tokens=1024)
    description = replace(DESCRIPTION, server=server, tokenizer_path=str(target_dir()), constraints=True)
    path = tmp_path / "stalls"
    with serving(ScriptedScheduler(description, slots=SLOTS), tmp_path) as scheduler:
        async with Stack(tmp_path / "logs") as stack:
            program = watched_gateway(path)
            options: dict[str, Option] = {"queue": 1024, "kept_jobs": 4096, "api_keys": write_key(tmp_path)}
            async with stack.gateway(scheduler, 1, program=program, **options) as served:
                with health_checks(served.address) as health:
                    target = Target(served.address, SECONDS, SCALE)
                    for probe in PROBES:
                        report = await run_probe(probe, target, path, health)
                        assert not report["problems"]
                        assert sum(report["codes"].values())
                        assert 0 < report["stall_ms"] < MOST_ON_A_BUSY_MACHINE_MS, report
                        assert report["memory_mib"] < MOST_MEMORY_MIB, report
