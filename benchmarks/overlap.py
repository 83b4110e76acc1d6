"""What a step costs beyond its kernels: the real services, with dummy kernels of a known length.

    python benchmarks/overlap.py --device cpu --json benchmarks/results/overlap_cpu.json
    python benchmarks/overlap.py --device cuda --json benchmarks/results/overlap_h200.json

Eight clients stream while metrics are on. Policies (`overlap_policies.py`) take turns within each repeat, so that a
noisy machine is noisy for all of them. On a GPU both kinds of fences are measured, and workers with and without MPS.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.mps_stack import mps_stack
from slipstream.benchmarks.overlap_policies import Policy, policies_of
from slipstream.benchmarks.result_rows import write_rows
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Primed, Stack
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.up.mps import MpsMode
from slipstream.client import AsyncClient
from slipstream.common.rpc.scrape import Scrape, scrape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

NUM_CLIENTS = 8
NUM_DRAFT_TOKENS = 4
CONTEXT_TOKENS = 1 << 18
WARM_UP_TOKENS = 100
DUMMY_MS = {"cpu": ((3.0, 10.0), (0.3, 1.0)), "cuda": ((0.3, 4.5), (0.1, 0.7))}
MEASURE_S = {"cpu": 4.0, "cuda": 1.5}
REPEATS = {"cpu": 5, "cuda": 1}
"""How often the policies take turns."""
WINDOWS = {"cpu": 1, "cuda": 2}
"""How often each is measured at its turn: to start a scheduler on a GPU takes longer than to measure it."""
PROMPT = "def main():\n"
LOG_DIR = Path("build/benchmarks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One repeat of one policy; times are means per decode step."""

    device: str
    draft_ms: float
    verify_ms: float
    policy: str
    run_ahead: int
    fence: str
    mps: bool
    repeat: int
    kernel_sum_ms: float
    """The lengths of the dummy kernels."""
    busy_ms: float
    """What the workers' stamps say they took."""
    step_ms: float
    """From the end of a step to the end of the next, by the stamps."""
    elapsed_ms: float
    """The same by this process's clock: time of the window over the steps in it."""
    ratio: float
    """step_ms / kernel_sum_ms."""
    num_steps: int
    num_clients: int
    tokens_per_second: float
    tokens_sha256: str
    """Of the first tokens of all clients: the same under every policy."""
    host: str


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeats: Annotated[int | None, typer.Option(help="Interleaved repeats of each policy.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the list of measurements.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Measures the price of a step under each policy."""
    if device not in DUMMY_MS:
        raise typer.BadParameter(" or ".join(DUMMY_MS), param_hint="--device")
    measurements: list[Measurement] = []

    def keep(group: Sequence[Measurement]) -> None:
        measurements.extend(group)
        if json_file is not None:
            write_rows(measurements, json_file)

    asyncio.run(_measure_all(device, repeats or REPEATS[device], keep))
    if picture is not None:
        from slipstream.benchmarks.overlap_picture import draw

        draw(measurements, picture)
    for line in _summary(measurements):
        print(line)
    if len({measurement.tokens_sha256 for measurement in measurements}) > 1:
        raise SystemExit("the tokens are not the same under every policy")


async def _measure_all(device: str, repeats: int, keep: Callable[[Sequence[Measurement]], None]) -> None:
    """`keep` gets the measurements of each group, also of one that failed."""
    policies = policies_of(device)
    for lengths in DUMMY_MS[device]:
        for has_mps in sorted({policy.has_mps for policy in policies}, reverse=True):
            mine = [policy for policy in policies if policy.has_mps == has_mps]
            group: list[Measurement] = []
            try:
                async for measured in _measure_group(device, *lengths, mine * repeats):
                    group += measured
                    print(*map(_line, measured), sep="\n", flush=True)
            finally:
                keep(group)


async def _measure_group(
    device: str, draft_ms: float, verify_ms: float, turns: Sequence[Policy]
) -> AsyncIterator[list[Measurement]]:
    """Everything that is only imported at first is so before the first measurement."""
    async with mps_stack(MpsMode.ON if turns[0].has_mps else MpsMode.OFF, LOG_DIR) as stack:
        async with asyncio.TaskGroup() as starts:
            for blocking in (False, True):
                _start_workers(starts, stack, device, draft_ms, verify_ms, is_blocking=blocking)
            programs = [starts.create_task(PROGRAMS[device](stack, _module(policy))) for policy in turns]
        for number, (policy, program) in enumerate(zip(turns, programs, strict=True)):
            repeat = turns[:number].count(policy)
            yield await _measure_policy(stack, device, draft_ms, verify_ms, policy, repeat, program.result())


def _start_workers(
    starts: asyncio.TaskGroup, stack: Stack, device: str, draft_ms: float, verify_ms: float, *, is_blocking: bool
) -> None:
    """Both workers, or those that acknowledge what is done."""
    for role, model, length_ms in (("draft", standalone_dir(), draft_ms), ("verify", target_dir(), verify_ms)):
        acknowledge = ("--acknowledge-done",) if is_blocking else ()
        options = ("--model", str(model), "--device", device, *acknowledge)
        starts.create_task(stack.dummy_worker(role, length_ms, *options, name=_worker(role, is_blocking)))


async def _command(_: Stack, module: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module)


PROGRAMS: dict[str, Callable[[Stack, str], Coroutine[None, None, tuple[str, ...] | Primed]]] = {
    "cpu": _command,
    "cuda": Stack.primed,
}
"""How schedulers start: on a GPU there are few, and what they import takes longer than a measurement."""


def _module(policy: Policy) -> str:
    """Whose entry point orders steps so."""
    return "slipstream.scheduler.main" if policy.is_served_with else "slipstream.benchmarks.policy_scheduler"


def _arguments(stack: Stack, device: str, policy: Policy) -> tuple[str, ...]:
    blocking = policy.is_blocking
    arguments = (
        *("--verify", stack.socket(_worker("verify", blocking)), "--draft", stack.socket(_worker("draft", blocking))),
        *("--run-ahead", str(policy.run_ahead), "--num-draft-tokens", str(NUM_DRAFT_TOKENS)),
        *("--slots", str(NUM_CLIENTS), "--context-tokens", str(CONTEXT_TOKENS)),
    )
    if not policy.is_served_with:
        return (*arguments, policy.name)
    order = ("--dispatch", "acknowledged" if blocking else "together")
    return (*arguments, *order, "--device", device, "--fence", policy.fence)


async def _measure_policy(
    stack: Stack,
    device: str,
    draft_ms: float,
    verify_ms: float,
    policy: Policy,
    repeat: int,
    program: tuple[str, ...] | Primed,
) -> list[Measurement]:
    port, metrics_port = free_ports(2)
    arguments = _arguments(stack, device, policy)
    async with stack.scheduler(*arguments, port=port, metrics_port=metrics_port, program=program) as address:
        windows = [await _window(address, metrics_port, MEASURE_S[device]) for _ in range(WINDOWS[device])]
    return [
        _measurement(device, draft_ms, verify_ms, policy, WINDOWS[device] * repeat + number, window)
        for number, window in enumerate(windows)
    ]


def _measurement(
    device: str, draft_ms: float, verify_ms: float, policy: Policy, repeat: int, window: _Window
) -> Measurement:
    used = window.used
    num_steps = int(used.total("slipstream_step_seconds_count", phase="decode"))
    step_ms = 1e3 * used.total("slipstream_step_seconds_sum", phase="decode") / num_steps
    kernel_sum_ms = draft_ms + verify_ms
    return Measurement(
        device=device,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        policy=policy.name,
        run_ahead=policy.run_ahead,
        fence=window.fence,
        mps=policy.has_mps,
        repeat=repeat,
        kernel_sum_ms=kernel_sum_ms,
        busy_ms=1e3 * used.total("slipstream_busy_seconds_total", phase="decode") / num_steps,
        step_ms=step_ms,
        elapsed_ms=1e3 * window.elapsed_s / num_steps,
        ratio=step_ms / kernel_sum_ms,
        num_steps=num_steps,
        num_clients=NUM_CLIENTS,
        tokens_per_second=window.num_tokens / window.elapsed_s,
        tokens_sha256=window.tokens_sha256,
        host=host(device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What happened while all clients streamed."""

    used: Scrape
    """What the metrics gained."""
    elapsed_s: float
    num_tokens: int
    tokens_sha256: str
    fence: str


async def _window(address: str, metrics_port: int, measure_s: float) -> _Window:
    received: list[list[int]] = [[] for _ in range(NUM_CLIENTS)]
    warm = asyncio.Event()

    async def stream(client: AsyncClient, number: int) -> None:
        async for chunk in client.generate(PROMPT, max_new_tokens=CONTEXT_TOKENS // 2, ignore_eos=True):
            received[number].extend(chunk.token_ids)
            if not warm.is_set() and min(map(len, received)) >= WARM_UP_TOKENS:
                warm.set()

    async with AsyncClient(address) as client:
        fence = (await client.server_info()).fence
        streams = [asyncio.create_task(stream(client, number)) for number in range(NUM_CLIENTS)]
        await asyncio.wait_for(warm.wait(), 60)
        before, started, num_before = await scrape(metrics_port), time.monotonic(), sum(map(len, received))
        await asyncio.wait(streams, timeout=measure_s, return_when=asyncio.FIRST_EXCEPTION)
        after, ended = await scrape(metrics_port), time.monotonic()
        num_tokens = sum(map(len, received)) - num_before
        for task in streams:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    first = [tokens[:WARM_UP_TOKENS] for tokens in received]
    return _Window(
        used=after.since(before),
        elapsed_s=ended - started,
        num_tokens=num_tokens,
        tokens_sha256=hashlib.sha256(json.dumps(first).encode()).hexdigest(),
        fence=fence,
    )


def _summary(measurements: Sequence[Measurement]) -> list[str]:
    lines = ["", "worst of the repeats:"]
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.draft_ms, m.verify_ms, m.mps, m.policy, m.run_ahead, m.fence), []).append(m)
    for group in groups.values():
        worst = max(m.ratio for m in group)
        lost = max(m.step_ms - m.busy_ms for m in group)
        lines.append(f"{_name(group[0])}: ratio {worst:.3f}, step - busy {lost:.3f} ms")
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
