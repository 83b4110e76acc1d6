"""Ten times the requests that the server can serve, for a minute: the goodput must stay, and refusals be quick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from slipstream.benchmarks.models import STANDALONE
from slipstream.benchmarks.probes import health_checks
from slipstream.benchmarks.runner import Row, benchmark, host, write_json
from slipstream.benchmarks.serving import LENGTHS, find_capacity
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.benchmarks.workloads import TextWorkload
from slipstream.cli.cancellation import background
from slipstream.cli.load_generator import COMPLETED, REJECTED, GrpcServer, open_loop
from slipstream.cli.load_requests import Arrival, Lengths
from slipstream.client import AsyncClient
from slipstream.common.settings import Settings

HEALTH_INTERVAL_S = 0.2
SETTLE_S = 20.0
POLL_S = 0.1
LEAST_GOODPUT = 0.9
"""Lowest goodput that passes, as a fraction of the capacity."""
MOST_REJECTION_MS = 50.0
MOST_GROWTH = {"gateway": 0.05, "scheduler": 0.02, "draft": 0.05, "verify": 0.05}
"""Growth of resident memory from the first third of the time to the last. A worker keeps the room of its largest step,
which comes at random: its memory may rise once or twice, and then stays."""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a run."""

    factor: float = 10.0
    """Times the capacity."""
    seconds: float = 60.0
    warm_up_s: float = 5.0
    """The part of these that does not count: the queue fills up."""
    capacity_seconds: float = 13.0
    """Before, and again after."""
    capacity_warm_up_s: float = 3.0
    drain_s: float = 60.0
    slots: int = 16
    queue: int = 64
    """Requests that may wait."""
    kept_jobs: int = 100
    """Jobs that are kept after their end: few, so that their number is reached early in the minute."""
    sample_s: float = 0.5
    seed: int = 1


async def overload(stack: Stack, lengths: Lengths, plan: Plan) -> Row:
    """Starts the services and overloads them; returns the outcome as it is in the file of results."""
    workload = TextWorkload(lengths)
    await stack.models(STANDALONE)
    options: dict[str, Any] = {"slots": plan.slots, "queue": plan.queue, "kept_jobs": plan.kept_jobs}
    scheduler = stack.scheduler(STANDALONE, context_tokens=lengths.context_tokens, **options)
    async with scheduler as served, AsyncClient(served.address) as client:
        address = served.address
        services = {service.name: psutil.Process(service.pid) for service in (await client.server_info()).services}
        memory_kib: dict[str, list[float]] = {name: [] for name in services}
        await _touch_everything(workload, address, plan)
        for_capacity = plan.slots, plan.capacity_seconds, plan.capacity_warm_up_s
        capacity_before = await find_capacity(workload, address, *for_capacity, f"{plan.seed} before")
        before = await settled(client, {**await in_use(client), "requests": 0})
        rate = plan.factor * capacity_before["tokens_per_second"] / workload.mean_output_tokens
        arrivals = workload.arrivals(rate, plan.seconds, str(plan.seed))
        with health_checks(address, interval_s=HEALTH_INTERVAL_S) as health:
            health.begin()
            async with background(_sample(services, memory_kib, plan)):
                run = await open_loop(GrpcServer(address), arrivals, plan.seconds, plan.drain_s)
            _, statuses = await asyncio.to_thread(health.end)
        after = await settled(client, before)
        capacity_after = await find_capacity(workload, address, *for_capacity, f"{plan.seed} after")
    load = run.report(plan.warm_up_s)
    capacity = mean(found["tokens_per_second"] for found in (capacity_before, capacity_after))
    return {
        "host": host(),
        "plan": asdict(plan),
        "lengths": asdict(lengths),
        "capacity_before": capacity_before,
        "capacity_after": capacity_after,
        "offered_requests_per_second": rate,
        "load": load,
        "rejections_without_retry_info": sum(
            record.outcome == REJECTED and record.retry_after_ms is None for record in run.records
        ),
        "health_statuses": sorted(statuses),
        "footprints": {name: _footprint(samples) for name, samples in memory_kib.items()},
        "before": before,  # `in_use` before the overload, and after
        "after": after,
        "failures": run.failures,
        "capacity": capacity,  # tokens per second
        "goodput": load["completed_tokens_per_second"] / capacity,
    }


