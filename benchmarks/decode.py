"""A decode step of real models, and where its time goes: three processes against one process on one stream.

    python benchmarks/decode.py --json benchmarks/results/decode_h200.json \
        --picture benchmarks/results/decode_h200.png

Shapes of Llama-3.1-8B and Llama-3.2-1B with random weights, EAGLE-3 heads of the published shape, acceptance by chance
(3.5 tokens a step, K = 4), prompts of 1024 tokens that grow to 1400. Three processes and one take turns, so that what
happens to the machine happens to both. A step's floor is what it must read over the bandwidth of a copy.

    python benchmarks/decode.py --device cpu --shapes bundled --batches 1,4 --repeats 2

runs the bundled models, to see that it works. The file keeps the shapes that a run leaves out.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from slipstream.benchmarks.decode_floor import StepBytes, copy_bandwidth
from slipstream.benchmarks.decode_report import ONE, THREE, Measurement, line, summary
from slipstream.benchmarks.decode_window import Served
from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.in_process import InProcessSettings, in_process_command
from slipstream.benchmarks.model_shapes import write_shape
from slipstream.benchmarks.mps_stack import mps_stack
from slipstream.benchmarks.result_rows import read_rows, write_rows
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import eagle3_dir, target_dir
from slipstream.cli.up.mps import MpsMode
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.worker.config import EAGLE3, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

NUM_DRAFT_TOKENS = 4
ACCEPT_LENGTH = 3.5
LEAST_STEPS = 80
"""In a repeat, which is as many batches as that takes."""
SHAPES_DIR = Path("build/shapes")
LOG_DIR = Path("build/benchmarks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which models, and how long sequences are."""

    name: str
    target: Path
    draft: Path
    load_format: str
    prompt_tokens: int
    max_new_tokens: int
    kv_memory_mib: int
    """For all slots, in each of both modes."""

    @classmethod
    def named(cls, name: str) -> Setup:
        """`bundled`, or one of a shape with a head of the same."""
        if name == "bundled":
            return cls(
                name=name,
                target=target_dir(),
                draft=eagle3_dir(),
                load_format="auto",
                prompt_tokens=64,
                max_new_tokens=600,
                kv_memory_mib=512,
            )
        return cls(
            name=name,
            target=write_shape(SHAPES_DIR, name),
            draft=write_shape(SHAPES_DIR, f"eagle3-{name}"),
            load_format="dummy",
            prompt_tokens=1024,
            max_new_tokens=376,
            kv_memory_mib=18 * 1024,
        )

    @property
    def context_tokens(self) -> int:
        """Of a request."""
        return self.prompt_tokens + self.max_new_tokens

    @property
    def mean_context_tokens(self) -> float:
        """What a step finds of a request, on average over its output."""
        return self.prompt_tokens + self.max_new_tokens / 2


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to see that it works.")] = "cuda",
    shapes: Annotated[str, typer.Option(help="Names, with commas between them.")] = "llama-3.1-8b,llama-3.2-1b",
    batches: Annotated[str, typer.Option(help="Requests at a time, with commas between them.")] = "1,4,8,16,32,64",
    repeats: Annotated[int, typer.Option(help="How often the modes take turns.")] = 10,
    run_ahead: Annotated[int, typer.Option(help="Steps sent ahead.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where to write measurements; other shapes that it has are kept.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw all that is there.")] = None,
) -> None:
    """Measures decode steps."""
    names, sizes = shapes.split(","), [int(batch) for batch in batches.split(",")]
    measurements = [] if json_file is None else [m for m in read_rows(json_file, _measurement) if m.shape not in names]
    bandwidth = copy_bandwidth() if device == "cuda" else None

    def keep(batch: Sequence[Measurement]) -> None:
        measurements.extend(batch)
        if json_file is not None:
            write_rows(measurements, json_file)

    for name in names:
        bench = DecodeBenchmark(Setup.named(name), device, sizes, repeats, run_ahead, bandwidth)
        asyncio.run(bench.measure(keep))
    if picture is not None:
        from slipstream.benchmarks.decode_picture import draw

        draw(measurements, picture)
    print("\n".join(summary(measurements)))


