"""Staged values arrive unchanged, packed into one piece; the inputs of graphs are always at the same place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.wire.step import PrefillChunk
from slipstream.services.worker import slots as slots_module
from slipstream.services.worker.slots import FlatChunks, PinnedStaging, Staging

CPU = torch.device("cpu")
DTYPES = (torch.int64, torch.int32, torch.float32, torch.bool, torch.float16)


def pinned(num_bytes: int = 4096) -> PinnedStaging:
    """On a CPU: all but the copy's being asynchronous is the same."""
    return PinnedStaging(num_slots=8, num_bytes=num_bytes, depth=3, device=CPU, fetch=torch.Tensor.copy_)


TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(TENSORS, min_size=1, max_size=5), st.sampled_from([0, 64, 4096]))
def test_staged_tensors_arrive(steps: list[list[tuple[torch.dtype, list[int]]]], num_bytes: int) -> None:
    staging = pinned(num_bytes)
    generator = torch.Generator().manual_seed(7)
    for number, shapes in enumerate(steps):
        staging.begin(number, [number])
        sent = [torch.randint(0, 2, shape, generator=generator).to(dtype) for dtype, shape in shapes]
        arrived = [
            staging.put_integers(values.tolist())
            if values.dtype == torch.int64 and values.dim() == 1
            else staging.put(values)
            for values in sent
        ]
        staging.flush()
        for expected, values in zip(sent, arrived, strict=True):
            assert values.dtype == expected.dtype
            assert torch.equal(values, expected)


def test_pieces_that_fit_share_one_buffer_and_do_not_touch() -> None:
    staging = pinned()
    staging.begin(0, ())
    first = staging.put(torch.arange(3, dtype=torch.int32))
    second = staging.put(torch.arange(5))
    staging.flush()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() == staging.slots.untyped_storage().data_ptr()
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [0, 1, 2, 3, 4]
    assert second.data_ptr() % 16 == 0


def test_a_piece_that_does_not_fit_has_a_place_of_its_own() -> None:
    staging = pinned(64)
    staging.begin(0, ())
    large, small = staging.put(torch.arange(100)), staging.put(torch.arange(8))
    staging.flush()
    assert large.untyped_storage().data_ptr() != staging.slots.untyped_storage().data_ptr()
    assert small.untyped_storage().data_ptr() == staging.slots.untyped_storage().data_ptr()
    assert large.tolist() == list(range(100))


def test_integers_that_do_not_fit_can_be_taken_apart_before_they_arrive() -> None:
    staging = pinned(64)
    staging.begin(0, ())
    values = staging.put_integers(range(100))
    first, rest = values[:3], values[3:]
    staging.flush()
    assert (first.tolist(), rest.tolist()) == ([0, 1, 2], list(range(3, 100)))


def test_slots_are_followed_by_padding() -> None:
    staging = pinned()
    staging.begin(2, (5, 6, 7))
    staging.flush()
    assert staging.ring_row.tolist() == [2]
    assert staging.slots.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    for step in range(5):  # every buffer of the ring once, and again
        staging.begin(step % 3, (1,))
        staging.flush()
        assert staging.ring_row.tolist() == [step % 3]
        assert staging.slots[:2].tolist() == [1, 0]


def test_on_the_host_nothing_moves() -> None:
    staging = Staging()
    staging.begin(0, (1,))
    values = torch.arange(4)
    assert staging.put(values) is values
    staging.flush()
    assert values.tolist() == [0, 1, 2, 3]


class SlowCopy:
    """A copy that is done when somebody waits for it."""

    is_under_way = False

    def record(self) -> None:
        self.is_under_way = True

    def query(self) -> bool:
        return not self.is_under_way

    def synchronize(self) -> None:
        self.is_under_way = False


def test_waits_for_the_device_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_events", lambda _, count: [SlowCopy() for _ in range(count)])
    waits = []

    @contextmanager
    def blocked(step: int) -> Iterator[None]:
        waits.append(step)
        yield

    staging = PinnedStaging(num_slots=8, num_bytes=64, depth=3, device=CPU, fetch=torch.Tensor.copy_, blocked=blocked)
    for step in range(5):
        staging.begin(step, ())
        staging.flush()
    assert waits == [3, 4], "the first three steps have a buffer each"


def chunk(slot: int, length: int, start: int = 0) -> PrefillChunk:
    """Tokens 1, 2, 3, …"""
    return PrefillChunk(slot=slot, start=start, tokens=tuple(range(1, length + 1)), is_last=False)


def test_nothing_stands_between_chunks() -> None:
    flat = FlatChunks.of([chunk(3, 4, start=10), chunk(1, 1, start=7), chunk(2, 2)], Staging())
    assert flat.slots.tolist() == [3, 1, 2]
    assert flat.tokens.tolist() == [1, 2, 3, 4, 1, 1, 2]
    assert flat.positions.tolist() == [10, 11, 12, 13, 7, 0, 1]
    assert flat.ragged.lengths == (4, 1, 2)
    assert flat.ragged.rows.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert flat.ragged.begins.tolist() == [0, 4, 5, 7]
