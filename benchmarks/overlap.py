"""What a step costs beyond its kernels: the real services, with stand-ins of a known length as kernels.

    python benchmarks/overlap.py --device cpu --json benchmarks/results/overlap_cpu.json

Eight clients stream while metrics are on. Policies take turns within each repeat, so that a noisy machine is
noisy for all of them: run-ahead 0, 1 and 2, and "host blocks", where a worker acknowledges a step when its work
is done and every command waits for the acknowledgements that it depends on.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.scrape import Scrape, scrape
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import standalone_dir, target_dir
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_CLIENTS = 8
NUM_DRAFT_TOKENS = 4
CONTEXT_TOKENS = 1 << 18
WARM_UP_TOKENS = 100
MEASURE_S = 4.0
STAND_INS_MS = ((3.0, 10.0), (0.3, 1.0))
PROMPT = "def main():\n"
LOG_DIR = Path("build/benchmarks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How steps are ordered."""

    name: str
    run_ahead: int
    is_blocking: bool = False


POLICIES = (
    Policy(name="host_blocks", run_ahead=0, is_blocking=True),
    Policy(name="run_ahead", run_ahead=0),
    Policy(name="run_ahead", run_ahead=1),
    Policy(name="run_ahead", run_ahead=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One repeat of one policy; times are means per decode step."""

    device: str
    draft_ms: float
    verify_ms: float
    policy: str
    run_ahead: int
    repeat: int
    kernel_sum_ms: float
    """What the stand-ins were asked to take."""
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
    host: str


def main(
    device: Annotated[str, typer.Option(help="cpu; the GPU comes with the CUDA backend.")] = "cpu",
    repeats: Annotated[int, typer.Option(help="Interleaved repeats of each policy.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the list of measurements.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Measures the price of a step under each policy."""
    if device != "cpu":
        raise typer.BadParameter("only cpu so far", param_hint="--device")
    measurements = asyncio.run(_measure_all(device, repeats))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(measurement) for measurement in measurements], indent=1) + "\n")
    if picture is not None:
        from slipstream.benchmarks.overlap_picture import draw

        draw(measurements, picture)
    for line in _summary(measurements):
        print(line)


async def _measure_all(device: str, repeats: int) -> list[Measurement]:
    measurements = []
    for draft_ms, verify_ms in STAND_INS_MS:
        async with Stack(LOG_DIR) as stack:
            for blocking in (False, True):
                await _start_workers(stack, draft_ms, verify_ms, is_blocking=blocking)
            for repeat in range(repeats):
                for policy in POLICIES:
                    measured = await _measure(stack, device, draft_ms, verify_ms, policy, repeat)
                    measurements.append(measured)
                    print(_line(measured), flush=True)
    return measurements


async def _start_workers(stack: Stack, draft_ms: float, verify_ms: float, *, is_blocking: bool) -> None:
    for role, model, length_ms in (("draft", standalone_dir(), draft_ms), ("verify", target_dir(), verify_ms)):
        acknowledge = ("--acknowledge-done",) if is_blocking else ()
        stand_in = ("--stand-in-ms", str(length_ms))
        await stack.worker(role, "--model", str(model), *stand_in, *acknowledge, name=_worker(role, is_blocking))


async def _measure(
    stack: Stack, device: str, draft_ms: float, verify_ms: float, policy: Policy, repeat: int
) -> Measurement:
    port, metrics_port = free_ports(2)
    blocking = policy.is_blocking
    arguments = (
        *("--verify", stack.socket(_worker("verify", blocking)), "--draft", stack.socket(_worker("draft", blocking))),
        *("--run-ahead", str(policy.run_ahead), "--num-draft-tokens", str(NUM_DRAFT_TOKENS)),
        *("--slots", str(NUM_CLIENTS), "--context-tokens", str(CONTEXT_TOKENS)),
        *("--dispatch", "acknowledged" if blocking else "together"),
    )
    async with stack.scheduler(*arguments, port=port, metrics_port=metrics_port) as address:
        used, elapsed_s, num_tokens = await _window(address, metrics_port)
    num_steps = int(used.total("slipstream_step_seconds_count", phase="decode"))
    step_ms = 1e3 * used.total("slipstream_step_seconds_sum", phase="decode") / num_steps
    kernel_sum_ms = draft_ms + verify_ms
    return Measurement(
        device=device,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        policy=policy.name,
        run_ahead=policy.run_ahead,
        repeat=repeat,
        kernel_sum_ms=kernel_sum_ms,
        busy_ms=1e3 * used.total("slipstream_busy_seconds_total", phase="decode") / num_steps,
        step_ms=step_ms,
        elapsed_ms=1e3 * elapsed_s / num_steps,
        ratio=step_ms / kernel_sum_ms,
        num_steps=num_steps,
        num_clients=NUM_CLIENTS,
        tokens_per_second=num_tokens / elapsed_s,
        host=f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python "
        f"{platform.python_version()}",
    )


async def _window(address: str, metrics_port: int) -> tuple[Scrape, float, int]:
    """All clients stream; what the metrics gained in a while, that while in seconds, and the tokens received in it."""
    received = [0] * NUM_CLIENTS
    warm = asyncio.Event()

    async def stream(client: AsyncClient, number: int) -> None:
        async for chunk in client.generate(PROMPT, max_new_tokens=CONTEXT_TOKENS // 2, ignore_eos=True):
            received[number] += len(chunk.token_ids)
            if not warm.is_set() and min(received) >= WARM_UP_TOKENS:
                warm.set()

    async with AsyncClient(address) as client:
        streams = [asyncio.create_task(stream(client, number)) for number in range(NUM_CLIENTS)]
        await asyncio.wait_for(warm.wait(), 60)
        before, started, tokens = await scrape(metrics_port), time.monotonic(), sum(received)
        await asyncio.wait(streams, timeout=MEASURE_S, return_when=asyncio.FIRST_EXCEPTION)
        after, ended = await scrape(metrics_port), time.monotonic()
        tokens = sum(received) - tokens
        for task in streams:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return after.since(before), ended - started, tokens


def _summary(measurements: Sequence[Measurement]) -> list[str]:
    lines = ["", "worst of the repeats:"]
    for draft_ms, verify_ms in STAND_INS_MS:
        for policy in POLICIES:
            group = [m for m in measurements if (m.draft_ms, m.policy, m.run_ahead) == (draft_ms, *_key(policy))]
            worst = max(m.ratio for m in group)
            lost = max(m.step_ms - m.busy_ms for m in group)
            name = f"{policy.name} {policy.run_ahead}" if not policy.is_blocking else policy.name
            lines.append(f"{draft_ms:g} + {verify_ms:g} ms  {name:<12} ratio {worst:.3f}, step - busy {lost:.3f} ms")
    return lines


def _key(policy: Policy) -> tuple[str, int]:
    return policy.name, policy.run_ahead


def _line(m: Measurement) -> str:
    return (
        f"{m.draft_ms:g} + {m.verify_ms:g} ms, repeat {m.repeat}, {m.policy} {m.run_ahead}: step {m.step_ms:.3f} ms "
        f"(by the clock {m.elapsed_ms:.3f}), busy {m.busy_ms:.3f} ms, ratio {m.ratio:.3f}, {m.num_steps} steps"
    )


def _worker(role: str, is_blocking: bool) -> str:
    return f"{role}-blocking" if is_blocking else role


if __name__ == "__main__":
    typer.run(main)