def _footprint(memory_kib: Sequence[float]) -> Row:
    """Returns the mean resident memory in the first third of a time and in the last."""
    third = max(1, len(memory_kib) // 3)
    return {"first_rss_kib": round(mean(memory_kib[:third])), "last_rss_kib": round(mean(memory_kib[-third:]))}


def faults(found: Row) -> list[str]:
    """Returns errors that no slow machine explains."""
    load, problems = found["load"], [f"failed: {failure}" for failure in found["failures"][:10]]
    if not load["num_rejected"] or not load["num_completed"]:
        problems.append(f"{load['num_rejected']} rejected, {load['num_completed']} completed")
    if load["num_left"]:
        problems.append(f"{load['num_left']} requests did not come to an end")
    if found["rejections_without_retry_info"]:
        problems.append(f"{found['rejections_without_retry_info']} rejections without a RetryInfo")
    if found["health_statuses"] != ["SERVING"]:
        problems.append(f"health: {', '.join(found['health_statuses'])}")
    return problems + [f"in use before and after: {more}" for more in exceeding(found["after"], found["before"])]


def shortcomings(found: Row) -> list[str]:
    """Returns times and sizes beyond their limits, which a busy machine may explain."""
    problems, rejection_ms = [], found["load"]["rejection_ms"]["p99"]
    if found["goodput"] < LEAST_GOODPUT:
        problems.append(f"goodput is {found['goodput']:.3f} of the capacity, below {LEAST_GOODPUT}")
    if rejection_ms >= MOST_REJECTION_MS:
        problems.append(f"rejections take {rejection_ms:.1f} ms at p99")
    for name, footprint in found["footprints"].items():
        growth = footprint["last_rss_kib"] / footprint["first_rss_kib"] - 1
        if growth > MOST_GROWTH[name]:
            problems.append(f"the memory of {name} grew by {100 * growth:.1f} %")
    return problems


async def _sample(services: Mapping[str, psutil.Process], memory_kib: dict[str, list[float]], plan: Plan) -> None:
    await asyncio.sleep(plan.warm_up_s)
    while True:
        for name, process in services.items():
            memory_kib[name].append(process.memory_info().rss / 1024)
        await asyncio.sleep(plan.sample_s)


async def in_use(client: AsyncClient) -> dict[str, int]:
    """Requests, KV pages, and the threads and descriptors of each service that are in use now, on this host."""
    info = await client.server_info()
    found = {"requests": info.num_running + info.num_waiting, "pages": info.num_pages - info.num_free_pages}
    for service in info.services:
        process = psutil.Process(service.pid)
        found[f"{service.name}, threads"] = process.num_threads()
        found[f"{service.name}, descriptors"] = process.num_fds()
    return found


async def settled(client: AsyncClient, before: dict[str, int]) -> dict[str, int]:
    """Waits until no more is in use than before, for SETTLE_S at most; returns what is in use then."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await in_use(client)
        if not exceeding(now, before) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(POLL_S)


def exceeding(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """The quantities of which more is in use than before."""
    return [f"{name}: {before[name]}, then {now[name]}" for name in before if now[name] > before[name]]


async def _touch_everything(workload: TextWorkload, address: str, plan: Plan) -> None:
    """Fills every slot with the longest requests, so that the services have taken their largest memory."""
    arrivals = [Arrival(0.0, request) for request in workload.largest(plan.slots)]
    run = await open_loop(GrpcServer(address), arrivals, 0.0, plan.drain_s)
    outcomes = [record.outcome for record in run.records]
    if outcomes != [COMPLETED] * plan.slots:
        raise RuntimeError(f"the longest requests did not complete: {outcomes}, {run.failures}")


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Overloads the server."""
    async with Stack(LOG_DIR / "overload") as stack:
        found = await overload(stack, LENGTHS, plan)
    problems = faults(found) + shortcomings(found)
    write_json({**found, "problems": problems}, file)
    print(f"goodput {found['goodput']:.3f} of the capacity; {found['load']['num_rejected']} requests rejected")
    return problems
