"""The cost of a step beyond its kernels: the real services, with dummy kernels of a known length.

Eight clients stream while metrics are on. The orders of steps take turns within each repeat, so that noise of the
machine hits all of them. On a GPU both kinds of fences are measured, and workers with and without MPS. The figure is
what a step loses (step - busy) under run-ahead 1 as a share of what it loses when the host blocks on each call, in the
same repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import typer

from slipstream.benchmarks.models import NUM_DRAFT_TOKENS, DeviceOption, JsonOption
from slipstream.benchmarks.result_files import host, read_rows, write_rows
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.stream_window import PROMPT, stream_window
from slipstream.cli.up.mps import MpsMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from slipstream.benchmarks.stream_window import Window
    from slipstream.client.requests import RequestOptions

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One window of one order; times are means per decode step."""

    device: str
    draft_ms: float
    verify_ms: float
    policy: str
    """`Order.name`."""
    run_ahead: int
    fence: str = "host"
    mps: bool = False
    repeat: int
    kernel_sum_ms: float
    """The length that the dummy kernels were asked to have."""
    busy_ms: float
    """Their length by the workers' stamps."""
    step_ms: float
    """From the end of a step to the end of the next, by the stamps."""
    lost_share: float | None = None
    """step - busy, as a share of that of host blocks in the same repeat."""
    elapsed_ms: float
    """The window's time by this process's clock, over its steps."""
    ratio: float
    """step_ms / kernel_sum_ms."""
    num_steps: int
    num_clients: int
    tokens_per_second: float
    tokens_sha256: str = ""
    """Hash of the first tokens of all clients: the same in every order."""
    host: str

    @property
    def lost_ms(self) -> float:
        """Time of a step in which neither worker worked."""
        return self.step_ms - self.busy_ms

    @property
    def title(self) -> str:
        """The order, for people."""
        name = "host blocks" if self.policy == HOST_BLOCKS else f"run-ahead {self.run_ahead}"
        return name if self.fence in ("host", "timeline") else f"{name}, {self.fence}"


def with_shares(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The same with `lost_share` filled in, also for results that were written without; other orders are left out."""
    of_host = {(m.draft_ms, m.verify_ms, m.mps, m.repeat): m.lost_ms for m in measurements if m.policy == HOST_BLOCKS}
    return [
        replace(m, lost_share=m.lost_ms / of_host[m.draft_ms, m.verify_ms, m.mps, m.repeat])
        for m in measurements
        if m.policy in (HOST_BLOCKS, RUN_AHEAD) and (m.draft_ms, m.verify_ms, m.mps, m.repeat) in of_host
    ]


def read_measurements(path: Path) -> list[Measurement]:
    """Reads a result file. Raises ValueError for a file of another kind."""
    return with_shares(read_rows(path, Measurement))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order of steps to measure: its run-ahead, and the fences and the GPU sharing it runs with."""

    name: str
    run_ahead: int
    fence: str = "auto"
    """On a GPU: timeline or event."""
    has_mps: bool = False


def orders_of(device: str) -> tuple[Order, ...]:
    """The orders that are compared on a CPU or on a GPU; host blocks come before those that are held against them."""
    if device == "cpu":
        return (Order(name=HOST_BLOCKS, run_ahead=0), *(Order(name=RUN_AHEAD, run_ahead=ahead) for ahead in range(3)))

    def order(run_ahead: int, fence: str, has_mps: bool, name: str = RUN_AHEAD) -> Order:
        return Order(name=name, run_ahead=run_ahead, fence=fence, has_mps=has_mps)

    return (
        order(0, "timeline", True, HOST_BLOCKS),
        *(order(ahead, "timeline", True) for ahead in range(4)),
        *(order(ahead, "event", True) for ahead in (1, 2)),
        order(0, "timeline", False, HOST_BLOCKS),
        *(order(ahead, "timeline", False) for ahead in (1, 2)),
        order(1, "event", False),
    )


def main(device: DeviceOption = "cpu", json_file: JsonOption = None) -> None:
    """Measures the price of a step in each order."""
    measurements: list[Measurement] = []

    def keep(group: Sequence[Measurement]) -> None:
        measurements.extend(with_shares(group))
        write_rows(measurements, json_file)

    asyncio.run(_measure_all(device, keep))
    if len({measurement.tokens_sha256 for measurement in measurements}) > 1:
        raise SystemExit("the tokens are not the same in every order")


async def _measure_all(device: str, keep: Callable[[Sequence[Measurement]], None]) -> None:
    """`keep` gets the measurements of each group, also of one that failed."""
    for kernels_ms in KERNELS_MS[device]:
        for _, orders in groupby(orders_of(device), attrgetter("has_mps")):
            group: list[Measurement] = []
            try:
                async for m in _measure_group(device, *kernels_ms, [*orders] * REPEATS[device]):
                    group.append(m)
                    order = f"{m.draft_ms:g} + {m.verify_ms:g} ms, {m.title}, MPS {m.mps}, repeat {m.repeat}"
                    print(f"{order}: {m.step_ms:.3f} ms a step", flush=True)
            finally:
                keep(group)


async def _measure_group(
    device: str, draft_ms: float, verify_ms: float, turns: Sequence[Order]
) -> AsyncIterator[Measurement]:
    options: RequestOptions = {"max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}
    async with Stack(device=device, mps=MpsMode.ON if turns[0].has_mps else MpsMode.OFF) as stack:
        await asyncio.gather(
            stack.dummies(draft_ms, verify_ms),
            stack.dummies(draft_ms, verify_ms, suffix="-blocking", acknowledge_done=True),
        )
        for number, order in enumerate(turns):
            suffix, dispatch = ("-blocking", "acknowledged") if order.name == HOST_BLOCKS else ("", "together")
            scheduler = stack.scheduler(
                f"draft{suffix}",
                verify=f"verify{suffix}",
                run_ahead=order.run_ahead,
                num_draft_tokens=NUM_DRAFT_TOKENS,
                slots=NUM_CLIENTS,
                context_tokens=CONTEXT_TOKENS,
                dispatch=dispatch,
                fence=order.fence,
            )
            async with scheduler as served:
                first = WINDOWS[device] * turns[:number].count(order)
                for repeat in range(first, first + WINDOWS[device]):
                    window = await stream_window(
                        served,
                        [PROMPT] * NUM_CLIENTS,
                        [options] * NUM_CLIENTS,
                        warm_up_tokens=WARM_UP_TOKENS,
                        seconds=MEASURE_S[device],
                    )
                    yield _measurement(device, draft_ms, verify_ms, order, repeat, window)


def _measurement(
    device: str, draft_ms: float, verify_ms: float, order: Order, repeat: int, window: Window
) -> Measurement:
    sums = window.sums
    step_ms, kernel_sum_ms = sums.mean_ms(sums.step_s), draft_ms + verify_ms
    return Measurement(
        device=device,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        policy=order.name,
        run_ahead=order.run_ahead,
        fence=window.fence,
        mps=order.has_mps,
        repeat=repeat,
        kernel_sum_ms=kernel_sum_ms,
        busy_ms=sums.mean_ms(sums.draft_s + sums.verify_s),
        step_ms=step_ms,
        elapsed_ms=sums.mean_ms(window.elapsed_s),
        ratio=step_ms / kernel_sum_ms,
        num_steps=sums.num_steps,
        num_clients=NUM_CLIENTS,
        tokens_per_second=window.num_tokens / window.elapsed_s,
        tokens_sha256=hashlib.sha256(json.dumps(window.first_tokens).encode()).hexdigest(),
        host=host(device),
    )


if __name__ == "__main__":
    typer.run(main)
