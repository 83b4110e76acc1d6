"""Attention over pages by Triton kernels: few queries or a prompt's chunk, lengths known only to the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.services.models.attention import JoinedBatch, LastOutputs
from slipstream.services.models.kernels.attention_kernels import attend_kernel, combine_kernel, combine_tiles_kernel
from slipstream.services.models.kernels.block_ops import keep_kernel
from slipstream.services.models.kernels.launching import is_hopper, num_multiprocessors, overlapping, power_of_two

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch, Norm, RaggedRows
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.paged_kv import PagedKV


MOST_SPLITS = 64
_LEAST_KEYS = 256
"""Keys of a split: fewer are not worth a reduction."""
_ROWS_AT_ONCE, _ITEMS_AT_ONCE = 128, 64


@triton.jit
def row_tiles(
    row: tl.tensor,  # [BLOCK] int32
    row_begins: tl.tensor, positions: tl.tensor, limits: tl.tensor, num_rows: tl.tensor, capacity: tl.tensor,
    TILE_TOKENS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many tiles rows have, and how many keys their last queries see: two [BLOCK] int32."""
    is_row = row < num_rows
    begin = tl.load(row_begins + row, mask=is_row, other=0)
    end = tl.load(row_begins + row + 1, mask=is_row, other=0)
    is_there = is_row & (end > begin)
    position = tl.load(positions + end - 1, mask=is_there, other=0)
    limit = tl.load(limits + row, mask=is_there, other=0)
    keys = tl.minimum(tl.maximum(tl.minimum(position, limit - 1), 0) + 1, capacity)
    tiles = ((end - begin).to(tl.int32) + (TILE_TOKENS - 1)) // TILE_TOKENS
    return tiles, tl.where(is_there, keys, 0).to(tl.int32)


