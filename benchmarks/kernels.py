"""Where the time of a target's forward goes, kernel by kernel, beside the time of reading its bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.benchmarks.decode import StepBytes, copy_bandwidth, elapsed_us
from slipstream.benchmarks.models import SHAPES_DIR, Setup, write_shape
from slipstream.benchmarks.runner import Table, benchmark, host
from slipstream.common.settings import Settings, setting
from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import LoadFormat, load_decoder
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.paged_kv import PagedKV

PAGE_TOKENS = 16
REPLAYS = 20
WARM_UP = 3
PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a layer, in their order."""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a measurement."""

    shapes: str = setting("llama-3.1-8b,llama-3.2-1b", help="Names, separated by commas.")
    rows: str = setting("1x1,1x5", help="Sequences and tokens of each, separated by commas.", unit="BxW,...")
    context: int = setting(1212, help="Tokens before each sequence's.", unit="N", low=1)


@dataclass
class Part:
    """The launches of a kernel in a forward, and their time."""

    launches: int = 0
    busy_us: float = 0.0
    """From the end of the kernel before, or from its beginning if that was later, to its end."""
    idle_us: float = 0.0
    """From the end of the kernel before to its beginning."""


@dataclass
class Forward:
    """A forward of a model with random weights over some sequences, as one CUDA graph."""

    decoder: Decoder
    batch: int
    width: int
    context: int
    replay: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        device, num_pages = torch.device("cuda"), -(-(self.context + self.width) // PAGE_TOKENS)
        config, shape = self.decoder.config, (self.batch, self.width)
        cache = PagedKV(
            config,
            num_pages=1 + self.batch * num_pages,
            page_size=PAGE_TOKENS,
            device=device,
            dtype=self.decoder.embedding.dtype,
        )
        pages = 1 + torch.arange(self.batch * num_pages, device=device).view(self.batch, -1)
        positions = self.context + torch.arange(self.width, device=device).expand(shape)
        batch = ForwardBatch(
            tokens=torch.randint(0, config.vocab_size, shape, device=device),
            positions=positions.contiguous(),
            is_valid=torch.ones(shape, dtype=torch.bool, device=device),
            page_table=pages,
            limits=torch.full((self.batch,), num_pages * PAGE_TOKENS, device=device),
        )

        def work() -> None:
            self.decoder.logits(self.decoder.forward(batch, cache).hidden)

        work()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        self.replay = graph.replay

    def us(self) -> float:
        """Microseconds of a forward, on average over replays that follow each other."""
        for _ in range(WARM_UP):
            self.replay()
        torch.cuda.synchronize()

        def replay_all() -> None:
            for _ in range(REPLAYS):
                self.replay()

        return elapsed_us(replay_all) / REPLAYS

    def parts(self) -> dict[str, Part]:
        """Returns the kernels by name, products by what they compute, on average of the replays."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(REPLAYS):
                self.replay()
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
        assert len(kernels) % REPLAYS == 0, f"{len(kernels)} kernels in {REPLAYS} replays"
        size, parts = len(kernels) // REPLAYS, dict[str, Part]()
        for begin in range(0, len(kernels), size):
            for name, busy_us, idle_us in timed(kernels[begin : begin + size]):
                part = parts.setdefault(name, Part())
                part.launches += 1
                part.busy_us += busy_us
                part.idle_us += idle_us
        return {
            name: Part(part.launches // REPLAYS, part.busy_us / REPLAYS, part.idle_us / REPLAYS)
            for name, part in parts.items()
        }


def timed(kernels: Sequence[dict[str, Any]]) -> Iterable[tuple[str, float, float]]:
    """Names the kernels of a forward, and gives each the time in which it alone kept the GPU, and that before it.

    A kernel that is launched early waits for the one before, which counts for that one.
    """
    names = list(_named([event["name"] for event in kernels]))
    yield names[0], kernels[0]["dur"], 0.0
    for name, (before, event) in zip(names[1:], pairwise(kernels), strict=True):
        end, begin = before["ts"] + before["dur"], event["ts"]
        yield name, max(0.0, begin + event["dur"] - max(begin, end)), max(0.0, begin - end)


def _named(names: Sequence[str]) -> Iterable[str]:
    """Adds to the names of products what they compute: those of a layer follow each other, the last is the output."""
    kinds = {"product_kernel": list(PRODUCTS), "grouped_kernel": list(PRODUCTS[2:])}
    if "grouped_kernel" in names:
        kinds["product_kernel"] = list(PRODUCTS[:2])
    counts, last = dict.fromkeys(kinds, 0), max((i for i, name in enumerate(names) if name in kinds), default=-1)
    for i, name in enumerate(names):
        if name not in kinds:
            yield name
            continue
        yield f"{name}: logits" if i == last else f"{name}: {kinds[name][counts[name] % len(kinds[name])]}"
        counts[name] += 1


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures forwards of targets with random weights on a GPU."""
    from slipstream.services.models.kernels.fused import FusedDecoder

    table, bandwidth, dtype = Table(file, "shape", "rows"), copy_bandwidth(), torch.bfloat16
    for shape in plan.shapes.split(","):
        target = write_shape(SHAPES_DIR, shape)
        num_bytes = StepBytes.of(Setup.named(f"{shape}-ngram"), num_draft_tokens=1, dtype=dtype)
        decoder = load_decoder(
            target, device=torch.device("cuda"), dtype=dtype, load_format=LoadFormat.DUMMY, decoder_class=FusedDecoder
        )
        for rows in plan.rows.split(","):
            batch, width = map(int, rows.split("x"))
            forward = Forward(decoder, batch, width, plan.context)
            forward_us, parts = mean(forward.us() for _ in range(WARM_UP)), forward.parts()
            floor_us = 1e6 * num_bytes.draft_and_verify(plan.context, batch, width)[1] / bandwidth
            table.add(
                {
                    "shape": shape,
                    "rows": rows,
                    "forward_us": forward_us,
                    "floor_us": floor_us,  # bytes that must be read, over the bandwidth of a copy
                    "over_floor": forward_us / floor_us,
                    "launches": sum(part.launches for part in parts.values()),
                    "kernels": [
                        {"kernel": name, **vars(part)}
                        for name, part in sorted(parts.items(), key=lambda each: -each[1].busy_us)
                    ],
                    "context": plan.context,
                    "copy_bandwidth": bandwidth,
                    "host": host("cuda"),
                }
            )
        del decoder, forward
        torch.cuda.empty_cache()
