"""Timelines with and without run-ahead: real services with dummy kernels, traced under streaming load.

    python benchmarks/trace_pictures.py --device cpu --out benchmarks/results
    python benchmarks/trace_pictures.py --device cuda --out benchmarks/results
    python benchmarks/trace_pictures.py --device cuda --out benchmarks/results --draw-only

Each run-ahead gives a trace as `slipstream trace` writes it, trace_<device>_run_ahead_<n>.json, and a picture of it.
Takes about half a minute. What one of them fails with does not keep the other from being written.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.mps_stack import mps_stack
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.trace import fetch_trace, trace_json
from slipstream.cli.up.mps import MpsMode
from slipstream.client import AsyncClient
from slipstream.common.worker.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from slipstream.benchmarks.stack import Stack
    from slipstream.cli.trace import TraceFile

DUMMY_MS = {"cpu": (3.0, 10.0), "cuda": (0.3, 4.5)}
RUN_AHEADS = (0, 1)
NUM_CLIENTS = 8
NUM_DRAFT_TOKENS = 4
CONTEXT_TOKENS = 1 << 18
WARM_UP_STEPS = 100
PROMPT = "def main():\n"
LOG_DIR = Path("build/benchmarks")

logger = logging.getLogger(__name__)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    draft_ms: Annotated[float | None, typer.Option(help="Length of draft's dummy kernel.")] = None,
    verify_ms: Annotated[float | None, typer.Option(help="Length of verify's.")] = None,
    steps: Annotated[int, typer.Option(help="Steps in a trace.")] = 50,
    out: Annotated[Path, typer.Option(help="Folder for traces and pictures.")] = Path("build/traces"),
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Draw the traces that are there.")] = False,
) -> None:
    """Traces each run-ahead, and draws what came of it."""
    if device not in DUMMY_MS:
        raise typer.BadParameter(" or ".join(DUMMY_MS), param_hint="--device")
    out.mkdir(parents=True, exist_ok=True)
    usual_draft_ms, usual_verify_ms = DUMMY_MS[device]
    lengths_ms = (draft_ms or usual_draft_ms, verify_ms or usual_verify_ms)
    has_failed = not draw_only and asyncio.run(_trace_all(device, lengths_ms, steps, out))
    for run_ahead in RUN_AHEADS:
        path = _path(out, device, run_ahead)
        if path.exists():
            has_failed |= not _draw(path)
    raise typer.Exit(1 if has_failed else 0)


async def _trace_all(device: str, lengths_ms: tuple[float, float], steps: int, out: Path) -> bool:
    """Whether anything failed."""
    has_failed = False
    async with mps_stack(MpsMode.AUTO if device == "cuda" else MpsMode.OFF, LOG_DIR) as stack:
        for role, model, length_ms in zip(
            ("draft", "verify"), (standalone_dir(), target_dir()), lengths_ms, strict=True
        ):
            await stack.dummy_worker(role, length_ms, "--model", str(model), "--device", device)
        for run_ahead in RUN_AHEADS:
            try:
                content = await _trace(stack, device, run_ahead, steps)
            except Exception:
                logger.exception("run-ahead %d was not traced", run_ahead)
                has_failed = True
                continue
            content["otherData"] |= {"host": host(device), "draft_ms": lengths_ms[0], "verify_ms": lengths_ms[1]}
            path = _path(out, device, run_ahead)
            path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
            print(f"{path}: {len(content['traceEvents'])} events, {path.stat().st_size / 1024:.0f} KiB", flush=True)
    return has_failed


async def _trace(stack: Stack, device: str, run_ahead: int, steps: int) -> TraceFile:
    port, metrics_port = free_ports(2)
    arguments = (
        *("--verify", stack.socket("verify"), "--draft", stack.socket("draft"), "--device", device),
        *("--run-ahead", str(run_ahead), "--num-draft-tokens", str(NUM_DRAFT_TOKENS)),
        *("--slots", str(NUM_CLIENTS), "--context-tokens", str(CONTEXT_TOKENS)),
    )
    async with (
        stack.scheduler(*arguments, port=port, metrics_port=metrics_port) as address,
        _streaming(address),
    ):
        # Nobody needs to see these: prompts, and first uses of everything.
        await fetch_trace(address, TraceRequest(steps=WARM_UP_STEPS))
        return trace_json(await fetch_trace(address, TraceRequest(steps=steps)))


@asynccontextmanager
async def _streaming(address: str) -> AsyncIterator[None]:
    """Clients whose requests do not end, until the block does. Raises what one of them raises."""

    async def stream(client: AsyncClient) -> None:
        async for _ in client.generate(PROMPT, max_new_tokens=CONTEXT_TOKENS // 2, ignore_eos=True):
            pass

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(client)) for _ in range(NUM_CLIENTS)]
        yield
        for task in tasks:
            task.cancel()


def _draw(path: Path) -> bool:
    """Whether it was drawn."""
    try:
        from slipstream.benchmarks.trace_drawing import draw

        print(draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png")))
    except Exception:
        logger.exception("%s was not drawn", path)
        return False
    return True


def _path(out: Path, device: str, run_ahead: int) -> Path:
    return out / f"trace_{device}_run_ahead_{run_ahead}.json"


if __name__ == "__main__":
    typer.run(main)