class DecodeBenchmark:
    """One pair of models, in both modes."""

    def __init__(
        self, setup: Setup, device: str, batches: Sequence[int], repeats: int, run_ahead: int, bandwidth: float | None
    ) -> None:
        """`bandwidth`: of a copy, in bytes per second; None is not known."""
        self._setup = setup
        self._device = device
        self._batches = batches
        self._repeats = repeats
        self._run_ahead = run_ahead
        self._bandwidth = bandwidth
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._bytes = StepBytes.of(
            setup.target, setup.draft, algorithm=EAGLE3, num_draft_tokens=NUM_DRAFT_TOKENS, dtype=dtype
        )

    async def measure(self, keep: Callable[[Sequence[Measurement]], None]) -> None:
        """Both modes live side by side; one at a time works. `keep` gets each batch's measurements."""
        async with AsyncExitStack() as held:
            three, one = await asyncio.gather(
                held.enter_async_context(self._three_processes()), held.enter_async_context(self._one_process())
            )
            for batch in self._batches:
                for served, mode in ((three, THREE), (one, ONE)):
                    await self._window(served, mode, batch, -1)
                measurements = []
                for repeat in range(self._repeats):
                    for served, mode in ((three, THREE), (one, ONE)):
                        measurements.append(await self._window(served, mode, batch, repeat))
                        print(line(measurements[-1]), flush=True)
                keep(measurements)

    @asynccontextmanager
    async def _three_processes(self) -> AsyncIterator[Served]:
        mode = MpsMode.AUTO if self._device == "cuda" else MpsMode.OFF
        async with mps_stack(mode, LOG_DIR) as stack:
            await asyncio.gather(
                stack.worker("verify", *_options(self._verify)), stack.worker("draft", *_options(self._draft))
            )
            port, metrics_port = free_ports(2)
            arguments = _options(self._scheduler(stack.socket("verify"), stack.socket("draft")))
            async with stack.scheduler(*arguments, port=port, metrics_port=metrics_port) as address:
                yield Served(address, metrics_port)

    @asynccontextmanager
    async def _one_process(self) -> AsyncIterator[Served]:
        (metrics_port,) = free_ports(1)
        async with Stack(LOG_DIR) as stack:
            address = stack.socket("one")
            settings = InProcessSettings(
                verify=WorkerConfig(**self._verify),  # type: ignore[arg-type]
                draft=WorkerConfig(**self._draft),  # type: ignore[arg-type]
                scheduler=SchedulerConfig(**self._scheduler(address, address)),  # type: ignore[arg-type]
            )
            await stack.process("one", *in_process_command(settings, address, metrics_port))
            yield Served(address, metrics_port)

    @property
    def _verify(self) -> dict[str, object]:
        return {
            "model": self._setup.target,
            "device": self._device,
            "load_format": self._setup.load_format,
            "simulate_accept_length": ACCEPT_LENGTH,
        }

    @property
    def _draft(self) -> dict[str, object]:
        return {
            "model": self._setup.draft,
            "target": self._setup.target,
            "device": self._device,
            "load_format": self._setup.load_format,
            "algorithm": EAGLE3,
        }

    def _scheduler(self, verify: str, draft: str) -> dict[str, object]:
        return {
            "verify": verify,
            "draft": draft,
            "device": self._device,
            "run_ahead": self._run_ahead,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "slots": max(self._batches),
            "context_tokens": self._setup.context_tokens,
            "chunk_tokens": min(2048, self._setup.context_tokens),
            "kv_memory_mib": self._setup.kv_memory_mib,
        }

    async def _window(self, served: Served, mode: str, batch: int, repeat: int) -> Measurement:
        windows = [await served.window(self._setup, batch)]
        while sum(window.total("slipstream_step_seconds_count") for window in windows) < LEAST_STEPS:
            windows.append(await served.window(self._setup, batch))
        num_steps = sum(window.total("slipstream_step_seconds_count") for window in windows)
        elapsed_s = sum(window.elapsed_s for window in windows)

        def ms(name: str, **labels: str) -> float:
            return 1e3 * sum(window.total(name, **labels) for window in windows) / num_steps

        context = self._setup.mean_context_tokens
        bandwidth = self._bandwidth
        return Measurement(
            shape=self._setup.name,
            mode=mode,
            batch=batch,
            repeat=repeat,
            step_ms=ms("slipstream_step_seconds_sum"),
            draft_ms=ms("slipstream_busy_seconds_total", service="draft"),
            verify_ms=ms("slipstream_busy_seconds_total", service="verify"),
            bubble_ms=ms("slipstream_bubble_seconds_total"),
            draft_floor_ms=None if bandwidth is None else 1e3 * self._bytes.draft_s(bandwidth, context, batch),
            verify_floor_ms=None if bandwidth is None else 1e3 * self._bytes.verify_s(bandwidth, context, batch),
            tokens_per_second=sum(window.num_tokens for window in windows) / elapsed_s,
            mean_accept_length=mean(window.mean_accept_length for window in windows),
            num_steps=int(num_steps),
            cpu_ms={name: 1e3 * sum(window.cpu_s[name] for window in windows) / num_steps for name in windows[0].cpu_s},
            fence=windows[0].fence,
            mps=windows[0].has_mps,
            copy_bandwidth=bandwidth,
            host=host(self._device),
        )


def _measurement(row: dict[str, Any]) -> Measurement:
    return Measurement(**row)


def _options(settings: dict[str, object]) -> tuple[str, ...]:
    """As a command line has them."""
    return tuple(word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value)))


if __name__ == "__main__":
    typer.run(main)
