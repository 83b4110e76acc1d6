"""Whole requests through `slipstream up` and the Python client, with a draft and without."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path
from typing import TypeVar

from slipstream.benchmarks.charts import draw_capacity, draw_load
from slipstream.benchmarks.models import BUNDLED, EAGLE3, EAGLE3_AUTO, NONE, Setup
from slipstream.benchmarks.runner import DevicePlan, Names, Row, Table, benchmark, host, told
from slipstream.benchmarks.stack import UpServer, up_server, words
from slipstream.benchmarks.workloads import (
    CPU_SCALE,
    GPU_SCALE,
    NAMES,
    Scale,
    Sizes,
    Workload,
    poisson,
    warm_up,
    workloads,
)
from slipstream.cli.load_generator import COMPLETED, GrpcServer, LoadRun, closed_loop, open_loop
from slipstream.common.rpc.metrics import Scrape
from slipstream.common.settings import setting

T = TypeVar("T")
MODELS = (BUNDLED, "llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b-mxfp4")
DRAFTS = {"yes": EAGLE3, "auto": EAGLE3_AUTO, "no": NONE}
QUEUE = 1024
DRAIN_S = 120.0
"""Requests that take longer after the last arrival are left, which is a fault."""
DRAFT_ATTACHED = "slipstream_draft_attached"
DRAFT_TIMEOUT_S = 60.0
"""The longest wait for a draft before a workload."""
MOST_CLIENT_SHARE = 0.8
"""The largest share of a core for the busiest client process: above it, the clients may be what is measured."""
MOST_PROCESSES = 8
SEARCH_WARM_UP_SHARE = 0.25
"""The first part of the seconds of a rate, in which a server fills up: its requests do not count."""
SEARCH_DRAIN_S = 15.0
SEARCH_PRECISION = 0.05
LEAST_RATE = 0.1


class InvalidRunError(Exception):
    """A run that does not count: a request without its one right end, a lost service or draft, or busy clients."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    model: str = setting(BUNDLED, help="The model.", choices=MODELS)
    workloads: Names = Names.of(NAMES)
    drafts: Names = Names.of(DRAFTS, "yes,no", help="4 tokens a step, auto, or none.")
    processes: int = setting(
        max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)), help="Processes of the clients.", low=1, high=256
    )
    options: str = setting("", help="Further options of `slipstream up`, as a single word.")
    capacity: bool = setting(False, help="Search for the highest rate.")
    first_token_ms: float = setting(200.0, help="Limit of the search, at p99.")
    per_token_ms: float = setting(10.0, help="Limit of the search, at p99.")
    seconds: float = setting(20.0, help="Length of each rate of the search.", low=1, high=3600)
    first_rate: float = setting(16.0, help="First rate of the search.", low=LEAST_RATE, high=10_000)

    @property
    def scale(self) -> Scale:
        """The scale of the workloads."""
        return CPU_SCALE if self.model == BUNDLED else GPU_SCALE


def make_table(plan: Plan, file: Path | None) -> Table:
    """Results in the order of drafts and workloads; a file keeps what the run leaves out, and is drawn anew."""
    key = ("model", "draft") if plan.capacity else ("model", "draft", "workload")
    places = {"draft": [*DRAFTS.values()], "workload": NAMES}
    return Table(
        file,
        *key,
        order=lambda row: [places[name].index(row[name]) if name in places else row[name] for name in key],
        picture=draw_capacity if plan.capacity else draw_load,
    )


