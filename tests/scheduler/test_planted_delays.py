"""The step metrics keep the time of the host's clock, and show a worker's delay at its edge: with real services."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from slipstream.benchmarks.stack import Served, Stack
from slipstream.benchmarks.streams import PROMPT, StepSums, TornWindowError, streaming
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.load_requests import Request
from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions
from slipstream.common.rpc.metrics import Scrape, scrape
from slipstream.scheduler.metrics import DRAFT_TO_VERIFY, EDGES, VERIFY_TO_DRAFT, VERIFY_TO_VERIFY
from tests.harness.late_worker import Late

LATE_WORKER = Path(__file__).parents[1] / "harness" / "late_worker.py"
KERNELS_MS = {"draft": (1.0, standalone_dir), "verify": (2.0, target_dir)}
OPTIONS: RequestOptions = {"max_new_tokens": 100_000, "ignore_eos": True}
CLOCK_STEPS, WINDOW_STEPS = 300, 25
NUM_DELAYED = 5
"""Windows with a delay; the median of their growths counts."""
SETTLE_S = 0.1
"""From a change of the delay until all commands that were sent before it are done."""
TRIES = 3
"""The noise of a busy machine may be larger than the delay, once or twice."""


class Delay(NamedTuple):
    """The place of a delay, and the edge at which it must show.

    The steps that are sent ahead hide a host's delay, so it is planted with run-ahead 0.
    """

    late: Late
    edge: str
    run_ahead: int
    has_draft: bool


DELAYS = (
    Delay(Late.STASH, VERIFY_TO_DRAFT, run_ahead=1, has_draft=True),
    Delay(Late.PROPOSED, DRAFT_TO_VERIFY, run_ahead=1, has_draft=True),
    Delay(Late.STASH, VERIFY_TO_VERIFY, run_ahead=1, has_draft=False),
    Delay(Late.DRAFT_COMMAND, VERIFY_TO_DRAFT, run_ahead=0, has_draft=True),
    Delay(Late.VERIFY_COMMAND, VERIFY_TO_VERIFY, run_ahead=0, has_draft=False),
)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_the_metrics_keep_the_clock_and_a_delay_shows_at_its_edge(tmp_path: Path, run_ahead: int) -> None:
    control = tmp_path / "control"
    control.write_bytes(bytes([Late.NOTHING]))
    async with Stack(tmp_path / "logs") as stack:
        for role, (length_ms, model) in KERNELS_MS.items():
            program = (sys.executable, "-P", str(LATE_WORKER), str(control), role)
            await stack.worker(role, program=program, length_ms=length_ms, model=model())
        async with (
            stack.scheduler("draft", run_ahead=run_ahead, slots=4, context_tokens=1 << 18) as served,
            AsyncClient(served.address) as client,
        ):
            async with streaming(client, [Request(PROMPT, OPTIONS)] * 4):
                gained, seconds = await window(served, CLOCK_STEPS)
            assert StepSums.of(gained).step_s == pytest.approx(seconds, rel=0.02)
            for delay in (delay for delay in DELAYS if delay.run_ahead == run_ahead):
                found: list[dict[str, float]] = []
                async with streaming(client, [Request(PROMPT, {**OPTIONS, "speculation": delay.has_draft})] * 4):
                    while len(found) < TRIES and not any(is_largest(growth, delay.edge) for growth in found):
                        found.append(await growths_us(served, control, delay.late))
                assert is_largest(found[-1], delay.edge), (delay, found)


def is_largest(growth: dict[str, float], edge: str) -> bool:
    """True if the bubble of this edge grew by more than those of the others."""
    return growth[edge] > max(100.0, *(abs(grown) for other, grown in growth.items() if other != edge))


async def growths_us(served: Served, control: Path, late: Late) -> dict[str, float]:
    """The growth of the bubbles per step with a delay, by edge: medians of windows that take turns with others.

    The base of a window is the mean of its neighbours, so that a steady growth cancels.
    """
    windows = []
    for number in range(2 * NUM_DELAYED + 1):
        with control.open("r+b") as file:  # in place: the workers have mapped it
            file.write(bytes([late if number % 2 else Late.NOTHING]))
        await asyncio.sleep(SETTLE_S)
        gained, _ = await window(served, WINDOW_STEPS)
        num_steps = StepSums.of(gained).num_steps
        windows.append(
            {
                e: 1e6 * gained.total("slipstream_bubble_seconds_total", phase="decode", edge=e) / num_steps
                for e in EDGES
            }
        )
    delayed = list(zip(windows[::2], windows[1::2], windows[2::2], strict=False))
    return {edge: median(w[edge] - (before[edge] + after[edge]) / 2 for before, w, after in delayed) for edge in EDGES}


async def window(served: Served, num_steps: int) -> tuple[Scrape, float]:
    """The metrics of so many steps at least, and their time by this process's clock."""
    first, begun = await read(served)
    while True:
        await asyncio.sleep(0.05)
        last, ended = await read(served)
        gained = last.since(first)
        try:
            if StepSums.of(gained).num_steps >= num_steps:
                return gained, ended - begun
        except TornWindowError:
            continue


async def read(served: Served) -> tuple[Scrape, float]:
    """A scrape, and the clock halfway through it."""
    before = time.monotonic()
    metrics = await scrape(served.metrics_port)
    return metrics, (before + time.monotonic()) / 2
