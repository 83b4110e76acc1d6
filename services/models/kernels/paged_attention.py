"""Attention over pages by Triton kernels: few queries or a prompt's chunk, lengths known to the GPU alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.services.models.kernels.attention_kernels import attend_kernel, combine_kernel
from slipstream.services.models.kernels.launching import num_multiprocessors, overlapping, power_of_two
from slipstream.services.models.kernels.rotation import keep_kernel

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch, PagedKV
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.decoder import RMSNorm

_MOST_SPLITS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs that share the keys: fewer leave multiprocessors idle, more only add to the reduction."""


class PagedAttention:
    """Attention of one forward, called once for each layer: reads keys and values from their pages.

    Several programs share the keys of a row. What a query sees, what is kept and what goes to the padding page is as
    `TorchAttention` has it; a query that is not valid reads nothing and gives zeros. Everything it launches depends on
    shapes alone, so that it can be captured in a CUDA graph.
    """

    def __init__(self, config: ModelConfig, batch: ForwardBatch, cache: PagedKV, *, is_invariant: bool = False) -> None:
        """Allocates the partial results of the programs that share keys; computes nothing.

        `is_invariant`: a query gets the same bits in any row and batch, which is slower: no programs share keys.
        """
        self._config = config
        self._cache = cache
        self._num_rows, self._width = batch.tokens.shape
        self._page_table = batch.page_table.contiguous()
        self._positions = batch.positions.contiguous()
        self._is_valid = batch.is_valid.contiguous()
        self._limits = batch.limits.contiguous()
        self._starts = None if batch.starts is None else batch.starts.contiguous()
        self._group = config.num_heads // config.num_kv_heads
        self._tile = _tile(self._width * self._group, config.head_dim, cache.rows[0].element_size())
        self._num_query_blocks = -(-self._width * self._group // self._tile.block_m)
        self._num_splits = 1 if is_invariant else self._choose_splits()
        is_split = self._num_splits > 1
        num_partials = self._num_rows * self._width * config.num_heads * self._num_splits if is_split else 1
        self._partial_output = self._limits.new_empty(num_partials, config.head_dim, dtype=torch.float32)
        self._partial_lse = self._limits.new_empty(num_partials, dtype=torch.float32)

    def __call__(
        self, layer: int, qkv: torch.Tensor, rotation: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> torch.Tensor:
        """Normalises, rotates and keeps in one kernel, then attends.

        `qkv`: [B * W, q_size + 2 * kv_size] as the projection left it; its queries are overwritten. `rotation`:
        [B * W, 2, head_dim / 2] float32, of `rotation_of`. `norms`: of each head's queries and keys. Returns
        [B * W, q_size].
        """
        output = qkv.new_empty(len(qkv), self._config.q_size)
        if self._num_rows:
            self._keep(layer, qkv, rotation, norms)
            self._attend(layer, qkv, output)
        return output

    def _attend(self, layer: int, qkv: torch.Tensor, output: torch.Tensor) -> None:
        config = self._config
        window = config.sliding_window(layer)
        grid = (config.num_kv_heads, self._num_query_blocks * self._num_splits, self._num_rows)
        attend_kernel[grid](
            qkv,
            self._cache.rows[layer],
            self._page_table,
            self._positions,
            self._is_valid,
            self._limits,
            self._limits if self._starts is None else self._starts,
            output,
            self._partial_output,
            self._partial_lse,
            self._cache.num_pages,
            self._page_table.shape[1],
            self._width,
            self._num_splits,
            self._num_query_blocks,
            window if window is not None else 0,
            math.log2(math.e) / math.sqrt(config.head_dim),
            PAGE_SIZE=self._cache.page_size,
            KV_HEADS=config.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=max(16, power_of_two(config.head_dim)),
            BLOCK_M=self._tile.block_m,
            BLOCK_N=self._tile.block_n,
            HAS_WINDOW=window is not None,
            HAS_STARTS=self._starts is not None,
            SPARES_MASKS=self._tile.block_m > 64,
            IS_SPLIT=self._num_splits > 1,
            **overlapping(qkv.device),
            num_warps=self._tile.num_warps,
            num_stages=self._tile.num_stages,
        )
        if self._num_splits > 1:
            self._combine(output)

    def _choose_splits(self) -> int:
        if not self._num_rows or self._num_query_blocks > 1:
            return 1
        capacity = self._page_table.shape[1] * self._cache.page_size
        wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(self._limits.device)
        splits = wanted // (self._num_rows * self._config.num_kv_heads)
        return max(1, min(splits, _MOST_SPLITS, -(-capacity // self._tile.block_n)))

    def _keep(
        self, layer: int, qkv: torch.Tensor, rotation: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None
    ) -> None:
        config = self._config
        assert qkv.is_contiguous(), "a kernel reads the rows of qkv side by side"
        num_heads = config.num_heads + 2 * config.num_kv_heads
        block_heads = 8 if len(qkv) >= 256 else 2
        keep_kernel[len(qkv), -(-num_heads // block_heads)](
            qkv,
            self._cache.rows[layer],
            rotation,
            norms[0].weight if norms is not None else qkv,
            norms[1].weight if norms is not None else qkv,
            self._page_table,
            self._positions,
            self._is_valid,
            self._limits,
            self._cache.num_pages,
            self._page_table.shape[1],
            self._width,
            norms[0].eps if norms is not None else 0.0,
            PAGE_SIZE=self._cache.page_size,
            Q_HEADS=config.num_heads,
            KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            BLOCK_HALF=power_of_two(config.head_dim // 2),
            BLOCK_HEADS=block_heads,
            HAS_NORMS=norms is not None,
            **overlapping(qkv.device),
            num_warps=4 if block_heads == 8 else 1,
        )

    def _combine(self, output: torch.Tensor) -> None:
        config = self._config
        combine_kernel[(self._num_rows * self._width * config.num_heads,)](
            self._partial_output,
            self._partial_lse,
            output,
            self._width,
            self._num_splits,
            KV_HEADS=config.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=power_of_two(config.head_dim),
            BLOCK_S=power_of_two(self._num_splits),
            **overlapping(output.device),
            num_warps=1 if self._num_splits <= 8 else 4,
        )


@dataclass(frozen=True, slots=True)
class _Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _tile(num_stacked: int, head_dim: int, element_size: int) -> _Tile:
    """Chooses the tile of a program for `num_stacked` queries of the heads that share a key head."""
    block_m = min(128, max(16, power_of_two(num_stacked)))
    if element_size == 4:
        return _Tile(min(block_m, 64), 32, 4, 2)
    if block_m == 128:
        return _Tile(128, 64, 4 if head_dim <= 128 else 8, 2)
    return _Tile(block_m, 128 if head_dim <= 128 else 64, 4, 2)