async def measure(plan: Plan, table: Table) -> list[str]:
    """Runs the workloads; returns a line for each one that does not count."""
    chosen, problems = [one for one in workloads(plan.scale) if one.name in plan.workloads], []
    for draft in (DRAFTS[name] for name in plan.drafts):
        for sizes, group in groupby(chosen, lambda workload: workload.sizes):
            async with _server(plan, draft, sizes) as server:
                for workload in group:
                    about = {"model": plan.model, "draft": draft, "workload": workload.name, "options": plan.options}
                    try:
                        report, faults = await _guarded(server, draft, partial(_make, plan, server, workload))
                    except InvalidRunError as error:
                        problems.append(f"{workload.name}, draft {draft}: {error}")
                        print(problems[-1], flush=True)
                        continue
                    clients = {"num_processes": plan.processes, "host": host(plan.device)}
                    table.add({**about, **result_of(report), **clients, "draft_faults": faults})
    return problems


def result_of(report: Row) -> Row:
    """Returns the figures of a whole run, until its last request has ended."""
    latencies = {"first_token": report["ttft_ms"], "per_token": report["time_per_token_ms"]}
    return {
        "num_requests": report["num_requests"],
        "seconds": round(report["seconds"], 2),
        "tokens_per_second": round(report["tokens_per_second"], 1),  # of the output
        "all_tokens_per_second": round(report["all_tokens_per_second"], 1),  # with the prompts
        **{f"{name}_{part}_ms": found[part] for name, found in latencies.items() for part in ("p50", "p99")},
        "message_gap_p50_ms": report["message_gap_ms"]["p50"],
        "cached_share": round(report["cached_share"], 4),  # of the prompts' tokens
        "mean_accept_length": round(report["mean_accept_length"], 3),
        "lateness_p99_ms": report["lateness_ms"]["p99"],  # of the clients, part of the latencies
        "client_cpu_share": round(report["generator_cpu_share"], 3),  # of a core, of the busiest process
    }


@asynccontextmanager
async def _server(plan: Plan, draft: str, sizes: Sizes) -> AsyncIterator[UpServer]:
    options = words(device=plan.device, queue=QUEUE, **sizes._asdict(), **Setup.named(plan.model).up_options(draft))
    async with up_server(*options, *shlex.split(plan.options)) as server:
        await _make(plan, server, warm_up(plan.scale, sizes))
        yield server


def draft_faults(gained: Scrape) -> Row:
    """Returns how often the draft was lost, by cause, and for how long none took part although one was expected."""
    losses = gained.by("cause", "slipstream_draft_losses_total")
    missing_s = round(gained.total("slipstream_draft_missing_seconds_total"), 3)
    return {"losses": {cause: round(count) for cause, count in losses.items() if count}, "missing_s": missing_s}


async def _guarded(server: UpServer, draft: str, work: Callable[[], Awaitable[T]]) -> tuple[T, Row]:
    """Does the work once the draft takes part, if there is to be one; returns its result and the draft's faults.

    Raises InvalidRunError if the draft does not take part all the time, or if a service dies.
    """
    try:
        before = await server.until(lambda now: draft == NONE or now.total(DRAFT_ATTACHED) > 0, DRAFT_TIMEOUT_S)
    except TimeoutError:
        faults = told(draft_faults(await server.metrics()))
        raise InvalidRunError(f"no draft takes part in {DRAFT_TIMEOUT_S:.0f} s; since the start {faults}") from None
    services = server.services()
    result = await work()
    found = draft_faults((await server.metrics()).since(before))
    if draft != NONE and any(found.values()):
        raise InvalidRunError(told(found))
    if server.services() != services:
        raise InvalidRunError("a service died")
    return result, found


async def _make(plan: Plan, server: UpServer, workload: Workload) -> Row:
    """Makes the requests of a workload; returns the report. Raises InvalidRunError."""
    address, processes, arrivals = GrpcServer(server.address), plan.processes, workload.arrivals
    if arrivals:
        run = await open_loop(address, arrivals, arrivals[-1].at_s, DRAIN_S, num_processes=processes)
    else:
        run = await closed_loop(address, workload.sessions, workload.num_clients, num_processes=processes)
    run = replace(run, seconds=run.wall_s)
    return checked(run, run.report(0.0), workload.num_requests)


