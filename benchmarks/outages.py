"""Kills, stops and ends services under streaming clients: every job must end with its tokens, and none may fail."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

from slipstream.benchmarks.models import BUNDLED, EAGLE3, STANDALONE, Setup
from slipstream.benchmarks.runner import DevicePlan, Names, Row, benchmark, host, read_json, told, write_json
from slipstream.benchmarks.stack import FAULTS, SERVICES, UpServer, bundled_options, up_server, words
from slipstream.benchmarks.streams import Streams, in_ms
from slipstream.common.settings import setting
from slipstream.scheduler.metrics import STEP_SECONDS
from slipstream.scheduler.speculation import LEAST_TIMEOUT_CPU_S, LEAST_TIMEOUT_GPU_S

PAUSE_S = 2.0
CALM_S = 1.0
"""Least time without a fault before each fault."""
AROUND_S = 0.5
"""A gap that begins so soon after the fault is the fault's; a later one comes from the return of the service."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a run. On a GPU the bundled models run in float32: tokens in bfloat16 depend on the batch."""

    times: int = setting(20, help="Number of each fault of each service.", low=1, high=10_000)
    faults: Names = Names.of(FAULTS, "kill,stop,term")
    services: Names = Names.of(SERVICES)
    model: str = setting(BUNDLED, help="bundled, or a shape: llama-3.1-8b.")
    mps: str = setting("off", help="On a GPU: on or off.")
    clients: int = 16
    max_new_tokens: int = 600
    seed: int = 1

    @property
    def algorithm(self) -> str:
        """How drafts are made."""
        return STANDALONE if self.model == BUNDLED else EAGLE3

    def options(self) -> tuple[str, ...]:
        """The options of `slipstream up`."""
        if self.model == BUNDLED:
            return bundled_options(self.device, self.clients, self.mps)
        setup = Setup.named(self.model)
        sizes = {"context_tokens": setup.context_tokens, "kv_memory_mib": setup.kv_memory_mib}
        return words(device=self.device, mps=self.mps, slots=self.clients, **sizes, **setup.up_options())


async def measure(plan: Plan) -> Row:
    """Serves, gives all faults in turns, and returns the run as it is in the file of results."""
    rng, calm_gaps = random.Random(plan.seed), []
    around, later, back = (defaultdict[tuple[str, str], list[float]](list) for _ in range(3))
    async with up_server(*plan.options()) as server:
        await server.restored(plan.algorithm)
        streams = Streams(server.address, plan.clients, plan.max_new_tokens, compares=plan.model == BUNDLED)
        undisturbed = await _undisturbed(plan, server, streams)
        async with streams.running():
            await streams.flow(time.monotonic())
            for number, fault, service in product(range(plan.times), plan.faults, plan.services):
                if streams.errors:
                    break
                await streams.settle()
                await asyncio.sleep(rng.uniform(CALM_S, 2 * CALM_S))
                at, key = time.monotonic(), (service, fault)
                calm = streams.longest_gaps(at - CALM_S, at - AROUND_S)
                await _fault(plan, server, streams, service, fault)
                now = time.monotonic()
                calm_gaps += calm
                around[key] += streams.longest_gaps(at, at + AROUND_S)
                later[key] += streams.longest_gaps(at, now, begun_after=at + AROUND_S)
                back[key].append(now - at)
                worst, before = (in_ms(max(gaps, default=0.0)) for gaps in (around[key], calm))
                line = f"worst gap {worst:.0f} ms, {before:.0f} ms just before, back {now - at:.2f} s"
                print(f"{service} {fault} {number + 1}: {line}", flush=True)
    # Gaps without a fault: the longest of each stream in half a second, as around a fault.
    undisturbed |= {"gap_p50_ms": in_ms(median(calm_gaps)), "gap_worst_ms": in_ms(max(calm_gaps))}
    least_s = LEAST_TIMEOUT_CPU_S if plan.device == "cpu" else LEAST_TIMEOUT_GPU_S
    return {
        "host": host(plan.device),
        "plan": asdict(plan),
        "undisturbed": undisturbed,
        # The time for which a step waits for its draft at most, where `--draft-timeout-ms` is not given.
        "watchdog_ms": round(max(2 * undisturbed["step_ms"], 1e3 * least_s), 1),
        "outages": [
            {
                "service": service,
                "fault": fault,
                "times": len(back[service, fault]),
                "gap_p50_ms": in_ms(median(gaps)),
                "gap_worst_ms": in_ms(max(gaps)),
                "later_gap_worst_ms": in_ms(max(later[service, fault], default=0.0)),
                "back_p50_s": round(median(back[service, fault]), 2),
                "back_worst_s": round(max(back[service, fault]), 2),
            }
            for (service, fault), gaps in around.items()
        ],
        "jobs": streams.num_jobs,
        "errors": streams.errors,
    }


async def _undisturbed(plan: Plan, server: UpServer, streams: Streams) -> Row:
    """Runs the undisturbed jobs; returns the mean milliseconds of a decode step, and tokens a second."""
    before, begun = await server.metrics(), time.monotonic()
    await streams.reference()
    seconds, gained = time.monotonic() - begun, (await server.metrics()).since(before)
    step_s, num_steps = (gained.total(f"{STEP_SECONDS.name}_{part}", phase="decode") for part in ("sum", "count"))
    tokens_per_second = round(plan.clients * plan.max_new_tokens / seconds, 1)
    return {"step_ms": round(1e3 * step_s / num_steps, 3), "tokens_per_second": tokens_per_second}


async def _fault(plan: Plan, server: UpServer, streams: Streams, service: str, fault: str) -> None:
    """Gives a service a fault, and waits until all streams flow and everything is back."""
    at = time.monotonic()
    process = await server.fault(service, fault, pause_s=PAUSE_S)
    await streams.flow(at)
    await server.restored(plan.algorithm, without=None if fault == "pause" else process)
    await streams.flow(time.monotonic())


def write_run(run: Row, path: Path | None) -> None:
    """Adds a run to the file. Its rows replace those of the same service, fault, model and device."""

    def key(of: Row, row: Row) -> tuple[str, ...]:
        return (row["service"], row["fault"], *(of["plan"][name] for name in ("model", "device", "mps")))

    new = {key(run, row) for row in run["outages"]}
    runs = [{**old, "outages": [r for r in old["outages"] if key(old, r) not in new]} for old in read_json(path, [])]
    write_json([*(old for old in runs if old["outages"]), run], path)


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Gives services their faults in turns, and prints how the streams do."""
    run = await measure(plan)
    for row in (run["undisturbed"], *run["outages"]):
        print(told(row))
    write_run(run, file)
    print(told(run, "watchdog_ms", "jobs"))
    errors: list[str] = run["errors"]
    return errors
