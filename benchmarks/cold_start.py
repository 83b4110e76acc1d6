"""Measures how long `slipstream up` takes to start with a draft: first without compiled kernels, then with them."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.benchmarks.models import EAGLE3, Setup
from slipstream.benchmarks.runner import DevicePlan, Row, Table, benchmark, host
from slipstream.benchmarks.stack import up_server, words
from slipstream.common.settings import setting

STARTS = ("first", "second")
CACHES = {"TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
"""Environment variables of the caches of compiled kernels, and the folder of each."""
_CAPTURED = re.compile(r"graphs of ([^:]+): \d+ in ([\d.]+) s")
LATE_S = 1.0
"""Time for which the draft may join after the server is ready, for the polls of both."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of the starts."""

    model: str = setting("bundled", help="bundled, or a shape: llama-3.1-8b.")
    mps: str = setting("off", help="On a GPU: on or off.")


async def _start(plan: Plan, name: str) -> Row:
    options = words(device=plan.device, mps=plan.mps, log_level="INFO", **Setup.named(plan.model).up_options())
    started = time.monotonic()
    async with up_server(*options) as server:
        served_s = time.monotonic() - started
        await server.until_state(lambda state: state.algorithm == EAGLE3)
        drafted_s = time.monotonic() - started
        captured = _CAPTURED.findall((server.state_dir / "verify.log").read_text(encoding="utf-8"))
    return {
        "model": plan.model,
        "start": name,
        "host": host(plan.device),
        "served_s": round(served_s, 2),
        "drafted_s": round(drafted_s, 2),
        "verify_graphs": [{"kind": kind, "seconds": float(seconds)} for kind, seconds in captured],
    }


def problems_of(rows: Sequence[Row]) -> list[str]:
    """Lists the graphs that verify captured again, and drafts that joined after the server was ready."""
    found = []
    for row in rows:
        counts = Counter(graph["kind"] for graph in row["verify_graphs"])
        found += [f"{row['start']} start: {kind} captured {n} times" for kind, n in counts.items() if n > 1]
        if row["drafted_s"] > row["served_s"] + LATE_S:
            found.append(f"{row['start']} start: the draft joined after the server was ready")
    return found


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Measures a start without compiled kernels, and one with them."""
    table = Table(file, "model", "start")
    with TemporaryDirectory(prefix="slipstream-kernels-") as folder:
        os.environ.update({name: str(Path(folder) / part) for name, part in CACHES.items()})
        for name in STARTS:
            table.add(await _start(plan, name))
    return problems_of([row for row in table.rows if row["model"] == plan.model])
