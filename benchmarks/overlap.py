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
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.models import DeviceOption, JsonOption, PictureOption  # noqa: TC001 - typer reads the annotations
from slipstream.benchmarks.overlap_report import HOST_BLOCKS, RUN_AHEAD, Measurement, with_shares
from slipstream.benchmarks.result_files import host, write_rows
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.stream_window import stream_window
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.up.mps import MpsMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from slipstream.benchmarks.stream_window import Window
    from slipstream.client.requests import RequestOptions

NUM_CLIENTS = 8
NUM_DRAFT_TOKENS = 4
CONTEXT_TOKENS = 1 << 18
WARM_UP_TOKENS = 100
KERNELS_MS = {"cpu": ((3.0, 10.0), (0.3, 1.0)), "cuda": ((0.3, 4.5), (0.1, 0.7))}
MEASURE_S = {"cpu": 4.0, "cuda": 1.5}
REPEATS = {"cpu": 5, "cuda": 1}
"""Number of repeats, by device; in each, all orders are measured in turn."""
WINDOWS = {"cpu": 1, "cuda": 2}
"""Windows of an order at its turn: starting a scheduler on a GPU takes longer than measuring it."""
PROMPT = "def main():\n"


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


def main(
    device: DeviceOption = "cpu",
    repeats: Annotated[int | None, typer.Option(help="Interleaved repeats of each order.")] = None,
    json_file: JsonOption = None,
    picture: PictureOption = None,
) -> None:
    """Measures the price of a step in each order."""
    measurements: list[Measurement] = []

    def keep(group: Sequence[Measurement]) -> None:
        measurements.extend(with_shares(group))
        write_rows(measurements, json_file)

    asyncio.run(_measure_all(device, repeats or REPEATS[device], keep))
    if picture is not None:
        from slipstream.benchmarks.charts import draw_overlap

        draw_overlap(measurements, picture)
    for line in _summary(measurements):
        print(line)
    if len({measurement.tokens_sha256 for measurement in measurements}) > 1:
        raise SystemExit("the tokens are not the same in every order")


async def _measure_all(device: str, repeats: int, keep: Callable[[Sequence[Measurement]], None]) -> None:
    """`keep` gets the measurements of each group, also of one that failed."""
    orders = orders_of(device)
    for kernels_ms in KERNELS_MS[device]:
        for has_mps in sorted({order.has_mps for order in orders}, reverse=True):
            mine = [order for order in orders if order.has_mps == has_mps]
            group: list[Measurement] = []
            try:
                async for measured in _measure_group(device, *kernels_ms, mine * repeats):
                    group += measured
                    print(*map(_line, measured), sep="\n", flush=True)
            finally:
                keep(group)


async def _measure_group(
    device: str, draft_ms: float, verify_ms: float, turns: Sequence[Order]
) -> AsyncIterator[list[Measurement]]:
    mps = MpsMode.ON if turns[0].has_mps else MpsMode.OFF
    async with Stack(device=device, mps=mps) as stack:
        async with asyncio.TaskGroup() as starts:
            for is_blocking in (False, True):
                for role, model, length_ms in (
                    ("draft", standalone_dir(), draft_ms),
                    ("verify", target_dir(), verify_ms),
                ):
                    name = _worker(role, is_blocking)
                    starts.create_task(
                        stack.dummy(role, length_ms, name=name, model=model, acknowledge_done=is_blocking)
                    )
        for number, order in enumerate(turns):
            repeat = turns[:number].count(order)
            yield await _measure_order(stack, device, draft_ms, verify_ms, order, repeat)


async def _measure_order(
    stack: Stack, device: str, draft_ms: float, verify_ms: float, order: Order, repeat: int
) -> list[Measurement]:
    is_blocking = order.name == HOST_BLOCKS
    scheduler = stack.scheduler(
        _worker("draft", is_blocking),
        verify=_worker("verify", is_blocking),
        run_ahead=order.run_ahead,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        slots=NUM_CLIENTS,
        context_tokens=CONTEXT_TOKENS,
        dispatch="acknowledged" if is_blocking else "together",
        fence=order.fence,
    )
    options: RequestOptions = {"max_new_tokens": CONTEXT_TOKENS // 2, "ignore_eos": True}
    measurements = []
    async with scheduler as served:
        for number in range(WINDOWS[device]):
            window = await stream_window(
                served,
                [PROMPT] * NUM_CLIENTS,
                [options] * NUM_CLIENTS,
                warm_up_tokens=WARM_UP_TOKENS,
                seconds=MEASURE_S[device],
            )
            measured = _measurement(device, draft_ms, verify_ms, order, WINDOWS[device] * repeat + number, window)
            measurements.append(measured)
    return measurements


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


def _summary(measurements: Sequence[Measurement]) -> list[str]:
    lines = ["", "medians of the repeats:"]
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(_name(m), []).append(m)
    for name, group in groups.items():
        ratios, lost = [m.ratio for m in group], median(m.lost_ms for m in group)
        share = median(m.lost_share for m in group if m.lost_share is not None)
        lines.append(
            f"{name}: ratio {median(ratios):.3f} (worst {max(ratios):.3f}), step - busy {lost:.3f} ms, "
            f"{100 * share:.1f} % of that of host blocks"
        )
    return lines


def _name(m: Measurement) -> str:
    where = f", {m.fence} fences, {'MPS' if m.mps else 'no MPS'}" if m.device == "cuda" else ""
    return f"{m.draft_ms:g} + {m.verify_ms:g} ms, {m.policy} {m.run_ahead}{where}"


def _line(m: Measurement) -> str:
    return (
        f"{_name(m)}, repeat {m.repeat}: step {m.step_ms:.3f} ms (by the clock {m.elapsed_ms:.3f}), "
        f"busy {m.busy_ms:.3f} ms, ratio {m.ratio:.3f}, {m.num_steps} steps"
    )


def _worker(role: str, is_blocking: bool) -> str:
    return f"{role}-blocking" if is_blocking else role


if __name__ == "__main__":
    typer.run(main)
