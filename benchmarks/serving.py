"""Latency and throughput against load, with and without drafting: the real services and an open-loop load generator.

Requests come as a Poisson process and never wait for answers; latencies count from the due time of a request. Prompts
and outputs have lengths like ShareGPT's (`workload.py` has the parameters), times a quarter, which suits the bundled
model's context of 1,024 tokens and two CPU cores. First the capacity of each algorithm is found by saturation, the
median of rounds in which they take turns; the rates are fractions of the highest, the same arrivals for all algorithms,
which take turns at each rate.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from slipstream.benchmarks.load_generator import closed_loop, open_loop
from slipstream.benchmarks.load_report import failures, report_of
from slipstream.benchmarks.models import (
    NONE,
    NUM_DRAFT_TOKENS,
    STANDALONE,
    STANDALONE_AUTO,
    JsonOption,
    Models,
    draft_of,
)
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.benchmarks.workload import TEMPERATURE, Lengths, Workload
from slipstream.scheduler.config import AUTO

if TYPE_CHECKING:
    from slipstream.benchmarks.load_report import LoadReport

CLIENTS_PER_SLOT = 2
NUM_REQUESTS = 4096
"""Different requests for the capacity; after these they are repeated."""
LENGTHS = Lengths(scale=0.25)
KV_MIB = 512
"""KV pages of both workers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a measurement."""

    algorithms: tuple[str, ...] = (NONE, STANDALONE, STANDALONE_AUTO)
    fractions: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25)
    """Offered rates, as fractions of the highest capacity."""
    seconds: float = 20.0
    """Length of the arrivals, at each rate."""
    warm_up_s: float = 3.0
    """The part of these, and of the capacity's, that does not count."""
    capacity_seconds: float = 12.0
    capacity_rounds: int = 7
    """In which the algorithms take turns; the median counts."""
    drain_s: float = 60.0
    """Requests that take longer after the last arrival are left."""
    slots: int = 16
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """One rate with one algorithm."""

    algorithm: str
    fraction: float
    offered_requests_per_second: float
    report: LoadReport
    failures: list[str]
    """There should be none."""


async def measure(plan: Plan) -> tuple[dict[str, list[LoadReport]], list[ServingRun]]:
    """Starts the services once for each algorithm; returns its rounds of capacity, and all rates with each."""
    models, lengths = Models(), LENGTHS
    workload = Workload(models.target, lengths)
    async with AsyncExitStack() as held:
        addresses = {}
        for algorithm in plan.algorithms:
            stack = await held.enter_async_context(Stack(LOG_DIR / f"serving-{algorithm}"))
            draft = draft_of(algorithm)
            await stack.models(models.with_drafts(draft or NONE))
            running = stack.scheduler(
                draft,
                num_draft_tokens=AUTO if algorithm == STANDALONE_AUTO else NUM_DRAFT_TOKENS,
                slots=plan.slots,
                context_tokens=lengths.context_tokens,
                kv_memory_mib=KV_MIB,
                no_prefix_cache=True,  # the same prompts come at each rate
            )
            addresses[algorithm] = (await held.enter_async_context(running)).address
        capacity = await _capacities(workload, addresses, plan)
        most = max(_median(rounds).tokens_per_second for rounds in capacity.values())
        runs = []
        for fraction in plan.fractions:
            rate = fraction * most / workload.mean_output_tokens
            for algorithm, address in addresses.items():
                runs.append(await _run(workload, address, plan, algorithm, fraction, rate))
                speed = runs[-1].report.tokens_per_second
                print(f"{algorithm} at {rate:.2f} requests/s: {speed:.0f} tokens/s", flush=True)
    return capacity, runs


async def _capacities(workload: Workload, addresses: dict[str, str], plan: Plan) -> dict[str, list[LoadReport]]:
    """Returns the reports of each algorithm's rounds."""
    found: dict[str, list[LoadReport]] = {algorithm: [] for algorithm in addresses}
    for number in range(1, plan.capacity_rounds + 1):
        for algorithm, address in addresses.items():
            report = await find_capacity(
                workload, address, plan.slots, plan.capacity_seconds, plan.warm_up_s, f"{plan.seed} capacity"
            )
            print(f"{algorithm}, round {number}: capacity {report.tokens_per_second:.0f} tokens/s", flush=True)
            found[algorithm].append(report)
    return found


def _median(rounds: list[LoadReport]) -> LoadReport:
    return sorted(rounds, key=lambda report: report.tokens_per_second)[len(rounds) // 2]


async def find_capacity(
    workload: Workload, address: str, num_slots: int, seconds: float, warm_up_s: float, seed: str
) -> LoadReport:
    """Saturates a server by more busy clients than it has slots: its `tokens_per_second` are the capacity.

    Raises RuntimeError if requests fail.
    """
    sessions = [(request,) for request in itertools.islice(workload.requests(seed), NUM_REQUESTS)]
    run = await closed_loop(address, sessions, CLIENTS_PER_SLOT * num_slots, seconds)
    report = report_of(run, warm_up_s)
    if failures(run) or not report.tokens_per_second:
        raise RuntimeError(f"no capacity was found: {report}, {failures(run)[:3]}")
    return report


async def _run(
    workload: Workload, address: str, plan: Plan, algorithm: str, fraction: float, rate: float
) -> ServingRun:
    # The same requests at every rate, sooner or later: the rates differ in nothing else.
    arrivals = workload.arrivals(rate, plan.seconds, str(plan.seed))
    run = await open_loop(address, arrivals, plan.seconds, plan.drain_s)
    return ServingRun(
        algorithm=algorithm,
        fraction=fraction,
        offered_requests_per_second=rate,
        report=report_of(run, plan.warm_up_s),
        failures=failures(run),
    )


def main(json_file: JsonOption = None) -> None:
    """Measures latency and throughput against load."""
    plan = Plan()
    capacity, runs = asyncio.run(measure(plan))
    about = {"host": host(), "plan": asdict(plan), "lengths": asdict(LENGTHS), "temperature": TEMPERATURE}
    capacities = {
        algorithm: {**asdict(_median(rounds)), "rounds": [report.tokens_per_second for report in rounds]}
        for algorithm, rounds in capacity.items()
    }
    write_json({**about, "capacity": capacities, "runs": [asdict(run) for run in runs]}, json_file)
    failed = [failure for run in runs for failure in run.failures]
    for run in runs:
        if run.report.num_completed < run.report.num_requests:
            done = f"{run.report.num_completed} of {run.report.num_requests} requests were completed"
            failed.append(f"{run.algorithm} at {run.offered_requests_per_second:.2f} requests/s: {done}")
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    typer.run(main)
