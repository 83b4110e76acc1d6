"""Which program attends with which tile of a ragged batch, over which split of its keys: planned on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from slipstream.services.models.attention import RaggedRows

MOST_SPLITS = 64
_LEAST_KEYS = 256
"""Keys of a split: fewer are not worth a reduction."""
_ROWS_AT_ONCE, _ITEMS_AT_ONCE = 128, 64


@triton.jit
def row_tiles(
    row: tl.tensor,  # [BLOCK] int32
    row_begins: tl.tensor,
    positions: tl.tensor,
    limits: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.tensor,
    TILE_TOKENS: tl.constexpr,
) -> tl.tensor:
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
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    num_items: tl.tensor,
    num_spare: tl.tensor,  # items beyond one for each tile
    capacity: tl.tensor,  # keys of a page table
    TILE_TOKENS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
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
                ragged.begins,
                positions,
                limits,
                items,
                split_tiles,
                len(limits),
                len(ragged.rows),
                num_items,
                spare,
                capacity,
                TILE_TOKENS=tokens,
                LEAST_KEYS=_LEAST_KEYS,
                MOST_SPLITS=MOST_SPLITS,
                BLOCK_R=_ROWS_AT_ONCE,
                BLOCK_I=_ITEMS_AT_ONCE,
                num_warps=4,
            )
        return cls(items, split_tiles, 2 * spare)


def _are_unsplit(ragged: RaggedRows, tokens: int, spare: int) -> bool:
    """Returns whether `plan_kernel` would split no tile; False where the host cannot know it."""
    if ragged.lengths is None or ragged.num_keys is None:
        return False
    rows = list(zip(ragged.lengths, ragged.num_keys, strict=True))
    all_keys = sum(-(-length // tokens) * keys for length, keys in rows)
    return all(keys * spare <= max(all_keys, _LEAST_KEYS * spare) for _, keys in rows)
