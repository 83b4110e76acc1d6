"""Whole requests through `slipstream up` and the Python client, with a draft and without.

Workloads, and their seconds on an H200 with the 8B shape. Those up to open32 have a server with 64 slots and a context
of 4,096 tokens, the others one with 256 slots and 10,240 tokens; with the starts of both, all take 5 minutes with each
draft setting.

- chat (11): 256 requests, 64 in flight, lengths of chats, about 190 tokens in and out
- long (6): 128 requests, 64 in flight, 1,024 tokens in and 128 out
- prefill (5): 64 requests, 16 in flight, 2,000 tokens in and 2 out
- open16 (20), open32 (17), open48 (18): chats as a Poisson process, 16, 32 or 48 a second, for 15, 12 or 10 s
- chat256 (14): 512 chats, 256 in flight
- turns (16): 32 conversations of 6 turns, 100 to 200 tokens in and out, behind a common system prompt of 1,000
- ctx8k (7): 24 requests, 8 in flight, 8,000 tokens in and 64 out

Latencies of open workloads count from the planned arrivals. `--capacity` instead searches for the highest rate of chats
that keeps limits of the latencies, which takes another 5 minutes with each draft setting.

    python benchmarks/load.py --device cuda --model llama-3.1-8b --json benchmarks/results/load_h200.json
    python benchmarks/load.py --device cuda --model llama-3.1-8b --capacity --json benchmarks/results/capacity_h200.json

With `--drafts yes`, `auto` or `no`, and `--workloads`, a run is made in pieces: a file keeps what a run leaves out, and
is drawn anew. Without options the bundled model serves on a CPU, and lengths, requests, clients and slots are an
eighth: a minute or two. Status 1 if a request had not one end and the tokens that it asked for, a service died, a draft
was lost or did not take part, or the clients were the limit, which the CPU time of the busiest of their processes
shows. The environment variable SLIPSTREAM_BENCHMARK_LOG_DIR names a folder for the logs of the services.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.charts import draw_capacity, draw_load
from slipstream.benchmarks.load_generator import COMPLETED, closed_loop, open_loop
from slipstream.benchmarks.load_report import failures, report_of
from slipstream.benchmarks.load_results import CapacityResult, DraftFaults, LoadResult, TriedRate, merged
from slipstream.benchmarks.load_workloads import CPU_SCALE, GPU_SCALE, NAMES, poisson, warm_up, workloads
from slipstream.benchmarks.models import (
    BUNDLED,
    EAGLE3,
    EAGLE3_AUTO,
    NONE,
    DeviceOption,
    JsonOption,
    Setup,
    known_names,
)
from slipstream.benchmarks.result_files import host, read_rows, write_rows
from slipstream.benchmarks.stack import words
from slipstream.benchmarks.up_server import up_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from slipstream.benchmarks.load_generator import LoadRun
    from slipstream.benchmarks.load_report import LoadReport
    from slipstream.benchmarks.load_workloads import LoadWorkload, Scale, Sizes
    from slipstream.benchmarks.up_server import UpServer
    from slipstream.common.rpc.scrape import Scrape

MODELS = (BUNDLED, "llama-3.2-1b", "llama-3.1-8b")
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
class Plan:
    """The settings of a measurement."""

    model: str = BUNDLED
    device: str = "cpu"
    drafts: tuple[str, ...] = (EAGLE3, NONE)
    names: tuple[str, ...] = NAMES
    options: str = ""
    """Further options of `slipstream up`."""
    num_processes: int = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    """Processes of the clients."""

    @property
    def scale(self) -> Scale:
        """The scale of the workloads."""
        return CPU_SCALE if self.model == BUNDLED else GPU_SCALE


@dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of a search for the capacity."""

    first_token_ms: float = 200.0
    per_token_ms: float = 10.0
    seconds: float = 20.0
    """Length of each rate."""
    first_rate: float = 16.0
    """Requests per second."""


async def measure(plan: Plan, keep: Callable[[LoadResult], None]) -> list[str]:
    """Runs the workloads and `keep`s their results; returns a line for each one that does not count."""
    chosen, problems = [one for one in workloads(plan.scale) if one.name in plan.names], []
    about = {"model": plan.model, "options": plan.options, "num_processes": plan.num_processes}
    for draft in plan.drafts:
        for sizes, group in groupby(chosen, lambda workload: workload.sizes):
            async with _server(plan, draft, sizes) as server:
                for workload in group:
                    try:
                        report, faults = await _run(plan, server, draft, workload)
                    except InvalidRunError as error:
                        problems.append(f"{workload.name}, draft {draft}: {error}")
                        print(problems[-1], flush=True)
                        continue
                    where = {"draft": draft, "workload": workload.name, "host": host(plan.device)}
                    keep(LoadResult.of(report, draft_faults=faults, **about, **where))
    return problems


