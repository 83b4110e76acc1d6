"""Latency and throughput against load, with and without drafting: the real services and an open-loop load generator.

    python benchmarks/serving.py --json benchmarks/results/serving_cpu.json --picture benchmarks/results/serving_cpu.png

Requests come as a Poisson process and never wait for answers; latencies count from the due time of a request. Prompts
and outputs have lengths like ShareGPT's (`workload.py` has the parameters), scaled by `--length-scale`: the default, a
quarter, suits the bundled model's context of 1,024 tokens and two CPU cores. First the capacity of each algorithm is
found by saturation; the rates are fractions of the highest, the same arrivals for all algorithms, which take turns at
each rate.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.load_generator import LoadGenerator
from slipstream.benchmarks.load_report import failures, report_of
from slipstream.benchmarks.models import (
    NONE,
    STANDALONE,
    DeviceOption,
    Eagle3Option,
    JsonOption,
    Models,
    StandaloneOption,
    TargetOption,
    draft_of,
)
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.benchmarks.workload import TEMPERATURE, Lengths, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from slipstream.benchmarks.load_report import LoadReport

CLIENTS_PER_SLOT = 2
NUM_REQUESTS = 4096
"""Different requests for the capacity; after these they are repeated."""
MOST_FRACTION = 0.85
"""Beyond this part of the capacity queues grow with the length of the window, and ratios of latencies say nothing."""


# Without slots, so that the command line can read the defaults from the class.
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement."""

    algorithms: tuple[str, ...] = (NONE, STANDALONE)
    fractions: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25)
    """Of the highest capacity."""
    seconds: float = 20.0
    """Length of the arrivals, at each rate."""
    warm_up_s: float = 3.0
    """The part of these, and of the capacity's, that does not count."""
    capacity_seconds: float = 12.0
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
    offered_tokens_per_second: float
    """Of output, by the lengths that were drawn."""
    report: LoadReport
    failures: list[str]
    """There should be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """All rates with all algorithms."""

    host: str
    device: str
    model: str
    plan: Plan
    lengths: Lengths
    temperature: float
    capacity: Mapping[str, LoadReport]
    """By algorithm."""
    runs: list[ServingRun]


async def measure(plan: Plan, device: str, models: Models, lengths: Lengths, **scheduler: Any) -> ServingReport:
    """Starts the services once for each algorithm and measures all rates. `scheduler`: more of its options."""
    workload = Workload(models.target, lengths)
    async with AsyncExitStack() as held:
        addresses = {}
        for algorithm in plan.algorithms:
            stack = await held.enter_async_context(Stack(LOG_DIR / f"serving-{algorithm}", device=device))
            await stack.models(models.with_drafts(algorithm))
            running = stack.scheduler(
                draft_of(algorithm), slots=plan.slots, context_tokens=lengths.context_tokens, **scheduler
            )
            addresses[algorithm] = (await held.enter_async_context(running)).address
        generator = held.enter_context(LoadGenerator())
        capacity = {}
        for algorithm, address in addresses.items():
            capacity[algorithm] = await find_capacity(
                generator,
                workload,
                address,
                num_slots=plan.slots,
                seconds=plan.capacity_seconds,
                warm_up_s=plan.warm_up_s,
                seed=f"{plan.seed} capacity",
            )
            print(f"{algorithm}: capacity {capacity[algorithm].tokens_per_second:.0f} tokens/s", flush=True)
        most = max(capacity.values(), key=lambda report: report.tokens_per_second)
        runs = []
        for fraction in plan.fractions:
            rate = fraction * most.tokens_per_second / workload.mean_output_tokens
            for algorithm, address in addresses.items():
                runs.append(await _run(generator, workload, address, plan, (algorithm, fraction, rate)))
                print(_run_line(runs[-1]), flush=True)
    return ServingReport(
        host=host(device),
        device=device,
        model=models.target.name,
        plan=plan,
        lengths=lengths,
        temperature=TEMPERATURE,
        capacity=capacity,
        runs=runs,
    )


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
    """Saturates a server by more busy clients than it has slots: its `tokens_per_second` are the capacity.

    Raises RuntimeError if requests fail.
    """
    requests = list(itertools.islice(workload.requests(seed), NUM_REQUESTS))
    run = await generator.closed_loop(address, requests, CLIENTS_PER_SLOT * num_slots, seconds)
    report = report_of(run, warm_up_s)
    if failures(run) or not report.tokens_per_second:
        raise RuntimeError(f"no capacity was found: {report}, {failures(run)[:3]}")
    return report


async def _run(
    generator: LoadGenerator, workload: Workload, address: str, plan: Plan, what: tuple[str, float, float]
) -> ServingRun:
    algorithm, fraction, rate = what
    # The same requests at every rate, sooner or later: the rates differ in nothing else.
    arrivals = workload.arrivals(rate, plan.seconds, str(plan.seed))
    run = await generator.open_loop(address, arrivals, plan.seconds, plan.drain_s)
    return ServingRun(
        algorithm=algorithm,
        fraction=fraction,
        offered_requests_per_second=rate,
        offered_tokens_per_second=sum(arrival.request.max_new_tokens for arrival in arrivals) / plan.seconds,
        report=report_of(run, plan.warm_up_s),
        failures=failures(run),
    )


def _run_line(run: ServingRun) -> str:
    report = run.report
    return (
        f"{run.algorithm:<10} {run.offered_requests_per_second:6.2f} requests/s offered: "
        f"{report.tokens_per_second:6.0f} tokens/s, ttft {report.ttft_ms.p50:.0f} / {report.ttft_ms.p99:.0f} ms, "
        f"between tokens {report.inter_token_ms.p50:.1f} / {report.inter_token_ms.p99:.1f} ms, end to end "
        f"{report.end_to_end_ms.p50:.0f} / {report.end_to_end_ms.p99:.0f} ms (p50 / p99), {report.num_completed} "
        f"completed, {report.num_rejected} rejected, sent {report.lateness_ms.p99:.1f} ms late at p99"
    )


def _ratio_lines(report: ServingReport) -> list[str]:
    """Each algorithm over plain decoding in the same run: the capacity, and the latencies at each rate."""
    lines = []
    for algorithm, capacity in report.capacity.items():
        if algorithm == NONE or NONE not in report.capacity:
            continue
        plain = report.capacity[NONE].tokens_per_second
        lines.append(f"{algorithm} over none: capacity {capacity.tokens_per_second / plain:.3f}")
        pairs = {(run.algorithm, run.fraction): run for run in report.runs}
        for fraction in report.plan.fractions:
            ours, theirs = pairs[algorithm, fraction], pairs[NONE, fraction]
            if theirs.offered_tokens_per_second > MOST_FRACTION * plain:
                continue
            ratio = ours.report.end_to_end_ms.p50 / theirs.report.end_to_end_ms.p50
            between = ours.report.inter_token_ms.p50 / theirs.report.inter_token_ms.p50
            first = ours.report.ttft_ms.p50 / theirs.report.ttft_ms.p50
            lines.append(
                f"{algorithm} over none at {ours.offered_requests_per_second:.2f} requests/s, medians: "
                f"to the first token {first:.3f}, between tokens {between:.3f}, end to end {ratio:.3f}"
            )
    return lines


def beyond_warm_up(warm_up_s: float) -> Callable[[float], float]:
    """Returns a check of an option's seconds. It raises BadParameter, to which typer adds the option's name."""

    def check(seconds: float) -> float:
        if not seconds > warm_up_s:
            raise typer.BadParameter(f"more than {warm_up_s:g}, which are for warming up and do not count")
        return seconds

    return check


def main(
    device: DeviceOption = "cpu",
    target: TargetOption = None,
    standalone: StandaloneOption = None,
    eagle3: Eagle3Option = None,
    algorithms: Annotated[str, typer.Option(help="Some of none,standalone,eagle3.")] = "none,standalone",
    fractions: Annotated[str, typer.Option(help="Rates, as fractions of the capacity.")] = "0.2,0.4,0.6,0.8,1.0,1.25",
    seconds: Annotated[
        float, typer.Option(help="Length of the arrivals, at each rate.", callback=beyond_warm_up(Plan.warm_up_s))
    ] = Plan.seconds,
    capacity_seconds: Annotated[
        float, typer.Option(help="For the capacity of each.", callback=beyond_warm_up(Plan.warm_up_s))
    ] = Plan.capacity_seconds,
    length_scale: Annotated[float, typer.Option(help="Times ShareGPT's mean lengths.")] = 0.25,
    context_tokens: Annotated[int, typer.Option(help="Prompt and output together.")] = Lengths.context_tokens,
    slots: Annotated[int, typer.Option(help="Requests that run at the same time.")] = Plan.slots,
    kv_memory_mib: Annotated[int, typer.Option(help="KV pages of both workers together.")] = 512,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = Plan.seed,
    json_file: JsonOption = None,
    picture: Annotated[Path | None, typer.Option(help="The file for a picture of it.")] = None,
) -> None:
    """Measures latency and throughput against load."""
    plan = Plan(
        algorithms=tuple(algorithms.split(",")),
        fractions=tuple(map(float, fractions.split(","))),
        seconds=seconds,
        capacity_seconds=capacity_seconds,
        slots=slots,
        seed=seed,
    )
    models = Models.choose(target=target, standalone=standalone, eagle3=eagle3)
    lengths = Lengths(scale=length_scale, context_tokens=context_tokens)
    report = asyncio.run(measure(plan, device, models, lengths, kv_memory_mib=kv_memory_mib))
    written: dict[str, Any] = asdict(report)
    write_json(written, json_file)
    if picture is not None:
        from slipstream.benchmarks.charts import draw_serving

        draw_serving(written, picture)
    print(f"\n{report.host}; {report.device}; {report.model}; {report.lengths}, T = {TEMPERATURE}; seed {seed}")
    failed = [failure for run in report.runs for failure in run.failures]
    print("\n".join([*_ratio_lines(report), *failed]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
