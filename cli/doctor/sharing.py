"""Checks memory, fences and MPS between two processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from slipstream.cli.doctor.checks import failed, note, ok
from slipstream.cli.doctor.hand_over import TIMED, WORDS, measure
from slipstream.cli.up.mps import MpsMode, mps_daemon
from slipstream.common.device.manifest import EVENT, TIMELINE
from slipstream.common.errors import SlipstreamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from slipstream.cli.doctor.checks import Finding
    from slipstream.cli.doctor.hand_over import HandOver

STEPS_MS = (1.0, 5.0)
GOOD_OVERLAP = 0.95
_SAME_NAMESPACES = "run as one user, with the same /dev/shm, PID and IPC namespaces"
_MPS_REMEDY = "without MPS a hand-over costs about 0.14 ms; start with --mps off, or make it run"


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
