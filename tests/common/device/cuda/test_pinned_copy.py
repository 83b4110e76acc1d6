"""Tests that rows of several buffers reach their host mirrors in few copies, whatever the sizes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.common.device.manifest import lay_out
from slipstream.common.worker.layout import RESULT_FENCES, BufferName, EpochShape
from tests.harness import fake_cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

PUBLISHED = (BufferName.NEW_SEQ_LENS, BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS, BufferName.VERIFY_STAMPS)


@pytest.fixture(scope="module")
def pinned_copy() -> Iterator[Any]:
    """The module, with memory that is not pinned."""
    with fake_cuda.installed():
        module = fake_cuda.module("cuda.pinned_copy")
        module.torch = SimpleNamespace(
            zeros=lambda size, dtype, pin_memory: torch.zeros(size, dtype=dtype), uint8=torch.uint8, Tensor=torch.Tensor
        )
        yield module


def arena_of(shape: EpochShape) -> dict[str, torch.Tensor]:
    """The published buffers in one allocation, as an arena has them, with numbers in them."""
    buffers, _, size = lay_out(shape.specs(), RESULT_FENCES, "host")
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    tensors = {}
    for placed in buffers:
        spec = placed.spec
        num_bytes = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        begin = start + placed.offset
        tensors[spec.name] = memory[begin : begin + num_bytes].view(spec.dtype).view(spec.shape)
    for number, name in enumerate(PUBLISHED):
        tensor = tensors[name]
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    return tensors


@settings(max_examples=60, deadline=None)
@given(num_slots=st.integers(2, 3000), run_ahead=st.integers(0, 8), num_draft_tokens=st.integers(0, 7))
@example(num_slots=9, run_ahead=1, num_draft_tokens=4)
@example(num_slots=1801, run_ahead=2, num_draft_tokens=0)
@example(num_slots=2725, run_ahead=1, num_draft_tokens=0)
@example(num_slots=601, run_ahead=8, num_draft_tokens=1)
def test_every_row_arrives(pinned_copy: Any, num_slots: int, run_ahead: int, num_draft_tokens: int) -> None:
    tensors = arena_of(
        EpochShape(num_slots=num_slots, run_ahead=run_ahead, num_draft_tokens=num_draft_tokens, chunk_tokens=8)
    )
    rows = pinned_copy._pinned_rows([tensors[name].unbind() for name in PUBLISHED])
    assert len(rows) == run_ahead + 2
    for number, row in enumerate(rows):
        assert len(row.copies) <= len(PUBLISHED)
        for copy in row.copies:
            ctypes.memmove(copy.target, copy.source, copy.size)
        for name, mirror in zip(PUBLISHED, row.mirrors, strict=True):
            assert torch.equal(mirror, tensors[name][number])


def test_rows_that_lie_together_take_one_copy(pinned_copy: Any) -> None:
    tensors = arena_of(EpochShape(num_slots=65, run_ahead=1, num_draft_tokens=4, chunk_tokens=8))
    rows = pinned_copy._pinned_rows([tensors[name].unbind() for name in PUBLISHED])
    assert [len(row.copies) for row in rows] == [1, 1, 1]
