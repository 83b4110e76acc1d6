"""Latency and throughput against load, with and without drafting: the real services and an open-loop load generator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from slipstream.benchmarks.models import NONE, NUM_DRAFT_TOKENS, STANDALONE, STANDALONE_AUTO, draft_of
from slipstream.benchmarks.runner import Row, benchmark, host, write_json
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.benchmarks.workloads import TEMPERATURE, TextWorkload
from slipstream.cli.load_generator import GrpcServer, closed_loop, open_loop
from slipstream.cli.load_requests import Lengths
from slipstream.common.settings import Settings

CLIENTS_PER_SLOT = 2
NUM_REQUESTS = 4096
"""Different requests for the capacity; after these they are repeated."""
LENGTHS = Lengths(scale=0.25)
KV_MIB = 512
"""KV pages of both workers together."""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
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


async def measure(plan: Plan) -> Row:
    """Starts the services once for each algorithm; returns the rounds of capacity, and all rates, of each."""
    workload = TextWorkload(LENGTHS)
    rounds: dict[str, list[Row]] = {algorithm: [] for algorithm in plan.algorithms}
    runs = []
    async with AsyncExitStack() as held:
        addresses = {name: await held.enter_async_context(_serving(name, plan.slots)) for name in plan.algorithms}
        for number in range(1, plan.capacity_rounds + 1):
            for name, address in addresses.items():
                seconds, seed = (plan.capacity_seconds, plan.warm_up_s), f"{plan.seed} capacity"
                rounds[name].append(await find_capacity(workload, address, plan.slots, *seconds, seed))
                speed = rounds[name][-1]["tokens_per_second"]
                print(f"{name}, round {number}: capacity {speed:.0f} tokens/s", flush=True)
        capacity = {name: _capacity(found) for name, found in rounds.items()}
        most = max(found["tokens_per_second"] for found in capacity.values())
        for fraction in plan.fractions:
            rate = fraction * most / workload.mean_output_tokens
            # The same requests at every rate, sooner or later: the rates differ in nothing else.
            arrivals = workload.arrivals(rate, plan.seconds, str(plan.seed))
            for name, address in addresses.items():
                run = await open_loop(GrpcServer(address), arrivals, plan.seconds, plan.drain_s)
                report = run.report(plan.warm_up_s)
                about = {"algorithm": name, "fraction": fraction, "offered_requests_per_second": rate}
                runs.append({**about, "report": report, "failures": run.failures})
                print(f"{name} at {rate:.2f} requests/s: {report['tokens_per_second']:.0f} tokens/s", flush=True)
    return {"capacity": capacity, "runs": runs}


@asynccontextmanager
async def _serving(algorithm: str, num_slots: int) -> AsyncIterator[str]:
    draft = draft_of(algorithm)
    async with Stack(LOG_DIR / f"serving-{algorithm}") as stack:
        await stack.models(*([draft] if draft else []))
        running = stack.scheduler(
            draft,
            fixed_draft_tokens=None if algorithm == STANDALONE_AUTO else NUM_DRAFT_TOKENS,
            slots=num_slots,
            context_tokens=LENGTHS.context_tokens,
            kv_memory_mib=KV_MIB,
            no_prefix_cache=True,  # the same prompts are sent at each rate
        )
        async with running as served:
            yield served.address


def _capacity(rounds: list[Row]) -> Row:
    """Returns the median report of some rounds, with the tokens per second of all."""
    ordered = sorted(rounds, key=lambda report: report["tokens_per_second"])
    return {**ordered[len(ordered) // 2], "rounds": [report["tokens_per_second"] for report in rounds]}


async def find_capacity(
    workload: TextWorkload, address: str, num_slots: int, seconds: float, warm_up_s: float, seed: str
) -> Row:
    """Saturates a server by more busy clients than it has slots: its `tokens_per_second` are the capacity.

    Raises RuntimeError if requests fail.
    """
    sessions = [(one,) for one in islice(workload.requests(seed), NUM_REQUESTS)]
    run = await closed_loop(GrpcServer(address), sessions, CLIENTS_PER_SLOT * num_slots, seconds)
    report = run.report(warm_up_s)
    if run.failures or not report["tokens_per_second"]:
        raise RuntimeError(f"no capacity was found: {report}, {run.failures[:3]}")
    return report


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Measures latency and throughput against load."""
    found = await measure(plan)
    about = {"host": host(), "plan": asdict(plan), "lengths": asdict(LENGTHS), "temperature": TEMPERATURE}
    write_json({**about, **found}, file)
    problems = [failure for run in found["runs"] for failure in run["failures"]]
    for run in found["runs"]:
        num_completed, num_requests = (run["report"][name] for name in ("num_completed", "num_requests"))
        if num_completed < num_requests:
            rate = f"{run['algorithm']} at {run['offered_requests_per_second']:.2f} requests/s"
            problems.append(f"{rate}: {num_completed} of {num_requests} requests were completed")
    return problems