@asynccontextmanager
async def _server(plan: Plan, draft: str, sizes: Sizes) -> AsyncIterator[UpServer]:
    setup = Setup.named(plan.model)
    options = words(
        device=plan.device,
        slots=sizes.slots,
        context_tokens=sizes.context_tokens,
        queue=QUEUE,
        **setup.up_options(draft),
    )
    async with up_server(*options, *shlex.split(plan.options)) as server:
        await _make(plan, server, warm_up(plan.scale, sizes))
        if (faults := DraftFaults.of(await server.metrics())).losses:
            print(f"warm-up, draft {draft}: {faults}", flush=True)
        yield server


async def _run(plan: Plan, server: UpServer, draft: str, workload: LoadWorkload) -> tuple[LoadReport, DraftFaults]:
    before = await _ready(server, draft)
    report = await _make(plan, server, workload)
    return report, await _check_draft(server, draft, before)


async def _check_draft(server: UpServer, draft: str, before: Scrape) -> DraftFaults:
    """Returns the draft's losses since `before`. Raises InvalidRunError if there are any, unless none is to draft."""
    faults = DraftFaults.of((await server.metrics()).since(before))
    if draft != NONE and faults:
        raise InvalidRunError(str(faults))
    return faults


async def _ready(server: UpServer, draft: str) -> Scrape:
    """Waits until the draft takes part, if there is to be one; returns the metrics. Raises InvalidRunError."""
    try:
        return await server.until(lambda metrics: draft == NONE or metrics.total(DRAFT_ATTACHED) > 0, DRAFT_TIMEOUT_S)
    except TimeoutError:
        faults = DraftFaults.of(await server.metrics())
        raise InvalidRunError(f"no draft takes part after {DRAFT_TIMEOUT_S:.0f} s; since the start {faults}") from None


async def _make(plan: Plan, server: UpServer, workload: LoadWorkload) -> LoadReport:
    before = server.services()
    if workload.arrivals:
        last_s = workload.arrivals[-1].at_s
        run = await open_loop(server.address, workload.arrivals, last_s, DRAIN_S, num_processes=plan.num_processes)
    else:
        run = await closed_loop(
            server.address, workload.sessions, workload.num_clients, num_processes=plan.num_processes
        )
    report = report_of(replace(run, seconds=run.wall_s), 0.0)
    check(run, report, workload.num_requests)
    if server.services() != before:
        raise InvalidRunError("a service died")
    return report


def check(run: LoadRun, report: LoadReport, num_requests: int) -> None:
    """Raises InvalidRunError unless all requests were completed, by clients that had time to spare."""
    if failed := failures(run):
        raise InvalidRunError(f"{len(failed)} requests failed: {'; '.join(failed[:3])}")
    if len(run.records) != num_requests or any(record.outcome != COMPLETED for record in run.records):
        found = f"{len(run.records)} made, {report.num_rejected} rejected, {report.num_left} without an end"
        raise InvalidRunError(f"of {num_requests} requests {report.num_completed} were completed: {found}")
    _check_clients(report)


def _check_clients(report: LoadReport) -> None:
    if report.generator_cpu_share > MOST_CLIENT_SHARE:
        share = f"{report.generator_cpu_share:.2f} of a core"
        raise InvalidRunError(f"the busiest client took {share}: take more --processes")


async def find_capacity(plan: Plan, search: Search, draft: str) -> CapacityResult:
    """Serves with one draft setting, and searches for its highest rate. Raises InvalidRunError."""
    tried: list[TriedRate] = []
    async with _server(plan, draft, plan.scale.sizes(256, 10_240)) as server:

        async def is_held(rate: float) -> bool:
            before, services = await _ready(server, draft), server.services()
            mark = len(NAMES) + 1 + len(tried)
            arrivals = poisson(plan.scale, rate, max(1, round(rate * search.seconds)), mark)
            run = await open_loop(
                server.address, arrivals, arrivals[-1].at_s, SEARCH_DRAIN_S, num_processes=plan.num_processes
            )
            report = report_of(run, SEARCH_WARM_UP_SHARE * run.seconds)
            if failed := failures(run):
                raise InvalidRunError(f"{draft} at {rate:g}/s: {'; '.join(failed[:3])}")
            _check_clients(report)
            await _check_draft(server, draft, before)
            if server.services() != services:
                raise InvalidRunError("a service died")
            tried.append(_tried(search, rate, report))
            print(f"draft {draft}: {tried[-1]}", flush=True)
            return tried[-1].is_held

        rate = await highest_rate(is_held, search.first_rate / plan.scale.rate_divisor)
    return CapacityResult(
        model=plan.model,
        draft=draft,
        options=plan.options,
        seconds=search.seconds,
        first_token_ms=search.first_token_ms,
        per_token_ms=search.per_token_ms,
        rate=rate,
        tried=tuple(sorted(tried, key=lambda one: one.rate)),
        num_processes=plan.num_processes,
        host=host(plan.device),
    )


