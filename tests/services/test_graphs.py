"""Sizes of batches, and what happens where memory runs out."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream.services.graphs import Buckets, HostCapture, batch_buckets, capture_buckets


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (130, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 130)),
    ],
)
def test_buckets_end_with_all_slots(num_rows: int, expected: tuple[int, ...]) -> None:
    assert batch_buckets(num_rows) == expected


def test_the_smallest_that_is_large_enough() -> None:
    buckets = Buckets({4: "four", 1: "one", 8: "eight"})
    assert [buckets.get(rows) for rows in (1, 2, 4, 5, 8, 9)] == ["one", "four", "four", "eight", "eight", None]
    assert Buckets[str]({}).get(1) is None


def test_where_memory_runs_out_the_largest_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def make(size: int) -> int:
        tried.append(size)
        if size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.\nDetails")
        return size

    with caplog.at_level(logging.WARNING):
        buckets = capture_buckets("decode", (1, 4, 8, 16), make)
    assert tried == [16, 8, 4, 1]
    assert [buckets.get(rows) for rows in (1, 3, 4, 5)] == [1, 4, 4, None]
    assert [record.getMessage() for record in caplog.records] == [
        f"graphs of decode: no memory for {size} rows, larger batches run slower (CUDA out of memory.)"
        for size in (16, 8)
    ]


def test_without_graphs_the_work_is_done_each_time() -> None:
    done = []
    replay = HostCapture().capture(lambda: done.append(1))
    assert not done
    replay()
    replay()
    assert done == [1, 1]
