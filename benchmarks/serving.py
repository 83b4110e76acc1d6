"""Latency and throughput against load, with and without drafting: the real services and an open-loop load generator.

    python benchmarks/serving.py --json benchmarks/results/serving_cpu.json --picture benchmarks/results/serving_cpu.png

Requests come as a Poisson process and never wait for answers; latencies count from when a request was to be made.
Prompts and outputs have lengths like ShareGPT's (`lengths.py` has the parameters), scaled by `--length-scale`: the
default, a quarter, suits the bundled model's context of 1,024 tokens and two CPU cores. First the capacity of each
algorithm is found by saturation; the rates are fractions of the highest, the same arrivals for all algorithms, which
take turns at each rate.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.capacity import find_capacity
from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.lengths import Lengths
from slipstream.benchmarks.load_generator import LoadGenerator
from slipstream.benchmarks.load_report import failures, report_of
from slipstream.benchmarks.model_options import (
    DeviceOption,
    Eagle3Option,
    JsonOption,
    PictureOption,
    StandaloneOption,
    TargetOption,
    chosen_models,
)
from slipstream.benchmarks.serving_stack import NONE, STANDALONE, Models, ServingStack
from slipstream.benchmarks.serving_table import ratio_lines, run_line
from slipstream.benchmarks.warm_up import beyond_warm_up
from slipstream.benchmarks.workload import TEMPERATURE, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.benchmarks.load_report import LoadReport

LOG_DIR = Path("build/benchmarks")


# Without slots, so that the command line can read the defaults from the class.
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    algorithms: tuple[str, ...] = (NONE, STANDALONE)
    fractions: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25)
    """Of the highest capacity."""
    seconds: float = 20.0
    """In which requests come, at each rate."""
    warm_up_s: float = 3.0
    """Of these and of the capacity's, what does not count."""
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
    """The whole."""

    host: str
    device: str
    model: str
    plan: Plan
    lengths: Lengths
    temperature: float
    capacity: Mapping[str, LoadReport]
    """By algorithm."""
    runs: list[ServingRun]


async def measure(plan: Plan, models: Models, lengths: Lengths, scheduler: tuple[str, ...] = ()) -> ServingReport:
    """Starts the services once for each algorithm and measures all rates. `scheduler`: more of its arguments."""
    workload = Workload(models.target, lengths)
    arguments = (
        *("--device", models.device, "--slots", str(plan.slots)),
        *("--context-tokens", str(lengths.context_tokens), *scheduler),
    )
    async with AsyncExitStack() as held:
        addresses = {}
        for algorithm in plan.algorithms:
            services = ServingStack.start(LOG_DIR / f"serving-{algorithm}", models.with_draft(algorithm))
            stack = await held.enter_async_context(services)
            addresses[algorithm] = await held.enter_async_context(stack.scheduler(algorithm, arguments=arguments))
        generator = held.enter_context(LoadGenerator())
        capacity = {}
        for algorithm, address in addresses.items():
            capacity[algorithm] = await _capacity(generator, workload, address, plan)
            print(f"{algorithm}: capacity {capacity[algorithm].tokens_per_second:.0f} tokens/s", flush=True)
        most = max(capacity.values(), key=lambda report: report.tokens_per_second)
        runs = []
        for fraction in plan.fractions:
            rate = fraction * most.tokens_per_second / workload.mean_output_tokens
            for algorithm, address in addresses.items():
                runs.append(await _run(generator, workload, address, plan, (algorithm, fraction, rate)))
                print(run_line(runs[-1]), flush=True)
    return ServingReport(
        host=host(models.device),
        device=models.device,
        model=models.target.name,
        plan=plan,
        lengths=lengths,
        temperature=TEMPERATURE,
        capacity=capacity,
        runs=runs,
    )


async def _capacity(generator: LoadGenerator, workload: Workload, address: str, plan: Plan) -> LoadReport:
    return await find_capacity(
        generator,
        workload,
        address,
        num_slots=plan.slots,
        seconds=plan.capacity_seconds,
        warm_up_s=plan.warm_up_s,
        seed=f"{plan.seed} capacity",
    )


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


def main(
    device: DeviceOption = "cpu",
    target: TargetOption = None,
    standalone: StandaloneOption = None,
    eagle3: Eagle3Option = None,
    algorithms: Annotated[str, typer.Option(help="What drafts: some of none,standalone,eagle3.")] = "none,standalone",
    fractions: Annotated[str, typer.Option(help="Rates, as fractions of the capacity.")] = "0.2,0.4,0.6,0.8,1.0,1.25",
    seconds: Annotated[
        float, typer.Option(help="In which requests come, at each rate.", callback=beyond_warm_up(Plan.warm_up_s))
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
    picture: PictureOption = None,
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
    models = chosen_models(target=target, standalone=standalone, eagle3=eagle3, device=device)
    lengths = Lengths(scale=length_scale, context_tokens=context_tokens)
    report = asyncio.run(measure(plan, models, lengths, ("--kv-memory-mib", str(kv_memory_mib))))
    written: dict[str, Any] = asdict(report)
    if json_file is not None:
        json_file.write_text(json.dumps(written, indent=1) + "\n")
    if picture is not None:
        from slipstream.benchmarks.serving_picture import draw

        draw(written, picture)
    print(f"\n{report.host}; {report.device}; {report.model}; {report.lengths}, T = {TEMPERATURE}; seed {seed}")
    failed = [failure for run in report.runs for failure in run.failures]
    print("\n".join([*ratio_lines(report), *failed]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