def _tried(search: Search, rate: float, report: LoadReport) -> TriedRate:
    first_token, per_token = report.ttft_ms, report.time_per_token_ms
    keeps = first_token.p99 <= search.first_token_ms and per_token.p99 <= search.per_token_ms
    return TriedRate(
        rate=rate,
        tokens_per_second=round(report.tokens_per_second, 1),
        first_token_p99_ms=first_token.p99,
        per_token_p99_ms=per_token.p99,
        is_held=keeps and report.num_completed == report.num_requests > 0,
    )


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


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = Plan.model,
    names: Annotated[str, typer.Option("--workloads", help="By commas.")] = ",".join(NAMES),
    drafts: Annotated[str, typer.Option(help="4 tokens a step, auto, or none: yes,auto,no.")] = "yes,no",
    processes: Annotated[int, typer.Option(help="Processes of the clients.", min=1)] = Plan.num_processes,
    options: Annotated[str, typer.Option(help="Further options of `slipstream up`, in one word.")] = Plan.options,
    capacity: Annotated[bool, typer.Option("--capacity", help="Search for the highest rate.")] = False,
    first_token_ms: Annotated[float, typer.Option(help="Limit of the search, at p99.")] = Search.first_token_ms,
    per_token_ms: Annotated[float, typer.Option(help="Limit of the search, at p99.")] = Search.per_token_ms,
    seconds: Annotated[float, typer.Option(help="Length of each rate of the search.", min=1)] = Search.seconds,
    first_rate: Annotated[float, typer.Option(help="First rate of the search.", min=LEAST_RATE)] = Search.first_rate,
    device: DeviceOption = Plan.device,
    json_file: JsonOption = None,
) -> None:
    """Measures whole requests, or searches for the highest rate."""
    plan = Plan(
        model=known_names("--model", model, MODELS)[0],
        device=device,
        drafts=tuple(DRAFTS[name] for name in known_names("--drafts", drafts, DRAFTS)),
        names=known_names("--workloads", names, NAMES),
        options=options,
        num_processes=processes,
    )
    if capacity:
        search = Search(
            first_token_ms=first_token_ms, per_token_ms=per_token_ms, seconds=seconds, first_rate=first_rate
        )
        problems = asyncio.run(_search(plan, search, json_file))
    else:
        problems = asyncio.run(measure(plan, partial(_keep, json_file)))
    sys.exit("\n".join(problems) if problems else 0)


def _keep(path: Path | None, result: LoadResult) -> None:
    results = merged(read_rows(path, LoadResult.from_json), result)
    write_rows(results, path)
    if path is not None:
        draw_load(results, path.with_suffix(".png"))
    print(
        f"{result.model}, draft {result.draft}, {result.workload}: {result.tokens_per_second:,.0f} output tokens/s, "
        f"{result.all_tokens_per_second:,.0f} of all; first token {result.first_token_p50_ms:.0f} ms "
        f"(p99 {result.first_token_p99_ms:.0f}), per token {result.per_token_p50_ms:.2f} ms "
        f"(p99 {result.per_token_p99_ms:.2f}), messages {result.message_gap_p50_ms:.1f} ms; accept length "
        f"{result.mean_accept_length:.2f}; cached {100 * result.cached_share:.0f} %; clients' CPU "
        f"{result.client_cpu_share:.2f}; {result.draft_faults}; {result.seconds:.1f} s",
        flush=True,
    )


async def _search(plan: Plan, search: Search, path: Path | None) -> list[str]:
    problems = []
    for draft in plan.drafts:
        try:
            found = await find_capacity(plan, search, draft)
        except InvalidRunError as error:
            problems.append(str(error))
            continue
        results = merged(read_rows(path, CapacityResult.from_json), found)
        write_rows(results, path)
        if path is not None:
            draw_capacity(results, path.with_suffix(".png"))
        print(f"{plan.model}, draft {draft}: {found.rate:g} requests/s", flush=True)
    return problems


if __name__ == "__main__":
    typer.run(main)
