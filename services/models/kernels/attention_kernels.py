"""Triton kernels of attention over pages: each split of a row's keys by itself, then the splits together."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pages", "table_width", "width", "num_splits", "num_query_blocks", "window"])
def attend_kernel(
    qkv: Any,  # [B * width, (KV_HEADS * GROUP + 2 * KV_HEADS) * HEAD_DIM], queries rotated
    kv: Any,  # [num_pages * PAGE_SIZE, 2 * KV_HEADS * HEAD_DIM]
    page_table: Any,  # [B, table_width] int64
    positions: Any,  # [B, width] int64
    is_valid: Any,  # [B, width] bool
    limits: Any,  # [B] int64
    tree_starts: Any,  # [B] int64, read if HAS_TREE
    tree_bits: Any,  # [B, width] int64, read if HAS_TREE
    output: Any,  # [B * width, KV_HEADS * GROUP * HEAD_DIM], written if not IS_SPLIT
    partial_output: Any,  # [B * KV_HEADS * width * GROUP, num_splits, HEAD_DIM] float32, written if IS_SPLIT
    partial_lse: Any,  # [B * KV_HEADS * width * GROUP, num_splits] float32: log2 of the sum of a split's weights
    num_pages: Any,
    table_width: Any,
    width: Any,
    num_splits: Any,
    num_query_blocks: Any,
    window: Any,
    score_scale: Any,  # of scores to the base 2
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One key head of one row, for BLOCK_M of the queries (of all heads that share the key head), over one split.

    Grid: (KV_HEADS, num_query_blocks * num_splits, B). Row m of the queries is token m // GROUP of head m % GROUP.
    """
    head = tl.program_id(0)
    query_block = tl.program_id(1) % num_query_blocks
    split = tl.program_id(1) // num_query_blocks
    row = tl.program_id(2).to(tl.int64)

    # What each query sees: keys up to `last_seen`, or in a tree those before `tree_start` and its own bits.
    m = query_block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = m // GROUP
    is_query = m < width * GROUP
    is_seeing = tl.load(is_valid + row * width + token, mask=is_query, other=0) != 0
    end = tl.load(limits + row)
    end = tl.minimum(tl.maximum(end, 0), (table_width * PAGE_SIZE).to(tl.int64))
    position = tl.load(positions + row * width + token, mask=is_query, other=0)
    last_seen = tl.maximum(tl.minimum(position, end - 1), 0).to(tl.int32)
    first_seen = last_seen - window + 1
    tree_start = 0
    bits = tl.zeros([BLOCK_M], tl.int64)
    if HAS_TREE:
        start = tl.load(tree_starts + row)
        tree_start = tl.maximum(tl.minimum(start, end), 0).to(tl.int32)
        bits = tl.load(tree_bits + row * width + token, mask=is_query, other=0)
        last_seen = tl.minimum(tree_start + width, tl.maximum(end, 1).to(tl.int32)) - 1 + tl.zeros_like(last_seen)
    num_seen = tl.max(tl.where(is_seeing, last_seen, -1), axis=0) + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(tl.min(tl.where(is_seeing, first_seen, num_seen), axis=0), 0)
        if HAS_TREE:
            first = tl.minimum(first, tree_start)

    num_blocks = tl.cdiv(tl.maximum(num_seen - first, 0), BLOCK_N)
    blocks_per_split = tl.cdiv(num_blocks, num_splits)
    begin = first + split * blocks_per_split * BLOCK_N
    stop = tl.minimum(begin + blocks_per_split * BLOCK_N, num_seen)

    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    query_row = (row * width + token) * ((GROUP + 2) * KV_HEADS * HEAD_DIM)
    query_at = qkv + query_row[:, None] + ((head * GROUP + m % GROUP) * HEAD_DIM)[:, None] + d[None, :]
    query = tl.load(query_at, mask=is_seeing[:, None] & is_dim[None, :], other=0.0)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for block_begin in range(begin, stop, BLOCK_N):
        key = block_begin + n
        is_key = key < stop
        page = tl.load(page_table + row * table_width + key // PAGE_SIZE, mask=is_key, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        key_row = (page * PAGE_SIZE + key % PAGE_SIZE) * (2 * KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        keys = tl.load(kv + key_row[None, :] + d[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * score_scale
        is_visible = is_key[None, :] & is_seeing[:, None]
        if HAS_TREE:
            node = tl.minimum(tl.maximum(key - tree_start, 0), 63)
            is_in_tree = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
            is_before = (key < tree_start)[None, :]
            if HAS_WINDOW:
                is_before = is_before & (key[None, :] >= first_seen[:, None])
            is_visible = is_visible & (is_before | ((key >= tree_start)[None, :] & is_in_tree))
        else:
            is_visible = is_visible & (key[None, :] <= last_seen[:, None])
            if HAS_WINDOW:
                is_visible = is_visible & (key[None, :] >= first_seen[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A query that has seen nothing yet must not make a NaN of -inf - -inf.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weights, axis=1)
        # A key that nobody may see must not be read: zero times NaN is NaN.
        values_at = kv + key_row[:, None] + (KV_HEADS * HEAD_DIM) + d[None, :]
        values = tl.load(values_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(values.dtype), values, accumulated, input_precision="ieee")
        best = new_best

    result = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
    if IS_SPLIT:
        partial = ((row * KV_HEADS + head) * (width * GROUP) + m) * num_splits + split
        has_keys = total > 0.0
        lse = tl.where(has_keys, best + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
        tl.store(partial_lse + partial, lse, mask=is_query)
        is_kept = (is_query & has_keys)[:, None] & is_dim[None, :]
        tl.store(partial_output + partial[:, None] * HEAD_DIM + d[None, :], result, mask=is_kept)
    else:
        output_row = (row * width + token) * (GROUP * KV_HEADS * HEAD_DIM)
        output_at = output + output_row[:, None] + ((head * GROUP + m % GROUP) * HEAD_DIM)[:, None] + d[None, :]
        tl.store(output_at, result.to(output.dtype.element_ty), mask=is_query[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["width", "num_splits"])
def combine_kernel(
    partial_output: Any,  # [B * KV_HEADS * width * GROUP, num_splits, HEAD_DIM] float32
    partial_lse: Any,  # [B * KV_HEADS * width * GROUP, num_splits] float32
    output: Any,  # [B * width, KV_HEADS * GROUP * HEAD_DIM]
    width: Any,
    num_splits: Any,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """One query of one head. Grid: (B * KV_HEADS * width * GROUP,). Splits without keys have an lse of -inf."""
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

    per_head = width * GROUP
    m = index % per_head
    head = (index // per_head) % KV_HEADS
    row = index // (per_head * KV_HEADS)
    output_row = (row * width + m // GROUP) * (GROUP * KV_HEADS * HEAD_DIM)
    output_at = output + output_row + (head * GROUP + m % GROUP) * HEAD_DIM + d
    tl.store(output_at, result.to(output.dtype.element_ty), mask=d < HEAD_DIM)
