"""Sizes of batches, and what happens where memory runs out."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream.services.worker.graphs import (
    Buckets,
    HostCapture,
    NoRoomForGraphError,
    at_once,
    batch_buckets,
    capture_buckets,
)

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` failed"


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (9, (1, 2, 3, 4, 6, 8, 9)),
        (64, (1, 2, 3, 4, 6, 8, 10, 12, 14, *range(16, 65, 4))),
        (130, (1, 2, 3, 4, 6, 8, 10, 12, 14, *range(16, 65, 4), 80, 96, 112, 128, 130)),
        (500, (1, 2, 3, 4, 6, 8, 10, 12, 14, *range(16, 65, 4), *range(80, 257, 16), 320, 384, 448, 500)),
    ],
)
def test_buckets_end_with_all_slots(num_rows: int, expected: tuple[int, ...]) -> None:
    assert batch_buckets(num_rows) == expected


def test_the_smallest_that_is_large_enough() -> None:
    buckets = Buckets({4: "four", 1: "one", 8: "eight"})
    assert [buckets.get(rows) for rows in (1, 2, 4, 5, 8, 9)] == ["one", "four", "four", "eight", "eight", None]
    assert Buckets[str]({}).get(1) is None


def test_a_size_that_takes_longer_than_a_larger_one_is_left_out() -> None:
    seconds = {"one": 1.0, "four": 4.0, "six": 2.0, "seven": 3.0, "eight": 3.0}
    buckets = Buckets({1: "one", 4: "four", 6: "six", 7: "seven", 8: "eight"}).worthwhile(seconds.__getitem__)
    assert buckets.sizes == (1, 6, 8)
    assert [buckets.get(rows) for rows in (1, 2, 7)] == ["one", "six", "eight"]


def test_where_memory_runs_out_the_largest_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def make(size: int) -> int:
        tried.append(size)
        if size > 4:
            raise NoRoomForGraphError("CUDA out of memory.")
        return size

    with caplog.at_level(logging.WARNING):
        buckets = at_once(capture_buckets("decode", (1, 4, 8, 16), make))
    assert tried == [16, 8, 4, 1]
    assert [buckets.get(rows) for rows in (1, 3, 4, 5)] == [1, 4, 4, None]
    assert [record.getMessage() for record in caplog.records] == [
        f"graphs of decode: no memory for {size} rows, larger batches run slower (CUDA out of memory.)"
        for size in (16, 8)
    ]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nDetails"), RuntimeError(CUBLAS)])
def test_a_batch_that_has_no_room_at_all_is_an_error(error: RuntimeError) -> None:
    """It would be the end of the worker in the middle of a step."""

    def make(size: int) -> int:
        raise error

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA(?s:.)* (memory\.|failed)"):
        at_once(capture_buckets("decode", (1, 4), make))


def test_a_small_batch_without_room_is_taken_by_a_larger_graph(caplog: pytest.LogCaptureFixture) -> None:
    def make(size: int) -> int:
        if size == 4:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return size

    with caplog.at_level(logging.WARNING):
        buckets = at_once(capture_buckets("decode", (1, 4, 8), make))
    assert [buckets.get(rows) for rows in (1, 2, 4, 5)] == [1, 8, 8, 8]
    assert caplog.messages == [
        "graphs of decode: no memory for 4 rows, the next larger graph takes them (Triton Error [CUDA]: out of memory)"
    ]


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    def make(size: int) -> int:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        at_once(capture_buckets("decode", (1,), make))


def test_without_graphs_the_work_is_done_each_time() -> None:
    done = []
    replay = HostCapture().capture(lambda: done.append(1))
    assert done == [1], "a graph's capture does it, too"
    replay()
    replay()
    assert done == [1, 1, 1]
