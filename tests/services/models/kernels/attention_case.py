"""Random batches over pages, and attention over them in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from slipstream.services.models.attention import ForwardBatch, RaggedRows, TorchAttention
from slipstream.services.models.config import ModelConfig, RopeConfig
from slipstream.services.models.kernels.paged_attention import PagedAttention
from slipstream.services.models.paged_kv import PADDING_PAGE, PagedKV

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Absolute, of values whose standard deviation is at most 1."""


def some_config(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    sliding_windows: tuple[int | None, ...] = (),
    num_layers: int = 1,
    score_scale: float | None = None,
    score_cap: float | None = None,
) -> ModelConfig:
    """Makes a configuration of which only the attention matters."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=num_heads * head_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        sliding_windows=sliding_windows,
        score_scale=1 / math.sqrt(head_dim) if score_scale is None else score_scale,
        score_cap=score_cap,
    )


FP8_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch whose rows hold `lengths` keys before it; keys that a row may not see are NaN."""

    config: ModelConfig
    cache: PagedKV
    batch: ForwardBatch
    qkv: torch.Tensor
    sinks: torch.Tensor | None = None
    """[num_heads] float32."""

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        lengths: Sequence[int],
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        page_size: int = 4,
        spare_pages: int = 2,
        is_fp8: bool = False,
    ) -> AttentionCase:
        """Rows in pages of their own, in random order."""
        print(f"torch seed {seed}")
        generator = torch.Generator().manual_seed(seed)
        num_rows = len(lengths)
        pages_per_row = -(-(max(lengths) + width) // page_size) + spare_pages
        num_pages = 1 + num_rows * pages_per_row
        cache = PagedKV(config, num_pages=num_pages, page_size=page_size, device=device, dtype=dtype, is_fp8=is_fp8)
        page_table = (1 + torch.randperm(num_pages - 1, generator=generator)).view(num_rows, pages_per_row)
        for layer, rows in enumerate(cache.rows):
            rows.fill_(FP8_NAN if is_fp8 else float("nan"))
            for row, length in enumerate(lengths):
                place = torch.arange(length)
                at = page_table[row, place // page_size] * page_size + place % page_size
                values = torch.randn(length, rows.shape[1], generator=generator)
                cache.keep(layer, at.to(device), values.to(device, dtype))
        batch = ForwardBatch(
            tokens=torch.zeros(num_rows, width, dtype=torch.int64, device=device),
            positions=(torch.tensor(lengths)[:, None] + torch.arange(width)).to(device),
            is_valid=torch.ones(num_rows, width, dtype=torch.bool, device=device),
            page_table=page_table.to(device),
            limits=torch.full((num_rows,), pages_per_row * page_size, device=device),
        )
        qkv = torch.randn(num_rows * width, config.q_size + 2 * config.kv_size, generator=generator)
        return cls(config, cache, batch, qkv.to(device, dtype))

    def attend(self, layer: int = 0, *, is_invariant: bool = False) -> torch.Tensor:
        """`PagedAttention` with queries and keys that are not rotated: [B * W, q_size]."""
        rotation = torch.zeros(len(self.qkv), 2, self.config.head_dim // 2, device=self.qkv.device)
        rotation[:, 0] = 1.0
        attend = PagedAttention(self.config, self.batch, self.cache, is_invariant=is_invariant)
        return attend(layer, self.qkv.clone(), rotation, sinks=self.sinks)

    def change(self, **changes: torch.Tensor) -> AttentionCase:
        """Other tensors in the batch."""
        return replace(self, batch=replace(self.batch, **changes))

    def ragged(self, widths: Sequence[int]) -> AttentionCase:
        """The first tokens of each row, `widths` of them, one row behind the other."""
        batch, device = self.batch, self.qkv.device
        is_taken = torch.arange(batch.tokens.shape[1], device=device) < torch.tensor(widths, device=device)[:, None]
        begins = torch.tensor([0, *accumulate(widths)], device=device)
        num_keys = tuple(int(row[width - 1]) + 1 for row, width in zip(batch.positions, widths, strict=True))
        flat = replace(
            batch,
            tokens=batch.tokens[is_taken],
            positions=batch.positions[is_taken],
            is_valid=batch.is_valid[is_taken],
            ragged=RaggedRows(tuple(widths), is_taken.nonzero()[:, 0], begins, num_keys),
        )
        return replace(self, batch=flat, qkv=self.qkv[is_taken.flatten()])

    def as_in_a_graph(self, num_rows: int, num_tokens: int) -> AttentionCase:
        """Ragged rows, with empty rows and with padding behind, so many together; only the device knows how many."""
        batch, ragged = self.batch, self.batch.ragged
        assert ragged is not None
        missing, padding = num_rows - len(batch.limits), num_tokens - len(batch.tokens)

        def with_padding(values: torch.Tensor, value: int) -> torch.Tensor:
            return F.pad(values, (0, padding), value=value)

        flat = replace(
            batch,
            tokens=with_padding(batch.tokens, 3),
            positions=with_padding(batch.positions, 5),
            is_valid=F.pad(batch.is_valid, (0, padding), value=False),
            page_table=F.pad(batch.page_table, (0, 0, 0, missing)),
            limits=F.pad(batch.limits, (0, missing), value=99),
            ragged=RaggedRows(
                None,
                with_padding(ragged.rows, num_rows - 1),
                F.pad(ragged.begins, (0, missing), value=len(batch.tokens)),
            ),
        )
        return replace(self, batch=flat, qkv=F.pad(self.qkv, (0, 0, 0, padding), value=float("nan")))

    def assert_as_pytorch(self, layer: int = 0) -> None:
        """Compares outputs of valid queries and kept pages to PyTorch's; what is not valid sees nothing."""
        # Places that no query of the row has filled hold what an earlier request left there: numbers.
        self.cache.rows[layer].nan_to_num_(nan=0.25)
        before = self.cache.rows[layer].clone()
        expected = TorchAttention(self.config, self.batch, self.cache)(layer, self.qkv.clone(), sinks=self.sinks)
        pages = self.kept_pages(layer)
        self.cache.rows[layer].copy_(before)
        output, is_valid = self.attend(layer), self.batch.is_valid.flatten()
        torch.testing.assert_close(output[is_valid], expected[is_valid], atol=1e-5, rtol=0)
        assert (output[~is_valid] == 0).all(), "padding sees nothing"
        assert torch.equal(self.kept_pages(layer), pages), "what is kept, and where"

    def pages(self, layer: int) -> torch.Tensor:
        """A view of all pages: [num_pages, page_size, 2, kv_heads, head_dim], keys first."""
        shape = (self.cache.num_pages, self.cache.page_size, 2, self.config.num_kv_heads, self.config.head_dim)
        return self.cache.rows[layer].view(shape)

    def kept_pages(self, layer: int = 0) -> torch.Tensor:
        """A copy of all pages but the padding page: [num_pages - 1, page_size, 2, kv_heads, head_dim] float64."""
        return self.pages(layer)[PADDING_PAGE + 1 :].to(torch.float64).cpu()

    def expected(self, layer: int = 0, *, qkv: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of valid queries over pages that hold the batch's keys: [B, W, q_size] float64; zeros elsewhere."""
        config, batch = self.config, self.batch
        num_rows, width = batch.tokens.shape
        queries = (qkv if qkv is not None else self.qkv)[:, : config.q_size].to(torch.float64).cpu()
        queries = queries.view(num_rows, width, config.num_heads, config.head_dim)
        output = torch.zeros_like(queries)
        for row, query in batch.is_valid.nonzero().tolist():
            places = self._seen(row, query, layer)
            keys, values = self._read(row, places, layer)
            scores = torch.einsum("hd,nhd->hn", queries[row, query], keys) * config.score_scale
            if config.score_cap is not None:
                scores = config.score_cap * torch.tanh(scores / config.score_cap)
            weights = scores.softmax(dim=1)
            if self.sinks is not None:
                weights = torch.cat((scores, self.sinks[:, None].to(scores).cpu()), dim=1).softmax(dim=1)[:, :-1]
            output[row, query] = torch.einsum("hn,nhd->hd", weights, values)
        return output.flatten(2)

    def _seen(self, row: int, query: int, layer: int) -> range:
        capacity = self.batch.page_table.shape[1] * self.cache.page_size
        end = min(max(int(self.batch.limits[row]), 0), capacity)
        last = max(min(int(self.batch.positions[row, query]), end - 1), 0)
        window = self.config.sliding_window(layer)
        first = 0 if window is None else max(0, last - window + 1)
        if self.batch.starts is not None:
            first = max(first, min(int(self.batch.starts[row]), last))
        return range(first, last + 1)

    def _read(self, row: int, places: range, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.config.num_heads // self.config.num_kv_heads
        size = self.cache.page_size
        at = [(int(self.batch.page_table[row, place // size]), place % size) for place in places]
        pages, offsets = zip(*at, strict=True)
        keys, values = (
            half[list(pages), list(offsets)].to(torch.float64).cpu().repeat_interleave(group, dim=1)
            for half in self.pages(layer).unbind(dim=2)
        )
        return keys, values

    def assert_close(self, output: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares valid queries to the dtype's tolerance; outputs of the others are finite."""
        assert output.isfinite().all()
        is_valid = self.batch.is_valid.cpu()
        difference = (output.to(torch.float64).cpu().view_as(expected) - expected)[is_valid].abs()
        assert difference.max() <= TOLERANCES[output.dtype], f"differs by {difference.max():.2e}"
