"""Forwards over prompts have few sizes, and padding gives them one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.common.wire.step import PrefillChunk
from slipstream.services.worker.graphs import (
    forward_size,
    sizes_up_to,
    with_padding,
)
from slipstream.services.worker.memory import MOST_PADDING, PADDING_SHARE


def chunk(num_tokens: int) -> PrefillChunk:
    """A part of a prompt."""
    return PrefillChunk(slot=3, start=0, tokens=(7,) * num_tokens, is_last=True)


@pytest.mark.parametrize("most", [2048, 1000, 700, 100])
@pytest.mark.parametrize("beside", [0, 1, 300, 1900])
def test_every_step_has_a_size_that_is_rehearsed(beside: int, most: int) -> None:
    of_mixed = {size for size in sizes_up_to(forward_size(beside + most)) if size > most}
    rehearsed = {*sizes_up_to(most), *of_mixed}
    for num_tokens in range(1, max(most - beside, most // 4) + 1):
        own, *padding = with_padding([chunk(num_tokens)], most, beside=beside)
        assert own == chunk(num_tokens)
        assert all(not added.is_last and added.slot == PADDING_SLOT for added in padding)
        in_all = num_tokens + sum(len(added.tokens) for added in padding)
        assert beside or in_all <= most
        assert beside + in_all in rehearsed
        assert in_all - num_tokens < max(16, min(128, num_tokens + beside))


def test_large_steps_do_not_take_minutes_to_rehearse() -> None:
    """Attaching has a deadline."""
    sizes = sizes_up_to(2**16)
    assert sum(sizes) < 32 * sizes[0]
    for smaller, size in pairwise(reversed(sizes)):
        assert forward_size(smaller + 1) == forward_size(size) == size
        assert size < 1024 or size - smaller <= size / 8


def test_padding_is_bounded() -> None:
    for num_tokens in range(1, 2**17):
        assert forward_size(num_tokens) - num_tokens < max(MOST_PADDING, num_tokens / PADDING_SHARE)


def test_chunks_do_not_outgrow_a_step() -> None:
    chunks = with_padding([chunk(60), chunk(38)], 100)
    assert [len(one.tokens) for one in chunks] == [60, 38, 2]
    assert with_padding([chunk(100)], 100) == (chunk(100),)
    assert sizes_up_to(100) == [100, 64, 32, 16]
    assert sizes_up_to(1) == [1]
