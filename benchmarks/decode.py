"""Decode steps of real models, and where their time goes: three processes against one process on one stream.

Shapes of Llama-3.1-8B and Llama-3.2-1B with random weights, EAGLE-3 heads of the published shape or the draft that a
shape's name ends with, acceptance by chance (3.5 tokens a step, K = 4), prompts of 1024 tokens that grow to 1400. Three
processes and one take turns, so that noise of the machine hits both. Counts and sums of a window come from the same two
scrapes; a window whose sums do not belong to the same steps is refused. A step's floor is the time of reading its bytes
at the bandwidth of a copy.

    python benchmarks/decode.py --device cpu --shapes bundled --batches 1,4 --repeats 2

runs the bundled models on a CPU, as a test of the script. The JSON file keeps the shapes that a run leaves out.

    python benchmarks/decode.py --plain --shapes llama-3.1-8b,llama-3.1-8b-fp8 --json build/plain_h200.json

measures decoding without a draft, all shapes in turns, and

    python benchmarks/decode.py --alone --shapes llama-3.1-8b-standalone,llama-3.1-8b-eagle,llama-3.1-8b-ngram

drafting in three processes alone, all shapes in turns.
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from slipstream.benchmarks.decode_report import MODES, ONE, PLAIN, THREE, Measurement
from slipstream.benchmarks.in_process import InProcessSettings, in_process_command
from slipstream.benchmarks.models import ACCEPT_LENGTH, NUM_DRAFT_TOKENS, DeviceOption, JsonOption, Setup
from slipstream.benchmarks.result_files import host, read_rows, write_rows
from slipstream.benchmarks.stack import Served, Stack, free_ports
from slipstream.benchmarks.stream_window import stream_window
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.head_checkpoint import HEADS, empty_head
from slipstream.services.worker.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from torch import nn

    from slipstream.benchmarks.stream_window import Window
    from slipstream.client.requests import RequestOptions

LEAST_STEPS = 80
"""In a repeat, which takes as many batches of requests as that needs."""
SEED = 11
TEMPERATURE = 0.8
WARM_UP_TOKENS = 16
COPIED_BYTES = 4 << 30
NUM_COPIES = 20
META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that a step reads at least: each weight, and keys and values of the context, once a forward."""

    verify_weights: int
    draft_weights: int
    """Weight bytes that all the draft's forwards of a step read together; `draft_kv_per_token` counts likewise."""
    verify_kv_per_token: int
    draft_kv_per_token: int

    @classmethod
    def of(cls, setup: Setup, *, num_draft_tokens: int, dtype: torch.dtype) -> StepBytes:
        """A target and a draft that compute in `dtype`."""
        config = ModelConfig.from_directory(setup.target)
        draft_weights, draft_kv_per_token = _draft_bytes(setup, num_draft_tokens, dtype)
        return cls(
            verify_weights=_weights(Decoder(config, device=META, dtype=dtype), is_tied=config.tie_word_embeddings),
            draft_weights=draft_weights,
            verify_kv_per_token=config.kv_bytes_per_token(dtype),
            draft_kv_per_token=draft_kv_per_token,
        )

    def draft_and_verify(self, context_tokens: float, batch: int) -> tuple[float, float]:
        """Bytes that each worker reads."""
        num_tokens = batch * context_tokens
        draft = self.draft_weights + num_tokens * self.draft_kv_per_token
        return draft, self.verify_weights + num_tokens * self.verify_kv_per_token


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy on the GPU."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * COPIED_BYTES / median(elapsed_us(partial(target.copy_, source)) for _ in range(NUM_COPIES))
    del source, target
    torch.cuda.empty_cache()
    return 1e6 * rate


def elapsed_us(work: Callable[[], object]) -> float:
    """Microseconds of work on the current stream, which is idle before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms * 1e3


def _draft_bytes(setup: Setup, num_draft_tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a step's draft reads of weights, and of each token of the context.

    Each forward of a head runs a module and the output; an EAGLE-3 head fuses the target's states once, in the first
    one. A language model runs as a whole. Prompt lookup reads each token once.
    """
    if setup.draft is None:
        return 0, torch.int32.itemsize
    if setup.algorithm not in HEADS:
        config = ModelConfig.from_directory(setup.draft)
        weights = _weights(Decoder(config, device=META, dtype=dtype), is_tied=config.tie_word_embeddings)
        return num_draft_tokens * weights, num_draft_tokens * config.kv_bytes_per_token(dtype)
    head = HEADS[setup.algorithm].config(setup.draft)
    model, num_modules = empty_head(head, device=META, dtype=dtype), head.layer.num_layers
    once = sum(weight.nbytes for name, weight in model.named_parameters() if name == "fc.weight")
    output = sum(weight.nbytes for name, weight in model.named_parameters() if name == "head.weight")
    module = (_weights(model, is_tied=False) - once - output) // num_modules
    kv_bytes = num_draft_tokens * head.layer.kv_bytes_per_token(dtype) // num_modules
    return once + num_draft_tokens * (module + output), kv_bytes


