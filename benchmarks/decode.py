"""Decode steps of real models, and where their time goes: three processes against one process on one stream."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from slipstream.benchmarks.in_process import InProcessSettings, in_process_command
from slipstream.benchmarks.models import MODES, NUM_DRAFT_TOKENS, ONE, PLAIN, THREE, Setup
from slipstream.benchmarks.runner import DevicePlan, Row, Table, benchmark, host
from slipstream.benchmarks.stack import Served, Stack, free_ports
from slipstream.benchmarks.streams import SEED, TEMPERATURE, Window, stream_window
from slipstream.cli.load_requests import request
from slipstream.cli.mps import MpsMode
from slipstream.common.errors import ConfigError
from slipstream.common.settings import setting
from slipstream.scheduler.config import SchedulerConfig, parse_number_or_auto
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.experts import Experts
from slipstream.services.models.head_config import HEADS
from slipstream.services.models.heads import make_head
from slipstream.services.worker.config import Shares, WorkerConfig

LEAST_STEPS = 80
"""In a repeat, which takes as many batches of requests as that needs."""
WARM_UP_TOKENS = 16
COPIED_BYTES = 4 << 30
NUM_COPIES = 20
META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that a step reads at least: each weight, and keys and values of the context, once a forward.

    Of experts, those that a step's tokens choose on average if each choice is as likely as any other.
    """

    verify_weights: int
    """Without experts."""
    verify_experts: int
    """All experts of all layers."""
    chosen_share: float
    """Part of the experts that a token chooses."""
    draft_weights: int
    """Weight bytes that all the draft's forwards of a step read together; `draft_kv_per_token` counts likewise."""
    verify_kv_per_token: int
    draft_kv_per_token: int

    @classmethod
    def of(cls, setup: Setup, *, num_draft_tokens: int, dtype: torch.dtype) -> StepBytes:
        """A target and a draft that compute in `dtype`."""
        config = ModelConfig.from_directory(setup.target)
        draft_weights, draft_kv_per_token = _draft_bytes(setup, num_draft_tokens, dtype)
        target, mixture = Decoder(config, device=META, dtype=dtype), config.experts
        experts = sum(
            _nbytes(*(each for name, each in part.named_parameters() if name.startswith(("gate_up", "down"))))
            for part in target.modules()
            if isinstance(part, Experts)
        )
        return cls(
            verify_weights=_weights(target, is_tied=config.tie_word_embeddings) - experts,
            verify_experts=experts,
            chosen_share=mixture.num_chosen / mixture.num_experts if mixture else 0.0,
            draft_weights=draft_weights,
            verify_kv_per_token=config.kv_bytes_per_token(dtype),
            draft_kv_per_token=draft_kv_per_token,
        )

    def draft_and_verify(self, context_tokens: float, batch: int, num_verified: int) -> tuple[float, float]:
        """Bytes that each worker reads. `num_verified`: tokens of verify's forward for each sequence."""
        num_tokens = batch * context_tokens
        draft = self.draft_weights + num_tokens * self.draft_kv_per_token
        experts = self.verify_experts * (1 - (1 - self.chosen_share) ** (batch * num_verified))
        return draft, self.verify_weights + experts + num_tokens * self.verify_kv_per_token


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
    model, num_modules = make_head(head, device=META, dtype=dtype), head.layer.num_layers
    if head.max_draft_tokens:  # drafted in one forward
        return _weights(model, is_tied=False), head.layer.kv_bytes_per_token(dtype)
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
    return _nbytes(*parameters.values())


