"""Are the step metrics true? Their sums against the host's clock, and delays of a known length at each edge in turn.

    python benchmarks/step_check.py --device cpu --json benchmarks/results/step_check_cpu.json
    python benchmarks/step_check.py --device cuda --json benchmarks/results/step_check_h200.json

Three real processes, four clients that stream, no request that comes or goes. A thousand and more steps are summed up
by the metrics and by the host's clock, which is read when the scheduler has a result in hand. Then 0.5 ms are put at an
edge, for a block of steps between two blocks without: on a producer's stream, behind its end stamp and before its
signal; or in the scheduler, before it sends a command, with run-ahead 0. What the blocks differ in is the table. Exits
with 1 if a sum is off by more than 1 %, or if a delay does not show at its edge, and only there, within 10 %.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.delayed_plan import DelayPlan
from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.step_check_services import NUM_CLIENTS, Served, StepCheckServices, step_check_stack
from slipstream.benchmarks.step_check_table import (
    CYCLES,
    DELAYS,
    LEAST_STEPS,
    ClockCheck,
    DelayCheck,
    blocks_of,
    clock_check,
    clock_line,
    delay_check,
    delay_lines,
    growths,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.benchmarks.step_check_marks import Mark
    from slipstream.benchmarks.step_check_services import StepCheckScheduler

DUMMY_MS = {"cpu": ((3.0, 10.0),), "cuda": ((0.3, 4.5), (0.1, 0.7))}
PARTS = {"cpu": "dummy,bundled", "cuda": "dummy,8b"}
MODELS = {"8b": "llama-3.1-8b", "bundled": "bundled"}
DELAY_US = 500.0
BLOCK_STEPS = 10
FIRST_STEP = {1: 1201, 0: 41}
"""By run-ahead: before, nothing is delayed; with a step ahead that is what the host's clock is compared with."""
BLOCKS_COUNTED = {"cpu": {1: 24, 0: 36}, "cuda": {1: 10, 0: 16}}
"""With each delay, at least, by run-ahead; the middle one counts. Without run-ahead messages add their own noise."""


@dataclass(slots=True, kw_only=True)
class Part:
    """What was found with one pair of models."""

    name: str
    fence: str = ""
    mps: bool = False
    clocks: list[ClockCheck] = field(default_factory=list)
    delays: list[DelayCheck] = field(default_factory=list)
    error: str | None = None
    """Why it did not come to its end."""
    took_s: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether all was found, and as it must be."""
        num_clocks = 2
        is_complete = self.error is None and len(self.clocks) == num_clocks and len(self.delays) == len(DELAYS)
        has_passed = [check.passes for check in self.clocks] + [check.passes for check in self.delays]
        return is_complete and all(has_passed)

    def lines(self) -> list[str]:
        """For people."""
        fences = f"{self.fence} fences, MPS {'on' if self.mps else 'off'}"
        lines = ["", f"{self.name} ({fences}, {self.took_s:.0f} s)", *map(clock_line, self.clocks)]
        lines += [f"growth in us per step with {DELAY_US:g} us at an edge:", *delay_lines(self.delays)]
        return lines if self.error is None else [*lines, f"ended early: {self.error}"]


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    parts: Annotated[str | None, typer.Option(help="Of dummy, 8b and bundled, with commas between them.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write what was found.")] = None,
) -> None:
    """Checks the step metrics against the host's clock and against delays."""
    if device not in DUMMY_MS:
        raise typer.BadParameter(" or ".join(DUMMY_MS), param_hint="--device")
    found = asyncio.run(_check_all(device, _served(device, (parts or PARTS[device]).split(",")), json_file))
    if not all(part.passes for part in found):
        raise SystemExit(1)


def _served(device: str, parts: list[str]) -> list[Served]:
    unknown = set(parts) - {"dummy", *MODELS}
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there is no such part", param_hint="--parts")
    served: list[Served] = []
    for part in parts:
        if part in MODELS:
            served.append(Served.models(device, MODELS[part]))
        else:
            served += [Served.dummies(device, *lengths) for lengths in DUMMY_MS[device]]
    return served


async def _check_all(device: str, served: Sequence[Served], json_file: Path | None) -> list[Part]:
    """All workers start at once, as most of them take their time; one pair at a time works."""
    parts = [Part(name=each.name) for each in served]
    with TemporaryDirectory(prefix="slipstream-") as folder:
        async with step_check_stack(device) as stack:
            services = [StepCheckServices(stack, each, Path(folder) / str(n)) for n, each in enumerate(served)]
            started = await asyncio.gather(*(each.start() for each in services), return_exceptions=True)
            for part, each, failure in zip(parts, services, started, strict=True):
                # What goes wrong is written down with the rest, so that the other parts are not lost.
                try:
                    if failure is not None:
                        raise failure
                    await _fill(part, each, BLOCKS_COUNTED[device])
                except Exception as error:
                    part.error = repr(error)
                _write(json_file, device, parts)
                print(*part.lines(), sep="\n", flush=True)
    return parts


async def _fill(part: Part, services: StepCheckServices, num_blocks: dict[int, int]) -> None:
    started = time.monotonic()
    try:
        for run_ahead, cycle in CYCLES.items():
            first_step = FIRST_STEP[run_ahead]
            plan = DelayPlan(delay_us=DELAY_US, first_step=first_step, block_steps=BLOCK_STEPS, cycle=cycle)
            await _check(part, services, plan, run_ahead, num_blocks[run_ahead])
    finally:
        part.took_s = time.monotonic() - started


async def _check(part: Part, services: StepCheckServices, plan: DelayPlan, run_ahead: int, num_blocks: int) -> None:
    """All that one scheduler is good for."""
    async with services.scheduler(plan, run_ahead) as scheduler:
        part.fence, part.mps = scheduler.fence, scheduler.has_mps
        try:
            for is_plain in (False, True):
                await _stream(scheduler, plan, run_ahead, is_plain=is_plain, num_blocks=num_blocks)
        finally:
            _take_in(part, scheduler.marks(), plan, run_ahead)


async def _stream(
    scheduler: StepCheckScheduler, plan: DelayPlan, run_ahead: int, *, is_plain: bool, num_blocks: int
) -> None:
    delays = [delay for delay in DELAYS if (delay.run_ahead, delay.is_plain) == (run_ahead, is_plain)]

    def is_enough(marks: list[Mark]) -> bool:
        blocks = blocks_of(marks, plan, NUM_CLIENTS)
        return all(len(growths(blocks, delay)) >= num_blocks for delay in delays)

    await scheduler.stream_until(is_enough, is_plain=is_plain)


def _take_in(part: Part, marks: Sequence[Mark], plan: DelayPlan, run_ahead: int) -> None:
    blocks = blocks_of(marks, plan, NUM_CLIENTS)
    if run_ahead:
        clocks = [clock_check(blocks, run_ahead, is_plain=False, with_delays=delays) for delays in (False, True)]
        part.clocks += [check for check in clocks if check is not None]
    checks = [delay_check(blocks, delay, plan) for delay in DELAYS if delay.run_ahead == run_ahead]
    part.delays += [check for check in checks if check is not None]


def _write(json_file: Path | None, device: str, parts: list[Part]) -> None:
    if json_file is None:
        return
    found = {
        "device": device,
        "host": host(device),
        "delay_us": DELAY_US,
        "num_clients": NUM_CLIENTS,
        "least_steps": LEAST_STEPS,
        "parts": [asdict(part) | {"passes": part.passes} for part in parts],
    }
    json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
