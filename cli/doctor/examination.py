"""Runs all checks, those of memory, fences and MPS between two processes included, and prints the report."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
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
    failed,
    note,
    ok,
)
from slipstream.cli.doctor.hand_over import TIMED, WORDS, measure
from slipstream.cli.up.mps import MpsMode, mps_daemon, outside_mps
from slipstream.common.device.manifest import EVENT, TIMELINE
from slipstream.common.errors import SlipstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from slipstream.cli.doctor.checks import Finding
    from slipstream.cli.doctor.hand_over import HandOver
    from slipstream.cli.model_choice import ModelChoice

METRICS_PORTS = {"scheduler": 9401, "verify": 9402, "draft": 9403}
"""The ports in compose.yaml and prometheus.yml."""
_MARKS = {Verdict.OK: "✓", Verdict.NOTE: "!", Verdict.FAILED: "✗"}
STEPS_MS = (1.0, 5.0)
GOOD_OVERLAP = 0.95
_SAME_NAMESPACES = "run as one user, with the same /dev/shm, PID and IPC namespaces"
_MPS_REMEDY = "without MPS a hand-over costs about 0.14 ms; start with --mps off, or make it run"


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


async def check_sharing_on_gpu() -> list[Finding]:
    """MPS, then memory and both kinds of fences between two processes under it, and how fast they hand over.

    This process owns the memory and, like the scheduler, is to be outside MPS.
    """
    with TemporaryDirectory(prefix="slipstream-doctor-") as name:
        directory = Path(name)
        try:
            async with mps_daemon(MpsMode.ON, directory) as daemon:
                assert daemon is not None, "it was asked for"
                found = await asyncio.to_thread(lambda: list(_check_gpu_fences(daemon.environment)))
            return [ok("MPS", "a daemon and its server run"), *found]
        except SlipstreamError as error:
            mps = note("MPS", str(error), _MPS_REMEDY)
        return [mps, *await asyncio.to_thread(lambda: list(_check_gpu_fences({})))]


def check_sharing_on_cpu() -> Iterator[Finding]:
    """Shared memory and futexes between two processes, and how fast they hand over."""
    try:
        measured = measure("cpu", "auto", {})
    except SlipstreamError as error:
        yield failed("shared memory of two processes", str(error), _SAME_NAMESPACES)
        return
    yield ok("shared memory of two processes", f"{WORDS} words there and back, in order")
    yield from _speed(measured)


def _check_gpu_fences(environment: Mapping[str, str]) -> Iterator[Finding]:
    measured: list[HandOver] = []
    for name, kind, remedy in (
        ("IPC memory and events", EVENT, _SAME_NAMESPACES),
        ("IPC memory and stream memory operations", TIMELINE, "a newer driver; --fence event works without"),
    ):
        try:
            found = measure("cuda", kind, environment)
        except SlipstreamError as error:
            is_last_resort = kind == EVENT
            yield failed(name, str(error), remedy) if is_last_resort else note(name, str(error), remedy)
            continue
        where = "under MPS" if found.under_mps else "without MPS"
        yield ok(name, f"{WORDS} words there and back between two processes {where}, in order")
        measured.append(found)
    for found in measured:
        if found.times_us:
            yield from _speed(found)


def _speed(found: HandOver) -> Iterator[Finding]:
    detail = f"{found.p50_us:.1f} us (p99 {found.p99_us:.1f}), {found.fence_kind} fence, {TIMED} there and back"
    yield ok("hand-over between two processes", detail)
    for step_ms in STEPS_MS:
        share = found.overlap(step_ms)
        detail = f"{share:.1%} of a step is work at best, two hand-overs lost"
        name = f"overlap, kernels of {step_ms:g} ms a step"
        remedy = "larger models or batches, MPS on a GPU, or cores that are not busy with something else"
        yield ok(name, detail) if share >= GOOD_OVERLAP else note(name, detail, remedy)