def _nbytes(*parameters: nn.Parameter | None) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in parameters if each is not None)


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    device: str = setting("cuda", help="Device of the workers.", choices=("cpu", "cuda"))
    shapes: str = setting("llama-3.1-8b,llama-3.2-1b,llama-3.1-8b-mtp", help="Names, separated by commas.")
    batches: str = setting("1,4,8,16,32,64", help="Numbers of concurrent requests.")
    repeats: int = setting(10, help="How often the modes take turns.")
    accept_by_position: Shares | None = setting(
        None,
        help="Shares of accepted draft tokens by position, as of verify's option.",
        unit="X,X,...",
        parse=Shares.parse,
    )
    draft_tokens: int | None = setting(
        NUM_DRAFT_TOKENS,
        help="Draft tokens of each request in each step; auto: as many as pay.",
        unit="K|auto",
        parse=parse_number_or_auto,
    )
    plain: bool = setting(False, help="Without a draft, all shapes in turns.")
    alone: bool = setting(False, help="Only three processes, all shapes in turns.")
    tensor_parallel_size: int = setting(
        1, help="GPUs that the target lies on, with --plain or --alone.", unit="N", low=1, high=8
    )
    mps: str = setting(MpsMode.AUTO.value, help="Whether workers share the GPU under MPS.", choices=tuple(MpsMode))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plain and self.alone:
            raise ConfigError("alone", True, "not with --plain, which has no draft")
        if self.tensor_parallel_size > 1 and not (self.plain or self.alone):
            raise ConfigError("tensor_parallel_size", self.tensor_parallel_size, "1 without --plain or --alone")

    @property
    def sizes(self) -> list[int]:
        """Numbers of concurrent requests."""
        return [int(batch) for batch in self.batches.split(",")]

    def groups(self) -> list[list[tuple[str, str]]]:
        """Shapes and modes that take turns."""
        shapes = self.shapes.split(",")
        if self.plain or self.alone:
            return [[(shape, PLAIN if self.plain else THREE) for shape in shapes]]
        return [[(shape, mode) for mode in MODES] for shape in shapes]


async def measure(plan: Plan, group: Sequence[tuple[str, str]], bandwidth: float | None, table: Table) -> None:
    """Runs shapes and modes side by side, of which one at a time works.

    `bandwidth`: of a copy, in bytes per second; None if it is not known.
    """
    async with AsyncExitStack() as held:
        benchmarks = [DecodeBenchmark(Setup.named(shape), plan, bandwidth) for shape, _ in group]
        starts = [one.serve(mode) for one, (_, mode) in zip(benchmarks, group, strict=True)]
        servers = await asyncio.gather(*map(held.enter_async_context, starts))
        for batch in plan.sizes:
            for repeat in range(-1, plan.repeats):
                turns = zip(benchmarks, servers, group, strict=True)
                rows = [await one.measure(served, mode, batch, repeat) for one, served, (_, mode) in turns]
                for row in rows if repeat >= 0 else ():
                    table.add(row)


