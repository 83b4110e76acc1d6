"""Chunks side by side: which ones, and what padding does."""

from __future__ import annotations

import pytest
import torch

from slipstream.common.worker.step import PrefillChunk
from slipstream.services.worker.staging import HostStaging, PaddedChunks, of_similar_length


def chunk(slot: int, length: int, start: int = 0) -> PrefillChunk:
    """Tokens 1, 2, 3, …"""
    return PrefillChunk(slot=slot, start=start, tokens=tuple(range(1, length + 1)), is_last=False)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([5], [[5]]),
        ([4, 4, 4], [[4, 4, 4]]),
        ([4, 5, 4], [[4, 5, 4]]),
        ([1900, 37, 37, 40], [[1900], [37, 37, 40]]),
        ([1, 2, 3, 4], [[1], [2, 3], [4]]),
        ([], []),
    ],
)
def test_those_that_are_alike_go_together(lengths: list[int], groups: list[list[int]]) -> None:
    chunks = [chunk(slot, length) for slot, length in enumerate(lengths, start=1)]
    found = of_similar_length(chunks)
    assert [[len(part.tokens) for part in group] for group in found] == groups
    assert [part for group in found for part in group] == chunks, "in their order"


@pytest.mark.parametrize("width", [None, 6])
def test_padding_repeats_the_last_position_and_does_not_count(width: int | None) -> None:
    padded = PaddedChunks.of([chunk(3, 4, start=10), chunk(1, 2)], HostStaging(), width=width)
    more = (width or 4) - 4
    assert padded.rows.tolist() == [3, 1]
    assert padded.tokens.tolist() == [[1, 2, 3, 4, *[0] * more], [1, 2, 0, 0, *[0] * more]]
    assert padded.positions.tolist() == [[10, 11, 12, 13, *[13] * more], [0, 1, 1, 1, *[1] * more]]
    assert padded.is_valid.sum(dim=1).tolist() == padded.lengths.tolist() == [4, 2]
    states = torch.arange(padded.tokens.numel() * 3).view(*padded.tokens.shape, 3)
    counting = padded.without_padding(states)
    assert counting.tolist() == states[padded.is_valid].tolist()
    again = padded.with_padding(counting)
    assert again[padded.is_valid].tolist() == counting.tolist()
    assert not again[~padded.is_valid].any()
