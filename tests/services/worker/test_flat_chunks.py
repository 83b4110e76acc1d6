"""Chunks one behind the other: where each token is, and whose it is."""

from __future__ import annotations

from slipstream.common.wire.step import PrefillChunk
from slipstream.services.worker.staging import FlatChunks, HostStaging


def chunk(slot: int, length: int, start: int = 0) -> PrefillChunk:
    """Tokens 1, 2, 3, …"""
    return PrefillChunk(slot=slot, start=start, tokens=tuple(range(1, length + 1)), is_last=False)


def test_nothing_stands_between_chunks() -> None:
    flat = FlatChunks.of([chunk(3, 4, start=10), chunk(1, 1, start=7), chunk(2, 2)], HostStaging())
    assert flat.slots.tolist() == [3, 1, 2]
    assert flat.tokens.tolist() == [1, 2, 3, 4, 1, 1, 2]
    assert flat.positions.tolist() == [10, 11, 12, 13, 7, 0, 1]
    assert flat.ragged.lengths == (4, 1, 2)
    assert flat.ragged.rows.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert flat.ragged.begins.tolist() == [0, 4, 5, 7]