class DecodeBenchmark:
    """A pair of models, in each of the modes."""

    def __init__(self, setup: Setup, plan: Plan, bandwidth: float | None) -> None:
        self._setup = setup
        self._plan = plan
        self._bandwidth = bandwidth
        dtype = torch.bfloat16 if plan.device == "cuda" else torch.float32
        self._bytes = StepBytes.of(setup, num_draft_tokens=plan.draft_tokens or NUM_DRAFT_TOKENS, dtype=dtype)

    def serve(self, mode: str) -> AbstractAsyncContextManager[Served]:
        """Serves in a mode."""
        return self._one_process() if mode == ONE else self._processes(has_draft=mode == THREE)

    @asynccontextmanager
    async def _processes(self, *, has_draft: bool) -> AsyncIterator[Served]:
        verify, draft = self._setup.accepting(self._plan.accept_by_position), self._setup.draft_options
        verify |= {"tensor_parallel_size": self._plan.tensor_parallel_size}
        mps = MpsMode(self._plan.mps) if self._plan.device == "cuda" else None
        async with Stack(device=self._plan.device, mps=mps) as stack:
            if has_draft:
                await asyncio.gather(stack.worker("verify", **verify), stack.worker("draft", **draft))
            else:
                await stack.worker(
                    "verify", **verify | {"simulate_accept_length": None, "simulate_accept_by_position": None}
                )
            async with stack.scheduler("draft" if has_draft else None, **self._scheduler) as served:
                yield served

    @asynccontextmanager
    async def _one_process(self) -> AsyncIterator[Served]:
        (metrics_port,) = free_ports(1)
        device: dict[str, Any] = {"device": self._plan.device}
        async with Stack() as stack:
            address = stack.socket("one")
            settings = InProcessSettings(
                verify=WorkerConfig(**self._setup.accepting(self._plan.accept_by_position), **device),
                draft=WorkerConfig(**self._setup.draft_options, **device),
                scheduler=SchedulerConfig(verify=address, draft=address, **self._scheduler, **device),
            )
            await stack.process("one", *in_process_command(settings, address, metrics_port))
            async with stack.gateway(address, metrics_port) as served:
                yield served

    @property
    def _scheduler(self) -> dict[str, Any]:
        return {
            "fixed_draft_tokens": self._plan.draft_tokens,
            "slots": max(self._plan.sizes),
            "context_tokens": self._setup.context_tokens,
            "max_batched_tokens": min(2048, self._setup.context_tokens),
            "kv_memory_mib": self._setup.kv_memory_mib,
            "no_prefix_cache": True,  # the same prompts are sent in each window
        }

    async def measure(self, served: Served, mode: str, batch: int, repeat: int) -> Row:
        """Measures as many windows as have enough steps; `repeat` is -1 to warm up in one."""
        setup, windows = self._setup, [await self._window(served, batch)]
        while sum(window.num_steps for window in windows) < LEAST_STEPS and repeat >= 0:
            windows.append(await self._window(served, batch))
        whole = reduce(add, windows)
        # What a step finds, on average over the output.
        context_tokens = setup.prompt_tokens + setup.max_new_tokens / 2
        num_verified = 1 if mode == PLAIN else NUM_DRAFT_TOKENS + 1
        draft_bytes, verify_bytes = self._bytes.draft_and_verify(context_tokens, batch, num_verified)
        num_bytes = draft_bytes, verify_bytes / self._plan.tensor_parallel_size
        draft_floor_ms, verify_floor_ms = (
            None if self._bandwidth is None else 1e3 * count / self._bandwidth for count in num_bytes
        )
        return {
            "shape": setup.name,
            "mode": mode,
            "ranks": self._plan.tensor_parallel_size,
            "batch": batch,
            "repeat": repeat,
            "fixed_draft_tokens": self._plan.draft_tokens,
            "accept_by_position": self._plan.accept_by_position,
            "step_ms": whole.mean_ms(whole.step_s),
            "draft_ms": whole.mean_ms(whole.draft_s),
            "verify_ms": whole.mean_ms(whole.verify_s),
            "bubble_ms": whole.mean_ms(whole.bubble_s),  # in which neither worker worked
            "draft_floor_ms": draft_floor_ms,  # bytes that must be read, over the bandwidth of a copy
            "verify_floor_ms": verify_floor_ms,
            "tokens_per_second": whole.tokens_per_second,
            "mean_accept_length": mean(window.mean_accept_length for window in windows),
            "num_steps": whole.num_steps,
            "cpu_ms": {name: whole.mean_ms(seconds) for name, seconds in whole.cpu_s.items()},
            "fence": whole.fence,
            "mps": whole.has_mps,
            "copy_bandwidth": self._bandwidth,
            "host": host(self._plan.device),
        }

    async def _window(self, served: Served, batch: int) -> Window:
        """Measures from when the last request of a batch has begun until the first one ends."""
        rng, requests = random.Random(SEED), []
        for number in range(batch):
            prompt = [rng.randrange(256, 4096) for _ in range(self._setup.prompt_tokens)]
            requests.append(request(prompt, self._setup.max_new_tokens, TEMPERATURE, SEED + number))
        return await stream_window(served, requests, warm_up_tokens=WARM_UP_TOKENS)


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Measures decode steps."""
    table, bandwidth = Table(file, "shape"), copy_bandwidth() if plan.device == "cuda" else None
    for group in plan.groups():
        await measure(plan, group, bandwidth, table)
    return []
