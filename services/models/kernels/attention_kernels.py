"""Triton kernels of attention over pages: each split of a row's keys by itself, then the splits together."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.launching import wait_for_previous


@triton.jit
def pages_of(page_table: tl.tensor, key: tl.tensor, stop: tl.tensor, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """Looks up the pages of the keys numbered `key`, int64. Keys from `stop` on are not looked up."""
    return tl.load(page_table + key // PAGE_SIZE, mask=key < stop, other=0)


@triton.jit
def rows_of(page: tl.tensor, key: tl.tensor, num_pages: tl.tensor, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """The rows of `kv` of the keys numbered `key`, int32, whatever the pages are."""
    return tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int32) * PAGE_SIZE + key % PAGE_SIZE


@triton.jit
def scaled_fp8(
    bits: tl.tensor,  # [BLOCK_N, BLOCK_D] uint8
    scale: tl.tensor,  # [BLOCK_N] uint8: biased exponents
    DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Numbers of e4m3 times their scales, in DTYPE: exactly in bfloat16 and float32."""
    numbers = bits.to(tl.float8e4nv, bitcast=True)
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
    if DTYPE.is_bf16():
        return numbers.to(tl.bfloat16) * factor.to(tl.bfloat16)
    # Triton's interpreter makes 480 of NaN.
    wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers.to(tl.float16).to(tl.float32))
    return (wide * factor).to(DTYPE)


