"""Probes of a gateway in a process of its own: `benchmarks/probes.py`, each for a short time, with a wide bound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

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
from slipstream.benchmarks.stack import Option, Stack
from slipstream.benchmarks.watched_gateway import watched_gateway
from slipstream.bundled import target_dir
from tests.harness.example_states import STATE
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, serving

if TYPE_CHECKING:
    from pathlib import Path

MOST_ON_A_BUSY_MACHINE_MS = 3 * MOST_STALL_MS
SECONDS, SCALE = 0.5, 0.1


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_request_holds_the_event_loop(tmp_path: Path) -> None:
    server = replace(STATE, vocab_size=4096, context_tokens=1024)
    description = replace(DESCRIPTION, server=server, tokenizer_path=str(target_dir()))
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