@triton.jit
def splits_of(tiles: tl.tensor, keys: tl.tensor, split_keys: tl.tensor, MOST_SPLITS: tl.constexpr) -> tl.tensor:
    """Splits of each of a row's tiles; and of all of them, if there are several."""
    splits = tl.minimum(tl.maximum((keys + split_keys - 1) // split_keys, 1), MOST_SPLITS)
    return splits, tl.where(splits > 1, tiles * splits, 0)


@triton.jit
def find(
    i: tl.tensor,  # [BLOCK_I]
    counts: tl.tensor,  # [BLOCK_R] int32: of each row
    before: tl.tensor,  # of the rows before all these
    row: tl.tensor,  # [BLOCK_R]
    places: tl.tensor,  # [BLOCK_R] int32: the first place of each row
) -> tl.tensor:
    """The number after the row that has `i`, the first that it has, and its first place; zeros if none of these has."""
    first = before + tl.cumsum(counts, axis=0) - counts
    is_own = (i[:, None] >= first[None, :]) & (i[:, None] < (first + counts)[None, :])
    return (
        tl.sum(tl.where(is_own, row[None, :] + 1, 0), axis=1),
        tl.sum(tl.where(is_own, first[None, :], 0), axis=1),
        tl.sum(tl.where(is_own, places[None, :], 0), axis=1),
    )


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_items", "num_spare", "capacity"])
def plan_kernel(
    row_begins: tl.tensor,  # [num_rows + 1] int64: the first token of each row, and where the last ends
    positions: tl.tensor,  # [num_tokens] int64
    limits: tl.tensor,  # [num_rows] int64
    items: tl.tensor,  # [5, num_items] int32: first token, row, split, splits of the tile, place; num_tokens if none
    split_tiles: tl.tensor,  # [4, num_spare] int32: first token, end of the row, splits, first place; no splits if none
    num_rows: tl.tensor, num_tokens: tl.tensor, num_items: tl.tensor,
    num_spare: tl.tensor,  # items beyond one for each tile
    capacity: tl.tensor,  # keys of a page table
    TILE_TOKENS: tl.constexpr, LEAST_KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:  # fmt: skip
    """Lists the tiles of all rows, one item for each split of a tile's keys; all tiles of a row have as many.

    A split has about as many keys as all tiles together for each spare item. So the items are enough, and the splits of
    tiles that have several are at most twice the spare ones. Grid: (cdiv(num_items, BLOCK_I),).
    """
    r = tl.arange(0, BLOCK_R)
    all_keys = tl.zeros([BLOCK_R], tl.int64)
    for block in range(0, num_rows, BLOCK_R):
        tiles, keys = row_tiles(block + r, row_begins, positions, limits, num_rows, capacity, TILE_TOKENS)
        all_keys += tiles.to(tl.int64) * keys
    split_keys = tl.cdiv(tl.sum(all_keys, axis=0), tl.maximum(num_spare, 1))
    split_keys = tl.where(num_spare > 0, tl.maximum(split_keys, LEAST_KEYS), capacity)
    split_keys = tl.minimum(split_keys, capacity).to(tl.int32)

    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    none = tl.zeros([BLOCK_I], tl.int32)
    row, row_first, row_place = none - 1, none, none  # of the items numbered i
    split_row, split_first, split_place = none - 1, none, none  # of the tiles numbered i that have several splits
    num_before = tl.zeros([], tl.int32)
    tiles_before = num_before
    places_before = num_before
    for block in range(0, num_rows, BLOCK_R):
        tiles, keys = row_tiles(block + r, row_begins, positions, limits, num_rows, capacity, TILE_TOKENS)
        splits, own_places = splits_of(tiles, keys, split_keys, MOST_SPLITS)
        own_tiles = tl.where(splits > 1, tiles, 0)
        places = places_before + tl.cumsum(own_places, axis=0) - own_places
        found = find(i, tiles * splits, num_before, block + r, places)
        row, row_first, row_place = row + found[0], row_first + found[1], row_place + found[2]
        found = find(i, own_tiles, tiles_before, block + r, places)
        split_row, split_first, split_place = split_row + found[0], split_first + found[1], split_place + found[2]
        num_before += tl.sum(tiles * splits, axis=0)
        tiles_before += tl.sum(own_tiles, axis=0)
        places_before += tl.sum(own_places, axis=0)

    # The last tiles of a row see the most keys, and start first.
    is_item, known = row >= 0, tl.maximum(row, 0)
    tiles, keys = row_tiles(known, row_begins, positions, limits, num_rows, capacity, TILE_TOKENS)
    splits, _ = splits_of(tiles, keys, split_keys, MOST_SPLITS)
    number = i - row_first
    begin = tl.load(row_begins + known) + (tiles - 1 - number // splits) * TILE_TOKENS
    at = items + i
    tl.store(at, tl.where(is_item, begin, num_tokens).to(tl.int32), mask=i < num_items)
    tl.store(at + num_items, known.to(tl.int32), mask=i < num_items)
    tl.store(at + 2 * num_items, (number % splits).to(tl.int32), mask=i < num_items)
    tl.store(at + 3 * num_items, splits.to(tl.int32), mask=i < num_items)
    tl.store(at + 4 * num_items, (row_place + number).to(tl.int32), mask=i < num_items)

    is_tile, known = split_row >= 0, tl.maximum(split_row, 0)
    tiles, keys = row_tiles(known, row_begins, positions, limits, num_rows, capacity, TILE_TOKENS)
    splits, _ = splits_of(tiles, keys, split_keys, MOST_SPLITS)
    number = i - split_first
    begin = tl.load(row_begins + known) + (tiles - 1 - number) * TILE_TOKENS
    row_end = tl.load(row_begins + known + 1)
    at = split_tiles + i
    tl.store(at, tl.where(is_tile, begin, num_tokens).to(tl.int32), mask=i < num_spare)
    tl.store(at + num_spare, tl.where(is_tile, row_end, 0).to(tl.int32), mask=i < num_spare)
    tl.store(at + 2 * num_spare, tl.where(is_tile, splits, 0).to(tl.int32), mask=i < num_spare)
    tl.store(at + 3 * num_spare, (split_place + number * splits).to(tl.int32), mask=i < num_spare)


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """The programs of one forward's attention over ragged rows, on the device; see `plan_kernel`."""

    items: torch.Tensor
    """[5, I] int32: for each program that shares a key head."""
    split_tiles: torch.Tensor
    """[4, S] int32: the tiles of which several programs share the keys."""
    num_places: int
    """Splits of these tiles at most."""

    @classmethod
    def of(
        cls,
        ragged: RaggedRows,
        positions: torch.Tensor,
        limits: torch.Tensor,
        *,
        capacity: int,
        tokens: int,
        spare: int,
    ) -> RaggedPlan:
        """Plans tiles of `tokens`, and `spare` programs (of each key head) to share the keys of long ones, if any are.

        In a graph there are as many items as there may be, the last of which do nothing.
        """
        if _are_unsplit(ragged, tokens, spare):
            spare = 0
        if ragged.lengths is None:
            num_tiles = len(ragged.rows) // tokens + min(len(limits), len(ragged.rows))
        else:
            num_tiles = sum(-(-length // tokens) for length in ragged.lengths)
        num_items = num_tiles + spare
        items = limits.new_empty((5, num_items), dtype=torch.int32)
        split_tiles = limits.new_empty((4, spare), dtype=torch.int32)
        if num_items:
            plan_kernel[(-(-num_items // _ITEMS_AT_ONCE),)](
                ragged.begins, positions, limits, items, split_tiles,
                len(limits), len(ragged.rows), num_items, spare, capacity,
                TILE_TOKENS=tokens, LEAST_KEYS=_LEAST_KEYS, MOST_SPLITS=MOST_SPLITS,
                BLOCK_R=_ROWS_AT_ONCE, BLOCK_I=_ITEMS_AT_ONCE, num_warps=4,
            )  # fmt: skip
        return cls(items, split_tiles, 2 * spare)


def _are_unsplit(ragged: RaggedRows, tokens: int, spare: int) -> bool:
    """Returns whether `plan_kernel` would split no tile; False where the host cannot know it."""
    if ragged.lengths is None or ragged.num_keys is None:
        return False
    rows = list(zip(ragged.lengths, ragged.num_keys, strict=True))
    all_keys = sum(-(-length // tokens) * keys for length, keys in rows)
    return all(keys * spare <= max(all_keys, _LEAST_KEYS * spare) for _, keys in rows)


_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs that share the keys: fewer leave multiprocessors idle, more only add to the reduction."""
_MAX_GRID = 2**16 - 1
"""Programs of CUDA's second and third dimension of a grid; the first has 2^31 - 1."""
_LEAST_DIM = 16
"""Dimensions that a product of tensor cores has at least: a smaller head is padded, which a block is not."""
_COMBINED = 8
"""Stacked queries of which one program combines the splits."""
_LARGE = 128
"""Stacked queries of the largest tile."""


class _Tile(NamedTuple):
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


class _Programs(NamedTuple):
    """The programs of a forward's attention in each layer."""

    grid: tuple[int, ...]
    tile: _Tile
    width: int
    """Tokens of a row; of all ragged rows together."""
    num_splits: int = 1
    """Programs that share the keys of a row; ragged rows have their plan's."""
    num_query_blocks: int = 1
    is_split: bool = False
    """The kernel may leave partial results. That of ragged rows has no variant for rows that happen to have none."""
    num_partials: int = 0
    """Queries of a head with partial results; 0: no tile has several programs."""
    plan: RaggedPlan | None = None


class PagedAttention:
    """Attention of one forward, called once for each layer: reads keys and values from their pages.

    Several programs share the keys of a long row. What a query sees, what is kept and what goes to the padding page is
    as `TorchAttention` has it; a query that is not valid reads nothing and gives zeros. Everything it launches depends
    only on shapes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, config: ModelConfig, batch: ForwardBatch, cache: PagedKV, *, is_invariant: bool = False) -> None:
        """Allocates the partial results of the programs that share keys; plans the tiles of ragged rows.

        `is_invariant`: a query gets the same bits in any row and batch, which is slower: no programs share keys.
        """
        self.outputs = LastOutputs(config, batch.outputs)
        self._config, self._cache, self._ragged = config, cache, batch.ragged
        self._of_outputs: PagedAttention | None = None
        if batch.outputs is not None and len(batch.outputs):
            self._of_outputs = PagedAttention(config, batch.one_token_rows(batch.outputs), cache)
        self._num_tokens = batch.tokens.numel()
        self._page_table = batch.page_table.contiguous()
        self._positions = batch.positions.contiguous()
        self._last_seen = self._positions if batch.last_seen is None else batch.last_seen.contiguous()
        self._is_valid = batch.is_valid.contiguous()
        self._limits = batch.limits.contiguous()
        self._starts = None if batch.starts is None else batch.starts.contiguous()
        self._group = config.num_heads // config.num_kv_heads
        self._reads_blocks = batch.ragged is not None and _has_blocks(cache, config.head_dim)
        self._sizes = {"KV_HEADS": config.num_kv_heads, "HEAD_DIM": config.head_dim}
        self._overlaps = overlapping(self._limits.device)
        capacity = self._page_table.shape[1] * cache.page_size
        num_programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(self._limits.device) // config.num_kv_heads
        if batch.ragged is not None:
            self._programs = self._of_ragged(batch.ragged, capacity, num_programs, is_invariant=is_invariant)
        else:
            num_rows, width = batch.tokens.shape
            self._programs = self._of_rows(num_rows, width, capacity, 0 if is_invariant else num_programs)
        num_partials = self._programs.num_partials or 1
        self._partial_output = self._limits.new_empty(num_partials, config.head_dim, dtype=torch.float32)
        self._partial_lse = self._limits.new_empty(num_partials, dtype=torch.float32)

    def _of_ragged(self, ragged: RaggedRows, capacity: int, spare: int, *, is_invariant: bool) -> _Programs:
        """`spare`: programs of each key head beyond one for each tile."""
        is_large = not self._reads_blocks and (is_invariant or _are_long(ragged))
        tile = _tile_of_ragged(self._group, self._config.head_dim, self._element_size, is_large=is_large)
        spare, tokens = 0 if is_invariant else max(1, spare), tile.block_m // self._group
        plan = RaggedPlan.of(ragged, self._positions, self._limits, capacity=capacity, tokens=tokens, spare=spare)
        kv_heads = self._config.num_kv_heads
        return _Programs(
            grid=(kv_heads * plan.items.shape[1],),
            tile=tile,
            width=self._num_tokens,
            is_split=not is_invariant,
            num_partials=plan.num_places * kv_heads * tile.block_m,
            plan=plan,
        )

    def _of_rows(self, num_rows: int, width: int, capacity: int, num_programs: int) -> _Programs:
        """`num_programs`: that share the keys of all rows, of each key head."""
        tile = _tile(width * self._group, self._config.head_dim, self._element_size)
        num_query_blocks = -(-width * self._group // tile.block_m)
        num_splits = 1
        if num_rows and num_query_blocks == 1:
            num_splits = max(1, min(num_programs // num_rows, MOST_SPLITS, -(-capacity // tile.block_n)))
        grid = (self._config.num_kv_heads, num_query_blocks * num_splits, num_rows)
        assert max(grid[1:]) <= _MAX_GRID, f"{num_rows} rows of {width} tokens: a GPU has {_MAX_GRID} programs there"
        is_split = num_splits > 1
        num_partials = self._num_tokens * self._config.num_heads * num_splits if is_split else 0
        return _Programs(grid, tile, width, num_splits, num_query_blocks, is_split, num_partials)

    @property
    def _element_size(self) -> int:
        return self._cache.dtype.itemsize

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        norms: tuple[Norm, Norm] | None = None,
        sinks: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalises, rotates and keeps in one kernel, then attends.

        `qkv`: [N, q_size + 2 * kv_size] as the projection left it; its queries are overwritten. `rotation`:
        [N, 2, head_dim / 2] float32, of `rotation_of`. `norms`: of each head's queries and keys. `sinks`: see
        `Attention`. `output`: [N, q_size], to be filled; None for a new one. Returns it; in the last layer a new one,
        of the outputs that are read.
        """
        self.keep(layer, qkv, rotation, norms)
        if self.outputs.are_none(layer):
            return qkv[:0, : self._config.q_size]
        if not self.outputs.are_all(layer):
            assert self._of_outputs is not None, "there are some"
            read = self.outputs.of(layer, qkv)
            output = read.new_empty(len(read), self._config.q_size)
            self._of_outputs._attend(layer, read, output, sinks)
            return output
        if output is None:
            output = qkv.new_empty(len(qkv), self._config.q_size)
        if self._num_tokens:
            self._attend(layer, qkv, output, sinks)
        return output

    def keep(
        self, layer: int, qkv: torch.Tensor, rotation: torch.Tensor, norms: tuple[Norm, Norm] | None = None
    ) -> None:
        """See `Keeping`."""
        if not self._num_tokens:
            return
        config, cache = self._config, self._cache
        assert qkv.is_contiguous(), "a kernel reads the rows of qkv side by side"
        block_heads = 16 if len(qkv) >= 256 else 2
        num_programs = -(-config.num_heads // block_heads) + -(-2 * config.num_kv_heads // block_heads)
        query_norm, key_norm, eps = (qkv, qkv, 0.0) if norms is None else (*(n.weight for n in norms), norms[0].eps)
        keep_kernel[len(qkv), num_programs](
            qkv, cache.rows[layer], qkv if cache.scales is None else cache.scales[layer],
            rotation, query_norm, key_norm,
            self._page_table, self._positions, self._is_valid, self._limits,
            self._limits if self._ragged is None else self._ragged.rows,
            cache.num_pages, self._page_table.shape[1], self._programs.width, eps,
            PAGE_SIZE=cache.page_size, Q_HEADS=config.num_heads, **self._sizes,
            BLOCK_HALF=power_of_two(config.head_dim // 2), BLOCK_HEADS=block_heads,
            HAS_NORMS=norms is not None, IS_RAGGED=self._ragged is not None, IS_FP8=cache.scales is not None,
            num_warps=4 if block_heads == 16 else 1, **self._overlaps,
        )  # fmt: skip

    def _attend(self, layer: int, qkv: torch.Tensor, output: torch.Tensor, sinks: torch.Tensor | None) -> None:
        config, cache, programs, tile = self._config, self._cache, self._programs, self._programs.tile
        window, kv, head_dim = config.sliding_window(layer), cache.rows[layer], config.head_dim
        cap = config.score_cap
        attend_kernel[programs.grid](
            qkv, kv, kv if cache.scales is None else cache.scales[layer],
            TensorDescriptor.from_tensor(kv, [tile.block_n, head_dim]) if self._reads_blocks else kv,
            self._page_table, self._last_seen, self._is_valid, self._limits,
            self._limits if self._starts is None else self._starts,
            self._limits if self._ragged is None else self._ragged.begins,
            self._limits if programs.plan is None else programs.plan.items,
            qkv if sinks is None else sinks,
            output, self._partial_output, self._partial_lse,
            cache.num_pages, self._page_table.shape[1],
            programs.width, programs.num_splits, programs.num_query_blocks,
            window if window is not None else 0, math.log2(math.e) * (config.score_scale if cap is None else 1.0),
            PAGE_SIZE=cache.page_size, GROUP=self._group, **self._sizes,
            BLOCK_D=max(_LEAST_DIM, power_of_two(head_dim)), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            HAS_WINDOW=window is not None, HAS_STARTS=self._starts is not None, IS_SPLIT=programs.is_split,
            IS_RAGGED=self._ragged is not None, READS_BLOCKS=self._reads_blocks,
            SCORE_CAP=cap, CAP_FACTOR=None if cap is None else config.score_scale / cap, HAS_SINKS=sinks is not None,
            IS_FP8=cache.scales is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **self._overlaps,
        )  # fmt: skip
        if programs.num_partials:
            self._combine(output)

    def _combine(self, output: torch.Tensor) -> None:
        (plan, tile), head_dim = (self._programs.plan, self._programs.tile), self._config.head_dim
        block_d, num_splits = power_of_two(head_dim), self._programs.num_splits
        if plan is None:
            combine_kernel[(output.numel() // head_dim,)](
                self._partial_output, self._partial_lse, output, num_splits,
                HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_S=power_of_two(num_splits),
                num_warps=1 if num_splits <= 8 else 4, **self._overlaps,
            )  # fmt: skip
            return
        num_tiles = plan.split_tiles.shape[1]
        combine_tiles_kernel[self._config.num_kv_heads * (tile.block_m // _COMBINED), num_tiles](
            self._partial_output, self._partial_lse, plan.split_tiles, output, num_tiles,
            GROUP=self._group, **self._sizes,
            BLOCK_D=block_d, BLOCK_M=tile.block_m, BLOCK_Q=_COMBINED, BLOCK_S=8, num_warps=4, **self._overlaps,
        )  # fmt: skip


class JoinedAttention:
    """Attention of a forward over several batches, each with the tiles that suit it. Called as `PagedAttention`."""

    def __init__(self, config: ModelConfig, batch: JoinedBatch, cache: PagedKV) -> None:
        self.outputs = LastOutputs(config, batch.outputs)
        self._config = config
        self._sizes = batch.sizes
        self._parts = [PagedAttention(config, part, cache) for part in batch.parts]

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        norms: tuple[Norm, Norm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = qkv.new_empty(len(qkv), self._config.q_size)
        split = (torch.split(values, self._sizes) for values in (qkv, rotation, output))
        made = [
            part(layer, qkv_part, rotation_part, norms, sinks, output_part)
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
    return tile._replace(block_m=max(tile.block_m, power_of_two(group)))
