"""FP8 weights on a GPU: they stay FP8, give the numbers that a CPU computes with them, and work in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.kernels.fused import FusedDecoder
from slipstream.services.models.kernels.products import MOST_ROWS
from slipstream.services.models.paged_kv import PagedKV
from tests.harness.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.harness.fp8_checkpoints import FP8_LAYOUTS, quantise

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.services.models.decoder import Decoder

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 1280}
NUM_TOKENS = MOST_ROWS + 30
PAGE_SIZE = 16
NUM_PAGES = 16

MOST_ERROR = 0.08
"""Relative. Bfloat16 alone makes 0.057 of the prompt, on a CPU; a scale in the wrong place far more."""


def batch_of(num_rows: int, device: torch.device) -> ForwardBatch:
    """A prompt in one row, or its first tokens in rows of their own."""
    tokens = torch.randint(0, VOCAB_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(4))
    pages = torch.arange(1, NUM_PAGES)
    if num_rows > 1:
        tokens = tokens[0, :num_rows, None]
        pages = pages[:num_rows, None]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    return ForwardBatch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        is_valid=torch.ones_like(tokens, dtype=torch.bool).to(device),
        page_table=pages.view(len(tokens), -1).to(device),
        limits=torch.full((len(tokens),), pages.numel() // len(tokens) * PAGE_SIZE).to(device),
    )


def logits_of(decoder: Decoder, num_rows: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Computes logits of a batch on empty pages."""
    cache = PagedKV(decoder.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, device=device, dtype=dtype)
    output = decoder.forward(batch_of(num_rows, device), cache)
    return decoder.logits(output.hidden).to("cpu", torch.float32)


@pytest.mark.parametrize("layout", FP8_LAYOUTS)
def test_numbers_are_the_cpus_up_to_bfloat16(device: CudaDevice, tmp_path: Path, layout: str) -> None:
    path = write_checkpoint(tmp_path, **SIZES)
    quantise(path, layout)
    expected = load_decoder(path, device=CPU, dtype=torch.float32)
    exact = load_decoder(path, device=device.torch_device, dtype=torch.float32, decoder_class=FusedDecoder)
    decoder = load_decoder(path, device=device.torch_device, dtype=torch.bfloat16, decoder_class=FusedDecoder)
    assert all(layer.qkv.packed_fp8 is not None for layer in decoder.layers)
    for num_rows in (1, 5):  # many tokens of a prompt, then few
        by_cpu = logits_of(expected, num_rows, CPU, torch.float32)
        in_float32 = logits_of(exact, num_rows, device.torch_device, torch.float32)
        torch.testing.assert_close(in_float32, by_cpu, atol=2e-3 * by_cpu.std().item(), rtol=1e-3)
        found = logits_of(decoder, num_rows, device.torch_device, torch.bfloat16)
        error = (found - by_cpu).norm() / by_cpu.norm()
        assert error < MOST_ERROR, f"{num_rows} rows: {error:.4f}"


def test_a_graph_gives_the_same_bits(device: CudaDevice, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **SIZES)
    quantise(path, "fp8")
    where = device.torch_device
    decoder = load_decoder(path, device=where, dtype=torch.bfloat16, decoder_class=FusedDecoder)
    cache = PagedKV(decoder.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, device=where, dtype=torch.bfloat16)
    for num_rows in (1, 5):
        batch = batch_of(num_rows, where)
        expected = decoder.logits(decoder.forward(batch, cache).hidden)  # compiles
        others = replace(batch, tokens=torch.zeros_like(batch.tokens))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decoder.logits(decoder.forward(others, cache).hidden)
        others.tokens.copy_(batch.tokens)
        graph.replay()
        assert torch.equal(captured, expected)
