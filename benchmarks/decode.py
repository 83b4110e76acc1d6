"""A decode step of real models, and where its time goes: three processes against one process on one stream.

    python benchmarks/decode.py --json benchmarks/results/decode_h200.json \
        --picture benchmarks/results/decode_h200.png

Shapes of Llama-3.1-8B and Llama-3.2-1B with random weights, EAGLE-3 heads of the published shape, acceptance by chance
(3.5 tokens a step, K = 4), prompts of 1024 tokens that grow to 1400. Three processes and one take turns, so that what
happens to the machine happens to both. A step's floor is what it must read over the bandwidth of a copy.

    python benchmarks/decode.py --device cpu --shapes bundled --batches 1,4 --repeats 2

runs the bundled models, to see that it works.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated

import psutil
import torch
import typer

from slipstream.benchmarks.decode_floor import StepBytes, copy_bandwidth
from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.model_shapes import write_shape
from slipstream.benchmarks.mps_stack import mps_stack
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import eagle3_dir, target_dir
from slipstream.cli.in_process_settings import InProcessSettings
from slipstream.cli.mps import MpsMode
from slipstream.client import AsyncClient
from slipstream.common.scrape import Scrape, scrape
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.config import EAGLE3, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

SEED = 11
NUM_DRAFT_TOKENS = 4
ACCEPT_LENGTH = 3.5
TEMPERATURE = 0.8
WARM_UP_TOKENS = 16
LEAST_STEPS = 100
"""In a repeat, which is as many batches as that takes."""
SHAPES_DIR = Path("build/shapes")
LOG_DIR = Path("build/benchmarks")
THREE, ONE = MODES = ("three processes", "one process")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One repeat of one mode; times are means per decode step, in milliseconds."""

    shape: str
    mode: str
    batch: int
    repeat: int
    step_ms: float
    draft_ms: float
    verify_ms: float
    bubble_ms: float
    """Neither worker worked."""
    draft_floor_ms: float | None
    """What draft must read over the bandwidth of a copy; None where that is not known."""
    verify_floor_ms: float | None
    tokens_per_second: float
    """By this process's clock."""
    mean_accept_length: float
    num_steps: int
    cpu_ms: dict[str, float]
    """CPU time of each process per step."""
    fence: str
    mps: bool
    copy_bandwidth: float | None
    """Bytes per second."""
    host: str


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to see that it works.")] = "cuda",
    shapes: Annotated[str, typer.Option(help="Names, with commas between them.")] = "llama-3.1-8b,llama-3.2-1b",
    batches: Annotated[str, typer.Option(help="Requests at a time, with commas between them.")] = "1,4,8,16,32,64",
    repeats: Annotated[int, typer.Option(help="How often the modes take turns.")] = 10,
    run_ahead: Annotated[int, typer.Option(help="Steps sent ahead.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the list of measurements.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Measures decode steps."""
    sizes = [int(batch) for batch in batches.split(",")]
    bandwidth = copy_bandwidth() if device == "cuda" else None
    measurements = []
    for name in shapes.split(","):
        bench = DecodeBenchmark(Setup.named(name), device, sizes, repeats, run_ahead, bandwidth)
        measurements += asyncio.run(bench.measure())
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(measurement) for measurement in measurements], indent=1) + "\n")
    if picture is not None:
        from slipstream.benchmarks.decode_picture import draw

        draw(measurements, picture)
    for line in summary(measurements):
        print(line)


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

    async def measure(self) -> list[Measurement]:
        """Both modes live side by side; one at a time works."""
        measurements = []
        async with self._three_processes() as three, self._one_process() as one:
            for batch in self._batches:
                for served, mode in ((three, THREE), (one, ONE)):
                    await self._window(served, mode, batch, -1)
                for repeat in range(self._repeats):
                    for served, mode in ((three, THREE), (one, ONE)):
                        measurements.append(await self._window(served, mode, batch, repeat))
                        print(_line(measurements[-1]), flush=True)
        return measurements

    @asynccontextmanager
    async def _three_processes(self) -> AsyncIterator[_Served]:
        mode = MpsMode.AUTO if self._device == "cuda" else MpsMode.OFF
        async with mps_stack(mode, LOG_DIR) as stack:
            await asyncio.gather(
                stack.worker("verify", *_options(self._verify)), stack.worker("draft", *_options(self._draft))
            )
            port, metrics_port = free_ports(2)
            arguments = _options(self._scheduler(stack.socket("verify"), stack.socket("draft")))
            async with stack.scheduler(*arguments, port=port, metrics_port=metrics_port) as address:
                yield _Served(address, metrics_port)

    @asynccontextmanager
    async def _one_process(self) -> AsyncIterator[_Served]:
        (metrics_port,) = free_ports(1)
        async with Stack(LOG_DIR) as stack:
            address = stack.socket("one")
            settings = InProcessSettings(
                verify=WorkerConfig(**self._verify),  # type: ignore[arg-type]
                draft=WorkerConfig(**self._draft),  # type: ignore[arg-type]
                scheduler=SchedulerConfig(**self._scheduler(address, address)),  # type: ignore[arg-type]
            )
            command = (sys.executable, "-P", "-m", "slipstream.cli.in_process")
            await stack.process("one", *command, settings.as_json(), address, str(metrics_port))
            yield _Served(address, metrics_port)

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

    async def _window(self, served: _Served, mode: str, batch: int, repeat: int) -> Measurement:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What happened while all of a batch streamed."""

    used: Scrape
    elapsed_s: float
    num_tokens: int
    mean_accept_length: float
    cpu_s: dict[str, float]
    fence: str
    has_mps: bool

    def total(self, name: str, **labels: str) -> float:
        """What a metric of decode steps gained."""
        return self.used.total(name, phase="decode", **labels)


class _Served:
    """A scheduler with its workers."""

    def __init__(self, address: str, metrics_port: int) -> None:
        self._address = address
        self._metrics_port = metrics_port

    async def window(self, setup: Setup, batch: int) -> _Window:
        """From when the last of a batch has begun until the first ends."""
        received = [0] * batch
        has_begun, accepted = asyncio.Event(), [0.0] * batch
        rng = random.Random(SEED)
        prompts = [[rng.randrange(256, 4096) for _ in range(setup.prompt_tokens)] for _ in range(batch)]

        async def stream(client: AsyncClient, number: int) -> None:
            options = {"temperature": TEMPERATURE, "seed": SEED + number, "ignore_eos": True}
            async for chunk in client.generate(
                prompts[number],
                max_new_tokens=setup.max_new_tokens,
                **options,  # type: ignore[arg-type]
            ):
                received[number] += len(chunk.token_ids)
                if min(received) >= WARM_UP_TOKENS:
                    has_begun.set()
                if chunk.usage is not None:
                    accepted[number] = chunk.usage.mean_accept_length

        async with AsyncClient(self._address) as client:
            info = await client.server_info()
            processes = _processes({service.name: service.pid for service in info.services})
            streams = [asyncio.create_task(stream(client, number)) for number in range(batch)]
            await asyncio.wait_for(has_begun.wait(), 120)
            before, cpu_before = await scrape(self._metrics_port), _cpu_s(processes)
            started, num_before = time.monotonic(), sum(received)
            await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            elapsed, num_tokens = time.monotonic() - started, sum(received) - num_before
            cpu_after, after = _cpu_s(processes), await scrape(self._metrics_port)
            await asyncio.gather(*streams)
        return _Window(
            used=after.since(before),
            elapsed_s=elapsed,
            num_tokens=num_tokens,
            mean_accept_length=sum(accepted) / batch,
            cpu_s={name: cpu_after[name] - cpu_before[name] for name in processes},
            fence=info.fence,
            has_mps=info.under_mps,
        )


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """Medians, and three processes over one."""
    lines = ["", "medians of the repeats:"]
    for shape, batch in dict.fromkeys((m.shape, m.batch) for m in measurements):
        by_mode = {
            mode: [m for m in measurements if (m.shape, m.batch, m.mode) == (shape, batch, mode)] for mode in MODES
        }
        three, one = (median(m.step_ms for m in by_mode[mode]) for mode in MODES)
        busy = median(m.draft_ms + m.verify_ms for m in by_mode[THREE])
        rate = median(m.tokens_per_second for m in by_mode[THREE])
        efficiency = median(1 - m.bubble_ms / m.step_ms for m in by_mode[THREE])
        lines.append(
            f"{shape}, batch {batch}: step {three:.3f} ms, {three / one:.4f} of one process, {three / busy:.4f} of its "
            f"kernels; overlap efficiency {efficiency:.4f}; {rate:.0f} tokens/s"
        )
        floors = [(m.verify_ms, m.verify_floor_ms, m.draft_ms, m.draft_floor_ms) for m in by_mode[THREE]]
        ratios = [(v / vf, d / df) for v, vf, d, df in floors if vf is not None and df is not None]
        if ratios:
            verify, draft = (median(ratio[side] for ratio in ratios) for side in (0, 1))
            lines.append(f"    verify {verify:.3f} of its floor, draft {draft:.3f}")
    return lines


def _line(m: Measurement) -> str:
    cpu = ", ".join(f"{name} {value:.2f}" for name, value in m.cpu_ms.items())
    return (
        f"{m.shape}, batch {m.batch}, {m.mode}, repeat {m.repeat}: step {m.step_ms:.3f} ms = draft {m.draft_ms:.3f} + "
        f"verify {m.verify_ms:.3f} + bubble {m.bubble_ms:.3f}; {m.tokens_per_second:.0f} tokens/s, "
        f"{m.mean_accept_length:.2f} a step; CPU ms a step: {cpu}"
    )


def _options(settings: dict[str, object]) -> tuple[str, ...]:
    """As a command line has them."""
    return tuple(word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value)))


def _processes(pids: dict[str, int]) -> dict[str, psutil.Process]:
    """By name; one that is several services by the name of the first."""
    named = {pid: name for name, pid in reversed(pids.items())}
    return {name: psutil.Process(pid) for pid, name in named.items()}


def _cpu_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: time.user + time.system for name, time in times.items()}


if __name__ == "__main__":
    typer.run(main)
