"""Runs all checks one after the other, and prints the report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.cli.doctor.checks import (
    Verdict,
    check_cuda,
    check_descriptors,
    check_driver,
    check_gpu,
    check_models,
    check_namespaces,
    check_port,
    check_shm,
    check_state_dir,
)
from slipstream.cli.doctor.sharing import check_sharing_on_cpu, check_sharing_on_gpu
from slipstream.cli.up.mps import outside_mps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from slipstream.cli.doctor.checks import Finding
    from slipstream.cli.model_choice import ModelChoice

METRICS_PORTS = {"scheduler": 9401, "verify": 9402, "draft": 9403}
"""The ports in compose.yaml and prometheus.yml."""
_MARKS = {Verdict.OK: "✓", Verdict.NOTE: "!", Verdict.FAILED: "✗"}


async def run_doctor(models: ModelChoice, device: str, listen: str, state_dir: Path, *, as_json: bool) -> int:
    """Prints each finding as it comes, or all as one JSON object; returns 1 if anything failed."""
    # Before anything asks for the GPU: like the scheduler, this process owns the memory that the two others share.
    os.environ.update(outside_mps(state_dir))
    findings = []
    async for finding in examine(models, device, listen, state_dir):
        findings.append(finding)
        if not as_json:
            _print(finding)
    has_failed = any(finding.verdict is Verdict.FAILED for finding in findings)
    if as_json:
        rows = [asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
        print(json.dumps({"ok": not has_failed, "findings": rows}))
    else:
        print("\nThis host cannot serve as it is." if has_failed else "\nThis host can serve.")
    return 1 if has_failed else 0


async def examine(models: ModelChoice, device: str, listen: str, state_dir: Path) -> AsyncIterator[Finding]:
    """Yields the findings in order. `device`: "auto" asks for a GPU only where there is one."""
    from slipstream.common.device.choose import CPU, CUDA, cuda_obstacle

    if device != CPU:
        yield check_driver(is_needed=device == CUDA)
        yield check_cuda(is_needed=device == CUDA)
    yield check_shm()
    yield check_descriptors()
    yield check_namespaces()
    yield check_state_dir(state_dir)
    yield await check_port("clients", listen)
    for service, port in METRICS_PORTS.items():
        yield await check_port(f"metrics of {service}", f"127.0.0.1:{port}")
    for finding in check_models(models):
        yield finding
    if device == CPU or (device != CUDA and cuda_obstacle() is not None):
        for finding in check_sharing_on_cpu():
            yield finding
    elif cuda_obstacle() is None:
        for finding in await check_sharing_on_gpu():
            yield finding
        yield check_gpu()


def _print(finding: Finding) -> None:
    print(f"{_MARKS[finding.verdict]} {finding.name}: {finding.detail}", flush=True)
    if finding.remedy:
        print(f"    → {finding.remedy}", flush=True)