def _weights(model: nn.Module, *, is_tied: bool) -> int:
    """Bytes of the weights that a forward reads: only a few rows of the embedding, unless it is the head, too."""
    parameters = dict(model.named_parameters())
    if not is_tied:
        del parameters["embedding"]
    return sum(math.prod(parameter.shape) * parameter.dtype.itemsize for parameter in parameters.values())


def main(
    device: DeviceOption = "cuda",
    shapes: Annotated[
        str, typer.Option(help="Names, separated by commas.")
    ] = "llama-3.1-8b,llama-3.2-1b,llama-3.1-8b-mtp",
    batches: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,4,8,16,32,64",
    repeats: Annotated[int, typer.Option(help="How often the modes take turns.")] = 10,
    plain: Annotated[bool, typer.Option(help="Without a draft, all shapes in turns.")] = False,
    alone: Annotated[bool, typer.Option(help="Three processes alone, all shapes in turns.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Measures decode steps."""
    if plain and alone:
        raise typer.BadParameter("not with --plain, which has no draft", param_hint="--alone")
    names, sizes = shapes.split(","), [int(batch) for batch in batches.split(",")]
    measurements = [m for m in read_rows(json_file, Measurement) if m.shape not in names]
    bandwidth = copy_bandwidth() if device == "cuda" else None

    def keep(batch: Sequence[Measurement]) -> None:
        measurements.extend(batch)
        write_rows(measurements, json_file)

    benchmarks = [DecodeBenchmark(Setup.named(name), device, sizes, bandwidth) for name in names]
    if plain or alone:
        groups = [[(benchmark, PLAIN if plain else THREE) for benchmark in benchmarks]]
    else:
        groups = [[(benchmark, mode) for mode in MODES] for benchmark in benchmarks]
    for group in groups:
        asyncio.run(measure(group, sizes, repeats, keep))


async def measure(
    group: Sequence[tuple[DecodeBenchmark, str]],
    batches: Sequence[int],
    repeats: int,
    keep: Callable[[Sequence[Measurement]], None],
) -> None:
    """Runs shapes and modes side by side, of which one at a time works. `keep` gets the measurements of each turn."""
    async with AsyncExitStack() as held:
        starts = [held.enter_async_context(benchmark.serve(mode)) for benchmark, mode in group]
        servers = await asyncio.gather(*starts)
        for batch in batches:
            for repeat in range(-1, repeats):
                turn = zip(group, servers, strict=True)
                found = [await one.measure(served, mode, batch, repeat) for (one, mode), served in turn]
                if repeat >= 0:
                    keep(found)


class DecodeBenchmark:
    """One pair of models, in each of the modes."""

    def __init__(self, setup: Setup, device: str, batches: Sequence[int], bandwidth: float | None) -> None:
        """`bandwidth`: of a copy, in bytes per second; None if it is not known."""
        self._setup = setup
        self._device = device
        self._batches = batches
        self._bandwidth = bandwidth
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._bytes = StepBytes.of(setup, num_draft_tokens=NUM_DRAFT_TOKENS, dtype=dtype)

    def serve(self, mode: str) -> AbstractAsyncContextManager[Served]:
        """Serves in one of the modes."""
        return {PLAIN: self._plain, THREE: self._three_processes, ONE: self._one_process}[mode]()

    @asynccontextmanager
    async def _plain(self) -> AsyncIterator[Served]:
        """Serves the target without a draft."""
        verify = {name: value for name, value in self._verify.items() if name != "simulate_accept_length"}
        async with Stack(device=self._device) as stack:
            await stack.worker("verify", **verify)
            async with stack.scheduler(**self._scheduler) as served:
                yield served

    @asynccontextmanager
    async def _three_processes(self) -> AsyncIterator[Served]:
        async with Stack(device=self._device) as stack:
            await asyncio.gather(stack.worker("verify", **self._verify), stack.worker("draft", **self._draft))
            async with stack.scheduler("draft", **self._scheduler) as served:
                yield served

    @asynccontextmanager
    async def _one_process(self) -> AsyncIterator[Served]:
        (metrics_port,) = free_ports(1)
        async with Stack() as stack:
            address = stack.socket("one")
            device = {"device": self._device}
            settings = InProcessSettings(
                verify=WorkerConfig(**self._verify, **device),  # type: ignore[arg-type]
                draft=WorkerConfig(**self._draft, **device),  # type: ignore[arg-type]
                scheduler=SchedulerConfig(verify=address, draft=address, **self._scheduler, **device),  # type: ignore[arg-type]
            )
            await stack.process("one", *in_process_command(settings, address, metrics_port))
            async with stack.gateway(address, metrics_port) as served:
                yield served

    @property
    def _verify(self) -> dict[str, Any]:
        setup = self._setup
        return {"model": setup.target, "load_format": setup.load_format, "simulate_accept_length": ACCEPT_LENGTH}

    @property
    def _draft(self) -> dict[str, Any]:
        weights = {"model": self._setup.draft, "load_format": self._setup.load_format}
        return {**weights, "target": self._setup.target, "algorithm": self._setup.algorithm}

    @property
    def _scheduler(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "slots": max(self._batches),
            "context_tokens": self._setup.context_tokens,
            "max_batched_tokens": min(2048, self._setup.context_tokens),
            "kv_memory_mib": self._setup.kv_memory_mib,
            "no_prefix_cache": True,  # the same prompts come in each window
        }

    async def measure(self, served: Served, mode: str, batch: int, repeat: int) -> Measurement:
        """Measures as many windows as have enough steps, and prints a line; `repeat` is -1 to warm up in one."""
        windows = [await self._window(served, batch)]
        sums = windows[0].sums
        while sums.num_steps < LEAST_STEPS and repeat >= 0:
            windows.append(await self._window(served, batch))
            sums += windows[-1].sums
        # What a step finds, on average over the output.
        context = self._setup.prompt_tokens + self._setup.max_new_tokens / 2
        draft_floor_ms, verify_floor_ms = (
            None if self._bandwidth is None else 1e3 * num_bytes / self._bandwidth
            for num_bytes in self._bytes.draft_and_verify(context, batch)
        )
        print(f"{self._setup.name}, batch {batch}, {mode}, repeat {repeat}: ", end="")
        print(f"{sums.mean_ms(sums.step_s):.3f} ms a step", flush=True)
        return Measurement(
            shape=self._setup.name,
            mode=mode,
            batch=batch,
            repeat=repeat,
            step_ms=sums.mean_ms(sums.step_s),
            draft_ms=sums.mean_ms(sums.draft_s),
            verify_ms=sums.mean_ms(sums.verify_s),
            bubble_ms=sums.mean_ms(sums.bubble_s),
            draft_floor_ms=draft_floor_ms,
            verify_floor_ms=verify_floor_ms,
            tokens_per_second=sum(window.num_tokens for window in windows) / sum(w.elapsed_s for w in windows),
            mean_accept_length=mean(window.mean_accept_length for window in windows),
            num_steps=sums.num_steps,
            cpu_ms={name: sums.mean_ms(sum(w.cpu_s[name] for w in windows)) for name in windows[0].cpu_s},
            fence=windows[0].fence,
            mps=windows[0].has_mps,
            copy_bandwidth=self._bandwidth,
            host=host(self._device),
        )

    async def _window(self, served: Served, batch: int) -> Window:
        """Measures from when the last request of a batch has begun until the first one ends."""
        rng = random.Random(SEED)
        prompts = [[rng.randrange(256, 4096) for _ in range(self._setup.prompt_tokens)] for _ in range(batch)]
        options: list[RequestOptions] = [
            {
                "max_new_tokens": self._setup.max_new_tokens,
                "temperature": TEMPERATURE,
                "seed": SEED + number,
                "ignore_eos": True,
            }
            for number in range(batch)
        ]
        return await stream_window(served, prompts, options, warm_up_tokens=WARM_UP_TOKENS)


if __name__ == "__main__":
    typer.run(main)
