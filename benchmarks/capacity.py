"""What a server can do at most: clients that are never idle, more of them than the server has slots."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from slipstream.benchmarks.load_report import failures, report_of

if TYPE_CHECKING:
    from slipstream.benchmarks.load_generator import LoadGenerator
    from slipstream.benchmarks.load_report import LoadReport
    from slipstream.benchmarks.workload import Workload

CLIENTS_PER_SLOT = 2
NUM_REQUESTS = 4096
"""Different ones; after these they come again."""


async def find_capacity(
    generator: LoadGenerator,
    workload: Workload,
    address: str,
    *,
    num_slots: int,
    seconds: float,
    warm_up_s: float,
    seed: str,
) -> LoadReport:
    """Saturates the server at `address`: its `tokens_per_second` are the capacity. Raises RuntimeError."""
    requests = list(itertools.islice(workload.requests(seed), NUM_REQUESTS))
    run = await generator.closed_loop(address, requests, CLIENTS_PER_SLOT * num_slots, seconds)
    report = report_of(run, warm_up_s)
    if failures(run) or not report.tokens_per_second:
        raise RuntimeError(f"no capacity was found: {report}, {failures(run)[:3]}")
    return report
