"""Attention over pages by Triton kernels: few queries or a prompt's chunk, lengths known to the GPU alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.services.models.attention import JoinedBatch, LastOutputs
from slipstream.services.models.kernels.attention_kernels import attend_kernel, combine_kernel, combine_tiles_kernel
from slipstream.services.models.kernels.attention_plan import MOST_SPLITS, RaggedPlan
from slipstream.services.models.kernels.launching import is_hopper, num_multiprocessors, overlapping, power_of_two
from slipstream.services.models.kernels.rotation import keep_kernel

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch, PagedKV, RaggedRows
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.decoder import RMSNorm

_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs that share the keys: fewer leave multiprocessors idle, more only add to the reduction."""


_MAX_GRID = 2**16 - 1
"""Programs of CUDA's second and third dimension of a grid; the first has 2^31 - 1."""


class PagedAttention:
    """Attention of one forward, called once for each layer: reads keys and values from their pages.

    Several programs share the keys of a long row. What a query sees, what is kept and what goes to the padding page is
    as `TorchAttention` has it; a query that is not valid reads nothing and gives zeros. Everything it launches depends
    on shapes alone, so that it can be captured in a CUDA graph.
    """

    def __init__(self, config: ModelConfig, batch: ForwardBatch, cache: PagedKV, *, is_invariant: bool = False) -> None:
        """Allocates the partial results of the programs that share keys; plans the tiles of ragged rows.

        `is_invariant`: a query gets the same bits in any row and batch, which is slower: no programs share keys.
        """
        self.outputs = LastOutputs(config, batch.outputs)
        self._config = config
        self._cache = cache
        self._of_outputs: PagedAttention | None = None
        if batch.outputs is not None and len(batch.outputs):
            self._of_outputs = PagedAttention(config, batch.one_token_rows(batch.outputs), cache)
        self._num_tokens = batch.tokens.numel()
        self._page_table = batch.page_table.contiguous()
        self._positions = batch.positions.contiguous()
        self._is_valid = batch.is_valid.contiguous()
        self._limits = batch.limits.contiguous()
        self._starts = None if batch.starts is None else batch.starts.contiguous()
        self._group = config.num_heads // config.num_kv_heads
        self._ragged = batch.ragged
        element_size = cache.rows[0].element_size()
        self._plan: RaggedPlan | None = None
        self._reads_blocks = batch.ragged is not None and _has_blocks(cache, config.head_dim)
        if batch.ragged is not None:
            self._width, self._num_splits, self._num_query_blocks = self._num_tokens, 1, 1
            is_large = not self._reads_blocks and (is_invariant or _are_long(batch.ragged))
            self._tile = _tile_of_ragged(self._group, config.head_dim, element_size, is_large=is_large)
            self._plan = self._make_plan(batch.ragged, is_invariant=is_invariant)
            self._is_split = not is_invariant  # one kernel, whether any row has splits or none
            self._has_splits = self._plan.num_places > 0
            num_partials = self._plan.num_places * config.num_kv_heads * self._tile.block_m
            self._grid: tuple[int, ...] = (config.num_kv_heads * self._plan.items.shape[1],)
        else:
            num_rows, self._width = batch.tokens.shape
            self._tile = _tile(self._width * self._group, config.head_dim, element_size)
            self._num_query_blocks = -(-self._width * self._group // self._tile.block_m)
            self._num_splits = 1 if is_invariant else self._choose_splits(num_rows)
            self._is_split = self._has_splits = self._num_splits > 1
            num_partials = self._num_tokens * config.num_heads * self._num_splits
            self._grid = (config.num_kv_heads, self._num_query_blocks * self._num_splits, num_rows)
            most = max(self._grid[1:])
            assert most <= _MAX_GRID, f"{num_rows} rows of {self._width} tokens: a GPU has {_MAX_GRID} programs there"
        num_partials = num_partials if self._has_splits else 1
        self._partial_output = self._limits.new_empty(num_partials, config.head_dim, dtype=torch.float32)
        self._partial_lse = self._limits.new_empty(num_partials, dtype=torch.float32)

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalises, rotates and keeps in one kernel, then attends.

        `qkv`: [N, q_size + 2 * kv_size] as the projection left it; its queries are overwritten. `rotation`:
        [N, 2, head_dim / 2] float32, of `rotation_of`. `norms`: of each head's queries and keys. `output`: [N, q_size],
        to be filled; None for a new one. Returns it; in the last layer a new one, of the outputs that are read.
        """
        if self._num_tokens:
            self._keep(layer, qkv, rotation, norms)
        if self.outputs.are_none(layer):
            return qkv[:0, : self._config.q_size]
        if not self.outputs.are_all(layer):
            assert self._of_outputs is not None, "there are some"
            read = self.outputs.of(layer, qkv)
            output = read.new_empty(len(read), self._config.q_size)
            self._of_outputs._attend(layer, read, output)
            return output
        if output is None:
            output = qkv.new_empty(len(qkv), self._config.q_size)
        if self._num_tokens:
            self._attend(layer, qkv, output)
        return output

    def _attend(self, layer: int, qkv: torch.Tensor, output: torch.Tensor) -> None:
        config = self._config
        window, kv = config.sliding_window(layer), self._cache.rows[layer]
        attend_kernel[self._grid](
            qkv,
            kv,
            TensorDescriptor.from_tensor(kv, [self._tile.block_n, config.head_dim]) if self._reads_blocks else kv,
            self._page_table,
            self._positions,
            self._is_valid,
            self._limits,
            self._limits if self._starts is None else self._starts,
            self._limits if self._ragged is None else self._ragged.begins,
            self._limits if self._plan is None else self._plan.items,
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
            BLOCK_D=max(_LEAST_DIM, power_of_two(config.head_dim)),
            BLOCK_M=self._tile.block_m,
            BLOCK_N=self._tile.block_n,
            HAS_WINDOW=window is not None,
            HAS_STARTS=self._starts is not None,
            IS_SPLIT=self._is_split,
            IS_RAGGED=self._ragged is not None,
            READS_BLOCKS=self._reads_blocks,
            **overlapping(qkv.device),
            num_warps=self._tile.num_warps,
            num_stages=self._tile.num_stages,
        )
        if self._has_splits:
            self._combine(output)

    def _choose_splits(self, num_rows: int) -> int:
        if not num_rows or self._num_query_blocks > 1:
            return 1
        splits = self._wanted_programs // (num_rows * self._config.num_kv_heads)
        return max(1, min(splits, MOST_SPLITS, -(-self._capacity // self._tile.block_n)))

    def _make_plan(self, ragged: RaggedRows, *, is_invariant: bool) -> RaggedPlan:
        spare = 0 if is_invariant else max(1, self._wanted_programs // self._config.num_kv_heads)
        tokens = self._tile.block_m // self._group
        return RaggedPlan.of(ragged, self._positions, self._limits, capacity=self._capacity, tokens=tokens, spare=spare)

    @property
    def _wanted_programs(self) -> int:
        return _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(self._limits.device)

    @property
    def _capacity(self) -> int:
        return self._page_table.shape[1] * self._cache.page_size

    def _keep(
        self, layer: int, qkv: torch.Tensor, rotation: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None
    ) -> None:
        config = self._config
        assert qkv.is_contiguous(), "a kernel reads the rows of qkv side by side"
        block_heads = 16 if len(qkv) >= 256 else 2
        num_programs = -(-config.num_heads // block_heads) + -(-2 * config.num_kv_heads // block_heads)
        keep_kernel[len(qkv), num_programs](
            qkv,
            self._cache.rows[layer],
            rotation,
            norms[0].weight if norms is not None else qkv,
            norms[1].weight if norms is not None else qkv,
            self._page_table,
            self._positions,
            self._is_valid,
            self._limits,
            self._limits if self._ragged is None else self._ragged.rows,
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
            IS_RAGGED=self._ragged is not None,
            **overlapping(qkv.device),
            num_warps=4 if block_heads == 16 else 1,
        )

    def _combine(self, output: torch.Tensor) -> None:
        if self._plan is not None:
            self._combine_tiles(self._plan, output)
            return
        head_dim = self._config.head_dim
        combine_kernel[(output.numel() // head_dim,)](
            self._partial_output,
            self._partial_lse,
            output,
            self._num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=power_of_two(head_dim),
            BLOCK_S=power_of_two(self._num_splits),
            **overlapping(output.device),
            num_warps=1 if self._num_splits <= 8 else 4,
        )

    def _combine_tiles(self, plan: RaggedPlan, output: torch.Tensor) -> None:
        config, block_m = self._config, self._tile.block_m
        num_tiles = plan.split_tiles.shape[1]
        combine_tiles_kernel[config.num_kv_heads * (block_m // _COMBINED), num_tiles](
            self._partial_output,
            self._partial_lse,
            plan.split_tiles,
            output,
            num_tiles,
            KV_HEADS=config.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=power_of_two(config.head_dim),
            BLOCK_M=block_m,
            BLOCK_Q=_COMBINED,
            BLOCK_S=8,
            **overlapping(output.device),
            num_warps=4,
        )


class JoinedAttention:
    """Attention of a forward over several batches, each with the tiles that suit it. Called as `PagedAttention`."""

    def __init__(self, config: ModelConfig, batch: JoinedBatch, cache: PagedKV) -> None:
        self.outputs = LastOutputs(config, batch.outputs)
        self._config = config
        self._sizes = batch.sizes
        self._parts = [PagedAttention(config, part, cache) for part in batch.parts]

    def __call__(
        self, layer: int, qkv: torch.Tensor, rotation: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> torch.Tensor:
        output = qkv.new_empty(len(qkv), self._config.q_size)
        split = (torch.split(values, self._sizes) for values in (qkv, rotation, output))
        made = [
            part(layer, qkv_part, rotation_part, norms, output_part)
            for part, qkv_part, rotation_part, output_part in zip(self._parts, *split, strict=True)
        ]
        return output if self.outputs.are_all(layer) else torch.cat(made)


def paged_attention(
    config: ModelConfig, batch: ForwardBatch | JoinedBatch, cache: PagedKV, *, is_invariant: bool
) -> PagedAttention | JoinedAttention:
    """Makes the attention of one forward. A joined batch has none that is the same in any batch."""
    if isinstance(batch, JoinedBatch):
        return JoinedAttention(config, batch, cache)
    return PagedAttention(config, batch, cache, is_invariant=is_invariant)


_LEAST_DIM = 16
"""Dimensions that a product of tensor cores has at least: a smaller head is padded, which a block is not."""
_COMBINED = 8
"""Stacked queries of which one program combines the splits."""
_LARGE = 128
"""Stacked queries of the largest tile."""


@dataclass(frozen=True, slots=True)
class _Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_PROMPT_TILE = _Tile(_LARGE, 64, 8, 3)
"""For heads of up to 128. Two groups of four warps share a block of keys, of which the next two are under way."""
_WIDE_PROMPT_TILE = _Tile(_LARGE, 64, 8, 2)
_SMALL_TILE = _Tile(64, 64, 4, 3)
"""For heads of up to 128 where keys come in blocks, and for rows of which most have a few tokens: a larger tile would
compute mostly with padding."""
_LONG_TOKENS, _LONG_ROW = 512, 128
"""Tokens of ragged rows, together and on average, from which a large tile is faster."""


def _tile(num_stacked: int, head_dim: int, element_size: int) -> _Tile:
    """Chooses the tile of a program for `num_stacked` queries of the heads that share a key head."""
    block_m = min(_LARGE, max(16, power_of_two(num_stacked)))
    if element_size == 4:
        return _Tile(min(block_m, 64), 32, 4, 2)
    if block_m == _LARGE:
        return _PROMPT_TILE if head_dim <= 128 else _WIDE_PROMPT_TILE
    return _Tile(block_m, 128 if head_dim <= 128 else 64, 4, 2)


def _are_long(ragged: RaggedRows) -> bool:
    """Returns whether rows are long on average. False in a graph, which is for rows of any length."""
    lengths = ragged.lengths
    return lengths is not None and sum(lengths) >= max(_LONG_TOKENS, _LONG_ROW * len(lengths))


def _has_blocks(cache: PagedKV, head_dim: int) -> bool:
    """Returns whether a page has whole blocks of keys, which the GPU's copy engine brings without any addresses.

    A block is read whole: the keys of it that no query sees may be anything, and values are finite (`keep_kernel`).
    """
    kv = cache.rows[0]
    return (
        cache.page_size % _SMALL_TILE.block_n == 0
        and kv.element_size() == 2
        and head_dim == power_of_two(head_dim)
        and _LEAST_DIM <= head_dim <= 128
        and (not kv.is_cuda or is_hopper(kv.device))
    )


def _tile_of_ragged(group: int, head_dim: int, element_size: int, *, is_large: bool) -> _Tile:
    """Returns the tile of ragged rows: one of two sizes, so that any step finds its kernel compiled."""
    tile = _tile(_LARGE, head_dim, element_size)
    if not is_large and tile == _PROMPT_TILE:
        tile = _SMALL_TILE
    return replace(tile, block_m=max(tile.block_m, power_of_two(group)))
