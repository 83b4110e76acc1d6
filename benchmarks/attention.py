r"""Attention over pages against the time that reading its keys and values takes, and against PyTorch's.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json \
        --picture benchmarks/results/attention_h200.png

The shape is Llama-3.1-8B's: 32 query heads, 8 key heads of 128, bfloat16; each row has 5 new tokens, as verify has
with 4 drafted. Both run as CUDA graphs over as many layers as keep their keys and values out of the cache, in turns.
PyTorch's fused attention gets them side by side instead of in pages, and the queries of a key head stacked.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from statistics import median
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
import typer

from slipstream.benchmarks.hardware import host
from slipstream.services.models.attention import ForwardBatch, PagedKV
from slipstream.services.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 7
WIDTH = 5
PAGE_TOKENS = 16
TABLE_TOKENS = 33 * 1024
"""What a row's page table has room for, whatever the row's length."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
COLD_BYTES = 256 << 20
"""Several times the cache, so that a layer's keys have left it when its turn comes again."""
REPEATS = 20
COPIED_BYTES = 4 << 30
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
SHAPE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope=RopeConfig(theta=500000.0),
    tie_word_embeddings=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One batch of rows of one length; times are medians, of one layer."""

    batch: int
    context: int
    num_layers: int
    read_bytes: int
    """Keys and values of all tokens that the queries see."""
    floor_us: float
    """How long a copy would take that reads and writes as many bytes together."""
    kernel_us: float
    """Attention, with the reduction over splits."""
    with_rotation_us: float
    """The same after rotating queries and keys and writing keys and values to their pages."""
    torch_us: float
    share_of_bandwidth: float
    """floor_us / kernel_us."""
    greatest_difference: float
    """Between the two outputs, whose values are about 1 / sqrt(context)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the JSON file holds."""

    host: str
    torch: str
    seed: int
    width: int
    copy_terabytes_per_second: float
    measurements: list[Measurement]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the report.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Measures all batches and contexts."""
    torch.manual_seed(SEED)
    bandwidth = _copy_bandwidth()
    print(f"{host('cuda')}, PyTorch {torch.__version__}; copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    measurements = []
    for context in CONTEXTS:
        for batch in BATCHES:
            measurements.append(_Case(batch, context).measure(bandwidth))
            print(_line(measurements[-1]), flush=True)
    report = Report(
        host=host("cuda"),
        torch=torch.__version__,
        seed=SEED,
        width=WIDTH,
        copy_terabytes_per_second=bandwidth / 1e12,
        measurements=measurements,
    )
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if picture is not None:
        from slipstream.benchmarks.attention_picture import draw

        draw(report, picture)


class _Case:
    """Rows of one length, in pages of a random order."""

    def __init__(self, batch: int, context: int) -> None:
        from slipstream.services.models.decoder import inverse_frequencies
        from slipstream.services.models.kernels.paged_attention import PagedAttention
        from slipstream.services.models.kernels.rotation import rotation_of

        self._batch, self._context = batch, context
        self._num_tokens = context + WIDTH
        self._read_bytes = batch * self._num_tokens * SHAPE.kv_bytes_per_token(DTYPE)
        self._num_layers = max(1, math.ceil(COLD_BYTES / self._read_bytes))
        config = replace(SHAPE, num_layers=self._num_layers)
        pages_per_row = -(-self._num_tokens // PAGE_TOKENS)
        num_pages = 1 + batch * pages_per_row
        self._cache = PagedKV(config, num_pages=num_pages, page_size=PAGE_TOKENS, device=DEVICE, dtype=DTYPE)
        for rows in self._cache.rows:
            rows.normal_()
        page_table = torch.zeros(batch, TABLE_TOKENS // PAGE_TOKENS, dtype=torch.int64, device=DEVICE)
        order = 1 + torch.randperm(num_pages - 1, device=DEVICE)
        page_table[:, :pages_per_row] = order.view(batch, pages_per_row)
        positions = (context + torch.arange(WIDTH, device=DEVICE)).repeat(batch, 1)
        self._forward = ForwardBatch(
            tokens=torch.zeros_like(positions),
            positions=positions,
            is_valid=torch.ones_like(positions, dtype=torch.bool),
            page_table=page_table,
            limits=torch.full((batch,), TABLE_TOKENS, device=DEVICE),
        )
        self._qkv = torch.randn(batch * WIDTH, config.q_size + 2 * config.kv_size, device=DEVICE, dtype=DTYPE)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(DEVICE)
        self._rotation = rotation_of(positions, frequencies, config.max_position_embeddings)
        self._attend = PagedAttention(config).prepare(self._forward, self._cache)

    def measure(self, bandwidth: float) -> Measurement:
        """Takes turns, so that a change of clocks is one for all."""
        query, mask = self._torch_inputs()
        output = self._attend(0, self._qkv)
        keys, values = self._side_by_side(0)
        reference = self._unstacked(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))
        difference = (output - reference).abs().max().item()
        dense = [self._side_by_side(layer) for layer in range(self._num_layers)]
        kernel, with_rotation, by_torch = _medians(
            [
                lambda: [self._attend.attend(layer, self._qkv) for layer in range(self._num_layers)],
                lambda: [
                    self._attend.rotate_and_attend(layer, self._qkv, self._rotation)
                    for layer in range(self._num_layers)
                ],
                lambda: [F.scaled_dot_product_attention(query, *kv, attn_mask=mask) for kv in dense],
            ]
        )
        floor_us = self._read_bytes / bandwidth * 1e6
        return Measurement(
            batch=self._batch,
            context=self._context,
            num_layers=self._num_layers,
            read_bytes=self._read_bytes,
            floor_us=floor_us,
            kernel_us=kernel / self._num_layers,
            with_rotation_us=with_rotation / self._num_layers,
            torch_us=by_torch / self._num_layers,
            share_of_bandwidth=floor_us / (kernel / self._num_layers),
            greatest_difference=difference,
        )

    def _torch_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, kv_heads, group * W, head_dim] and what is added to their scores."""
        group = SHAPE.num_heads // SHAPE.num_kv_heads
        query = self._qkv[:, : SHAPE.q_size].view(self._batch, WIDTH, SHAPE.num_kv_heads, group, SHAPE.head_dim)
        query = query.permute(0, 2, 3, 1, 4).reshape(self._batch, SHAPE.num_kv_heads, group * WIDTH, SHAPE.head_dim)
        is_hidden = torch.arange(self._num_tokens, device=DEVICE) > self._forward.positions[0][:, None]
        mask = torch.zeros(WIDTH, self._num_tokens, device=DEVICE, dtype=DTYPE).masked_fill(is_hidden, float("-inf"))
        return query, mask.repeat(group, 1)

    def _side_by_side(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, kv_heads, tokens, head_dim], contiguous."""
        places = torch.arange(self._num_tokens, device=DEVICE)
        rows = self._forward.page_table[:, places // PAGE_TOKENS] * PAGE_TOKENS + places % PAGE_TOKENS
        kv = self._cache.rows[layer][rows].view(*rows.shape, 2, SHAPE.num_kv_heads, SHAPE.head_dim)
        keys, values = kv.permute(2, 0, 3, 1, 4).contiguous()
        return keys, values

    def _unstacked(self, output: torch.Tensor) -> torch.Tensor:
        group = SHAPE.num_heads // SHAPE.num_kv_heads
        heads = output.view(self._batch, SHAPE.num_kv_heads, group, WIDTH, SHAPE.head_dim)
        return heads.permute(0, 3, 1, 2, 4).reshape(self._batch * WIDTH, SHAPE.q_size)


def _medians(works: list[Callable[[], object]]) -> list[float]:
    """Microseconds of each, as CUDA graphs that take turns."""
    graphs = []
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.stream(stream):
        for work in works:
            work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                work()
            graphs.append(graph)
        times: list[list[float]] = [[] for _ in works]
        for repeat in range(REPEATS + 2):
            for graph, own in zip(graphs, times, strict=True):
                elapsed_us = _elapsed_us(graph.replay)
                if repeat >= 2:
                    own.append(elapsed_us)
    return [median(own) for own in times]


def _copy_bandwidth() -> float:
    """Bytes read and written per second by PyTorch's own copy on the device."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = [_elapsed_us(lambda: target.copy_(source)) for _ in range(REPEATS)]
    return 2 * COPIED_BYTES / median(times) * 1e6


def _elapsed_us(work: Callable[[], object]) -> float:
    """Microseconds on the current stream, which is idle before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms * 1e3


def _line(m: Measurement) -> str:
    return (
        f"batch {m.batch:2d}, context {m.context:5d}: {m.kernel_us:7.1f} us, {m.share_of_bandwidth:.0%} of the copy "
        f"bandwidth; with rotation and KV write {m.with_rotation_us:.1f} us; PyTorch's {m.torch_us:.1f} us "
        f"({m.torch_us / m.kernel_us:.1f} times as long); they differ by {m.greatest_difference:.1e}"
    )


if __name__ == "__main__":
    typer.run(main)