@triton.jit
def attend_keys(
    query: tl.tensor,  # [BLOCK_M, BLOCK_D]
    kv: tl.tensor,
    scales: tl.tensor,  # read if IS_FP8
    blocks: tl.tensor,  # of [BLOCK_N, HEAD_DIM]
    column: tl.tensor,  # of the key head in both
    page_table: tl.tensor,  # the row's first page
    begin: tl.tensor, stop: tl.tensor,
    seen_from: tl.tensor,  # the first key that every query sees
    seen_until: tl.tensor,  # and where these keys end
    lowest: tl.tensor,  # the first key that may be read, if HAS_FIRST
    first_seen: tl.tensor, last_seen: tl.tensor,
    rows: tl.tensor,  # [BLOCK_N] int32: where the first block's keys lie; the first of them if READS_BLOCKS
    pages: tl.tensor,  # [BLOCK_N] int64: the pages of the second's, or the first
    num_pages: tl.tensor, score_scale: tl.tensor, PAGE_SIZE: tl.constexpr, KV_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, READS_BLOCKS: tl.constexpr,
    SCORE_CAP: tl.constexpr, CAP_FACTOR: tl.constexpr,  # None, or scores are SCORE_CAP * tanh(score * CAP_FACTOR)
    IS_FP8: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Attends to the keys from `begin` to `stop`. Returns the greatest scores, the weights' sums and those of values.

    Scores are to the base 2, weights relative to the greatest: [BLOCK_M] float32 twice, and [BLOCK_M, BLOCK_D] float32.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block_begin in range(begin, stop, BLOCK_N):
        key = block_begin + n
        is_key = key < stop
        if HAS_FIRST:
            is_key = is_key & (key >= lowest)
        if READS_BLOCKS:
            # What no query may see is read, too: its scores are masked, and its values finite (`keep_kernel`).
            row = rows
            keys = blocks.load([row, column])
        else:
            # Keys and values lie in the same layout, a constant apart: addresses are computed once. A key that no query
            # may see must not be read: zero times NaN is NaN.
            is_read = is_key[:, None] & is_dim[None, :] if BLOCK_D > HEAD_DIM else is_key[:, None]
            at = kv + column + (rows.to(tl.int64) * (2 * KV_SIZE))[:, None] + d[None, :]
            if IS_FP8:
                scale_at = scales + column // HEAD_DIM + rows.to(tl.int64) * (2 * KV_SIZE // HEAD_DIM)
                keys = scaled_fp8(
                    tl.load(at, mask=is_read, other=0), tl.load(scale_at, mask=is_key, other=0), query.dtype
                )
            else:
                keys = tl.load(at, mask=is_read, other=0.0)
        # Looked up two blocks ahead, as the keys of the next are fetched in this one.
        next_key = block_begin + BLOCK_N if READS_BLOCKS else key + BLOCK_N
        rows = rows_of(pages, next_key, num_pages, PAGE_SIZE)
        pages = pages_of(page_table, next_key + BLOCK_N, stop, PAGE_SIZE)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if SCORE_CAP is not None:
            decay_twice = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 * CAP_FACTOR))
            bounded = (1.0 - decay_twice) / (1.0 + decay_twice) * SCORE_CAP
            scores = tl.where(scores >= 0.0, bounded, -bounded) + scores * 0.0  # what is not finite is NaN
        if (block_begin + BLOCK_N > seen_until) | (block_begin < seen_from):
            is_visible = is_key[None, :] & (key[None, :] <= last_seen[:, None])
            if HAS_FIRST:
                is_visible = is_visible & (key[None, :] >= first_seen[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * score_scale)
        # A query that has seen nothing yet must not make a NaN of -inf - -inf.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores * score_scale - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weights, axis=1)
        if READS_BLOCKS:
            values = blocks.load([row, column + KV_SIZE])
        elif IS_FP8:
            scale = tl.load(scale_at + KV_SIZE // HEAD_DIM, mask=is_key, other=0)
            values = scaled_fp8(tl.load(at + KV_SIZE, mask=is_read, other=0), scale, query.dtype)
        else:
            values = tl.load(at + KV_SIZE, mask=is_read, other=0.0)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(values.dtype), values, accumulated, input_precision="ieee")
        best = new_best
    return best, total, accumulated


@triton.jit(do_not_specialize=["num_pages", "table_width", "width", "num_splits", "num_query_blocks", "window"])
def attend_kernel(
    qkv: tl.tensor,  # [N, (KV_HEADS * GROUP + 2 * KV_HEADS) * HEAD_DIM], queries rotated; N is B * width
    kv: tl.tensor,  # [num_pages * PAGE_SIZE, 2 * KV_HEADS * HEAD_DIM]
    scales: tl.tensor,  # [num_pages * PAGE_SIZE, 2 * KV_HEADS] uint8, read if IS_FP8: see `PagedKV`
    blocks: tl.tensor,  # descriptor of kv, of [BLOCK_N, HEAD_DIM]; read instead if READS_BLOCKS
    page_table: tl.tensor,  # [B, table_width] int64
    positions: tl.tensor,  # [B, width] int64
    is_valid: tl.tensor,  # [B, width] bool
    limits: tl.tensor,  # [B] int64
    starts: tl.tensor,  # [B] int64, read if HAS_STARTS
    row_begins: tl.tensor,  # [B + 1] int64: the first token of each row, and N; read if IS_RAGGED
    items: tl.tensor,  # [5, I] int32: of `plan_kernel`, read if IS_RAGGED
    sinks: tl.tensor,  # [KV_HEADS * GROUP] float32: a score of each head that has no value, read if HAS_SINKS
    output: tl.tensor,  # [N, KV_HEADS * GROUP * HEAD_DIM], written where one program has all keys
    partial_output: tl.tensor,  # [N * KV_HEADS * GROUP, num_splits, HEAD_DIM] float32, written where several share them
    partial_lse: tl.tensor,  # [N * KV_HEADS * GROUP, num_splits] float32: log2 of the sum of weights
    num_pages: tl.tensor, table_width: tl.tensor, width: tl.tensor, num_splits: tl.tensor, num_query_blocks: tl.tensor,
    window: tl.tensor,
    score_scale: tl.tensor,  # of scores to the base 2, after they were bounded
    PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # each row into num_splits; ragged rows as their items say
    IS_RAGGED: tl.constexpr,  # [N] instead of [B, width]
    READS_BLOCKS: tl.constexpr,  # whole blocks of keys, which a page has one or several of; see `_has_blocks`
    SCORE_CAP: tl.constexpr, CAP_FACTOR: tl.constexpr,  # see `attend_keys`
    HAS_SINKS: tl.constexpr, IS_FP8: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Attends with a tile of queries (of all heads that share one key head) of one row over one split of its keys.

    Grid: (KV_HEADS, num_query_blocks * num_splits, B), or (KV_HEADS * I,) if IS_RAGGED; `width` is N then. BLOCK_M
    queries, of which row m is head m % GROUP of a token; tiles of ragged rows begin with a whole token. Partial results
    of ragged rows are [num_places, KV_HEADS, BLOCK_M] instead of [N, KV_HEADS * GROUP, num_splits].
    """
    head = tl.program_id(0) % KV_HEADS if IS_RAGGED else tl.program_id(0)
    if IS_RAGGED:
        m = tl.arange(0, BLOCK_M)
        num_items = tl.num_programs(0) // KV_HEADS
        item = items + tl.program_id(0) // KV_HEADS
        tile_begin = tl.load(item)
        if tile_begin >= width:  # In a graph there are more items than tiles.
            wait_for_previous(OVERLAPS)
            return
        row = tl.load(item + num_items).to(tl.int64)
        split = tl.load(item + 2 * num_items)
        num_splits = tl.load(item + 3 * num_items)
        place = tl.load(item + 4 * num_items)
        token = tile_begin.to(tl.int64) + m // GROUP
        is_query = (m < BLOCK_M // GROUP * GROUP) & (token < tl.load(row_begins + row + 1))
    else:
        # The last queries see the most keys, and start first.
        query_block = num_query_blocks - 1 - tl.program_id(1) % num_query_blocks
        split = tl.program_id(1) // num_query_blocks
        row = tl.program_id(2).to(tl.int64)
        m = query_block * BLOCK_M + tl.arange(0, BLOCK_M)
        token = row * width + m // GROUP
        is_query = m < width * GROUP

    # Each query sees the keys from `first_seen` to `last_seen`.
    is_seeing = tl.load(is_valid + token, mask=is_query, other=0) != 0
    end = tl.load(limits + row)
    end = tl.minimum(tl.maximum(end, 0), (table_width * PAGE_SIZE).to(tl.int64))
    position = tl.load(positions + token, mask=is_query, other=0)
    last_seen = tl.maximum(tl.minimum(position, end - 1), 0).to(tl.int32)
    first_seen = last_seen - window + 1
    num_seen = tl.max(tl.where(is_seeing, last_seen, -1), axis=0) + 1
    has_first: tl.constexpr = HAS_WINDOW or HAS_STARTS
    lowest = 0
    first = 0
    if HAS_STARTS:
        lowest = tl.minimum(tl.maximum(tl.load(starts + row), 0), tl.maximum(num_seen - 1, 0)).to(tl.int32)
        own_first = tl.maximum(first_seen, lowest) if HAS_WINDOW else lowest
        first_seen = tl.minimum(own_first, last_seen)
    if HAS_WINDOW:
        lowest = tl.maximum(tl.min(tl.where(is_seeing, first_seen, num_seen), axis=0), lowest)
    if has_first:
        # A query's keys come in the same blocks, wherever the windows of those beside it begin.
        first = lowest // BLOCK_N * BLOCK_N

    # Where they can, splits are even to 16 keys, not to whole blocks, of which a short row has few.
    even: tl.constexpr = BLOCK_N if READS_BLOCKS else 16
    keys_per_split = tl.cdiv(tl.cdiv(tl.maximum(num_seen - first, 0), num_splits), even) * even
    begin = first + split * keys_per_split
    stop = tl.minimum(begin + keys_per_split, num_seen)

    own_pages = page_table + row * table_width
    key = begin if READS_BLOCKS else begin + tl.arange(0, BLOCK_N)
    rows = rows_of(pages_of(own_pages, key, stop, PAGE_SIZE), key, num_pages, PAGE_SIZE)
    pages = pages_of(own_pages, key + BLOCK_N, stop, PAGE_SIZE)
    # So far nothing was read that an overlapping kernel writes: positions and page tables are there before the first
    # kernel of a forward, which follows a kernel that does not overlap.
    wait_for_previous(OVERLAPS)

    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    query_head = head * GROUP + m % GROUP
    query_row = token * ((GROUP + 2) * KV_HEADS * HEAD_DIM)
    query_at = qkv + query_row[:, None] + (query_head * HEAD_DIM)[:, None] + d[None, :]
    query = tl.load(query_at, mask=is_seeing[:, None] & is_dim[None, :], other=0.0)

    seen_until = tl.minimum(tl.min(tl.where(is_seeing, last_seen, num_seen), axis=0) + 1, stop)
    seen_from = tl.max(tl.where(is_seeing, first_seen, 0), axis=0) if has_first else 0
    best, total, accumulated = attend_keys(
        query, kv, scales, blocks, head * HEAD_DIM, own_pages, begin, stop, seen_from, seen_until,
        lowest, first_seen, last_seen, rows, pages, num_pages, score_scale,
        PAGE_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N, has_first, READS_BLOCKS,
        SCORE_CAP, CAP_FACTOR, IS_FP8,
    )  # fmt: skip

    if HAS_SINKS:  # as a key of the first split, which every query sees
        sink = tl.where(split == 0, tl.load(sinks + query_head) * 1.4426950408889634, float("-inf"))
        with_sink = tl.maximum(best, sink)
        base = tl.where(with_sink == float("-inf"), 0.0, with_sink)
        decay = tl.exp2(best - base)
        total = total * decay + tl.exp2(sink - base)
        accumulated = accumulated * decay[:, None]
        best = with_sink

    has_keys = is_seeing & (total != 0.0)  # NaN where a key or value is: so is what comes of it
    result = tl.where(has_keys[:, None], accumulated / tl.where(has_keys, total, 1.0)[:, None], 0.0)
    is_partial = IS_SPLIT and (num_splits > 1 if IS_RAGGED else True)
    if is_partial:
        if IS_RAGGED:
            partial = (place.to(tl.int64) * KV_HEADS + head) * BLOCK_M + m
        else:
            partial = (token * (KV_HEADS * GROUP) + query_head) * num_splits + split
        lse = tl.where(has_keys, best + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
        tl.store(partial_lse + partial, lse, mask=is_query)
        is_kept = (is_query & has_keys)[:, None] & is_dim[None, :]
        tl.store(partial_output + partial[:, None] * HEAD_DIM + d[None, :], result, mask=is_kept)
    else:
        output_row = token * (GROUP * KV_HEADS * HEAD_DIM)
        output_at = output + output_row[:, None] + (query_head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(output_at, result.to(output.dtype.element_ty), mask=is_query[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial_output: tl.tensor,  # [N * heads, num_splits, HEAD_DIM] float32
    partial_lse: tl.tensor,  # [N * heads, num_splits] float32
    output: tl.tensor,  # [N * heads, HEAD_DIM]
    num_splits: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Combines the splits of one query of one head, empty ones with an lse of -inf. Grid: (N * heads,)."""
    wait_for_previous(OVERLAPS)
    index = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(partial_lse + index * num_splits + s, mask=s < num_splits, other=float("-inf"))
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    is_there = (weights > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    partial_at = partial_output + (index * num_splits + s)[:, None] * HEAD_DIM + d[None, :]
    partial = tl.load(partial_at, mask=is_there, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(output + index * HEAD_DIM + d, result.to(output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["num_split_tiles"])
def combine_tiles_kernel(
    partial_output: tl.tensor,  # [num_places, KV_HEADS, BLOCK_M, HEAD_DIM] float32
    partial_lse: tl.tensor,  # [num_places, KV_HEADS, BLOCK_M] float32
    split_tiles: tl.tensor,  # [4, num_split_tiles] int32: of `plan_kernel`
    output: tl.tensor,  # [N, KV_HEADS * GROUP * HEAD_DIM]
    num_split_tiles: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Combines the splits of BLOCK_Q of a tile's queries.

    Grid: (KV_HEADS * BLOCK_M / BLOCK_Q, num_split_tiles), of which some may be none.
    """
    head = tl.program_id(0) % KV_HEADS
    first_m = tl.program_id(0) // KV_HEADS * BLOCK_Q
    m = first_m + tl.arange(0, BLOCK_Q)
    tile = split_tiles + tl.program_id(1)
    tile_begin = tl.load(tile).to(tl.int64)
    row_end = tl.load(tile + num_split_tiles)
    if tile_begin + first_m // GROUP >= row_end:  # Most tiles have fewer queries, and some are none.
        wait_for_previous(OVERLAPS)
        return
    token = tile_begin + m // GROUP
    num_splits = tl.load(tile + 2 * num_split_tiles)
    place = tl.load(tile + 3 * num_split_tiles).to(tl.int64)
    wait_for_previous(OVERLAPS)
    is_query = (m < BLOCK_M // GROUP * GROUP) & (token < row_end)
    d = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    result = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        partial = ((place + split) * KV_HEADS + head)[:, None] * BLOCK_M + m[None, :]
        is_split = (split < num_splits)[:, None] & is_query[None, :]
        lse = tl.load(partial_lse + partial, mask=is_split, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(lse - base[None, :])
        decay = tl.exp2(best - base)
        is_there = (weights > 0.0)[:, :, None] & (d < HEAD_DIM)[None, None, :]
        values_at = partial_output + (partial * HEAD_DIM)[:, :, None] + d[None, None, :]
        values = tl.load(values_at, mask=is_there, other=0.0)
        result = result * decay[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        best = new_best
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    query_head = head * GROUP + m % GROUP
    at = output + (token * (GROUP * KV_HEADS) + query_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_query[:, None] & (d < HEAD_DIM)[None, :])