def checked(run: LoadRun, report: Row, num_requests: int | None = None) -> Row:
    """Returns the report. Raises InvalidRunError if requests failed, or the clients had no time to spare.

    `num_requests`: as many must be completed; None: some may be left or rejected.
    """
    if failed := run.failures:
        raise InvalidRunError(f"{len(failed)} requests failed: {'; '.join(failed[:3])}")
    if num_requests is not None and [record.outcome for record in run.records] != [COMPLETED] * num_requests:
        found = f"{len(run.records)} made, {report['num_rejected']} rejected, {report['num_left']} without an end"
        raise InvalidRunError(f"of {num_requests} requests {report['num_completed']} were completed: {found}")
    if (share := report["generator_cpu_share"]) > MOST_CLIENT_SHARE:
        raise InvalidRunError(f"the busiest client took {share:.2f} of a core: take more --processes")
    return report


async def search(plan: Plan, table: Table) -> list[str]:
    """Searches for the capacity with each draft setting; returns a line for each search that does not count."""
    problems = []
    for draft in (DRAFTS[name] for name in plan.drafts):
        try:
            table.add(await find_capacity(plan, draft))
        except InvalidRunError as error:
            problems.append(f"draft {draft}: {error}")
    return problems


async def find_capacity(plan: Plan, draft: str) -> Row:
    """Serves with a draft setting, and searches for its highest rate. Raises InvalidRunError."""
    tried: list[Row] = []
    async with _server(plan, draft, plan.scale.sizes(256, 10_240)) as server:

        async def make(rate: float) -> Row:
            arrivals = poisson(plan.scale, rate, max(1, round(rate * plan.seconds)), len(NAMES) + 1 + len(tried))
            last_s = arrivals[-1].at_s
            run = await open_loop(
                GrpcServer(server.address), arrivals, last_s, SEARCH_DRAIN_S, num_processes=plan.processes
            )
            return checked(run, run.report(SEARCH_WARM_UP_SHARE * run.seconds))

        async def is_held(rate: float) -> bool:
            report, _ = await _guarded(server, draft, partial(make, rate))
            first_token_ms, per_token_ms = report["ttft_ms"]["p99"], report["time_per_token_ms"]["p99"]
            is_quick = first_token_ms <= plan.first_token_ms and per_token_ms <= plan.per_token_ms
            is_whole = bool(report["num_completed"] == report["num_requests"] > 0)
            row = {"rate": rate, "tokens_per_second": round(report["tokens_per_second"], 1)}
            row |= {"first_token_p99_ms": first_token_ms, "per_token_p99_ms": per_token_ms}
            tried.append(row | {"is_held": is_quick and is_whole})
            print(f"draft {draft}: {told(tried[-1])}", flush=True)
            return is_quick and is_whole

        rate = await highest_rate(is_held, plan.first_rate / plan.scale.rate_divisor)
    limits = {name: getattr(plan, name) for name in ("options", "seconds", "first_token_ms", "per_token_ms")}
    return {
        "model": plan.model,
        "draft": draft,
        **limits,
        "rate": rate,  # requests per second; 0 if even the lowest rate that was tried is too high
        "tried": sorted(tried, key=lambda row: row["rate"]),
        "num_processes": plan.processes,
        "host": host(plan.device),
    }


async def highest_rate(is_held: Callable[[float], Awaitable[bool]], first: float) -> float:
    """Returns the highest rate that is held, to SEARCH_PRECISION; 0 if LEAST_RATE is not.

    Doubles or halves the first rate until one is held and one is not, and then halves the interval between them.
    """
    held, broken, rate = 0.0, inf, first
    while broken > (1 + SEARCH_PRECISION) * held and rate >= LEAST_RATE:
        if await is_held(rate):
            held = rate
        else:
            broken = rate
        rate = 2 * held if broken == inf else (held + broken) / 2
    return held


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Measures whole requests, or searches for the highest rate."""
    table = make_table(plan, file)
    return await (search if plan.capacity else measure)(plan, table)
