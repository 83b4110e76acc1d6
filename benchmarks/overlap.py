"""The cost of a step beyond its kernels: the real services, with dummy kernels of a known length."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.benchmarks.models import NUM_DRAFT_TOKENS
from slipstream.benchmarks.runner import DevicePlan, Row, Scenario, Table, benchmark, host, run
from slipstream.benchmarks.stack import Served, Stack
from slipstream.benchmarks.streams import PROMPT, stream_window
from slipstream.cli.load_requests import request
from slipstream.cli.mps import MpsMode

HOST_BLOCKS = "host_blocks"
"""A worker acknowledges a step when its work is done, and every command waits for the acknowledgements it needs."""
RUN_AHEAD = "run_ahead"
"""The streams wait for each other, and steps are sent ahead: the product's own order."""
NUM_CLIENTS = 8
CONTEXT_TOKENS = 1 << 18
WARM_UP_TOKENS = 100
KERNELS_MS = {"cpu": ((3.0, 10.0), (0.3, 1.0)), "cuda": ((0.3, 4.5), (0.1, 0.7))}
MEASURE_S = {"cpu": 4.0, "cuda": 1.5}
REPEATS = {"cpu": 5, "cuda": 1}
"""Number of repeats, by device; in each, all orders are measured in turn."""
WINDOWS = {"cpu": 1, "cuda": 2}
"""Windows of an order at its turn: starting a scheduler on a GPU takes longer than measuring it."""


class Order(NamedTuple):
    """An order of steps: its run-ahead, and the fences it runs with."""

    policy: str
    run_ahead: int
    fence: str = "auto"


ORDERS = {
    "cpu": {MpsMode.OFF: (Order(HOST_BLOCKS, 0), *(Order(RUN_AHEAD, ahead) for ahead in range(3)))},
    "cuda": {
        MpsMode.ON: (
            Order(HOST_BLOCKS, 0, "timeline"),
            *(Order(RUN_AHEAD, ahead, "timeline") for ahead in range(4)),
            *(Order(RUN_AHEAD, ahead, "event") for ahead in (1, 2)),
        ),
        MpsMode.OFF: (
            Order(HOST_BLOCKS, 0, "timeline"),
            *(Order(RUN_AHEAD, ahead, "timeline") for ahead in (1, 2)),
            Order(RUN_AHEAD, 1, "event"),
        ),
    },
}
"""Orders by device and by sharing of the GPU; host blocks is measured first, for the share of the others."""


def lost_ms(row: Row) -> float:
    """Returns the time of a step in which neither worker worked."""
    lost: float = row["step_ms"] - row["busy_ms"]
    return lost


def title_of(row: Row) -> str:
    """Returns the name of a row's order."""
    name = "host blocks" if row["policy"] == HOST_BLOCKS else f"run-ahead {row['run_ahead']}"
    return name if row["fence"] in ("host", "timeline") else f"{name}, {row['fence']}"


async def _measure(device: str, draft_ms: float, verify_ms: float, mps: MpsMode, table: Table) -> None:
    kernels = {"device": device, "draft_ms": draft_ms, "verify_ms": verify_ms, "mps": mps is MpsMode.ON}
    lost_by_host_ms: dict[int, float] = {}

    async def sample(served: Served, scenario: Scenario) -> AsyncIterator[Row]:
        for repeat in range(scenario.about["repeat"], scenario.about["repeat"] + WINDOWS[device]):
            row = {**await _window(device, draft_ms + verify_ms, served), "repeat": repeat}
            lost = lost_by_host_ms.setdefault(repeat, lost_ms(row))
            yield {**row, "lost_share": lost_ms(row) / lost}

    scenarios = []
    for repeat in range(REPEATS[device]):
        for order in ORDERS[device][mps]:
            suffix = "-blocking" if order.policy == HOST_BLOCKS else ""
            options: dict[str, Any] = {
                "verify": f"verify{suffix}",
                "run_ahead": order.run_ahead,
                "fixed_draft_tokens": NUM_DRAFT_TOKENS,
                "slots": NUM_CLIENTS,
                "context_tokens": CONTEXT_TOKENS,
                "dispatch": "acknowledged" if suffix else "together",
                "fence": order.fence,
            }
            about = {**kernels, **order._asdict(), "repeat": WINDOWS[device] * repeat}
            scenarios.append(Scenario(about=about, draft=f"draft{suffix}", options=options))
    async with Stack(device=device, mps=mps) as stack:
        await asyncio.gather(
            stack.dummies(draft_ms, verify_ms),
            stack.dummies(draft_ms, verify_ms, suffix="-blocking", acknowledge_done=True),
        )
        await run(stack, scenarios, sample, table)


async def _window(device: str, kernel_sum_ms: float, served: Served) -> Row:
    requests = [request(PROMPT, CONTEXT_TOKENS // 2, 0.0, 0)] * NUM_CLIENTS
    window = await stream_window(served, requests, warm_up_tokens=WARM_UP_TOKENS, seconds=MEASURE_S[device])
    step_ms = window.mean_ms(window.step_s)
    return {
        "fence": window.fence,
        "kernel_sum_ms": kernel_sum_ms,  # that the dummies were asked for
        "busy_ms": window.mean_ms(window.draft_s + window.verify_s),  # by the workers' stamps
        "step_ms": step_ms,  # from the end of a step to the end of the next, by the stamps
        "elapsed_ms": window.mean_ms(window.elapsed_s),  # by this process's clock
        "ratio": step_ms / kernel_sum_ms,
        "num_steps": window.num_steps,
        "num_clients": NUM_CLIENTS,
        "tokens_per_second": window.tokens_per_second,
        "tokens_sha256": hashlib.sha256(json.dumps(window.first_tokens).encode()).hexdigest(),
        "host": host(device),
    }


@benchmark(DevicePlan)
async def main(plan: DevicePlan, file: Path | None) -> list[str]:
    """Measures the price of a step in each order."""
    table = Table(file)
    for draft_ms, verify_ms in KERNELS_MS[plan.device]:
        for mps in ORDERS[plan.device]:
            await _measure(plan.device, draft_ms, verify_ms, mps, table)
    different = len({row["tokens_sha256"] for row in table.rows}) > 1
    return ["the tokens are not the same in every order"] * different
