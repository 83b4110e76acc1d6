"""The host's side of a GPU's fence: a word that may hold anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import fake_cuda


class Side:
    """A word, without a stream."""

    def __init__(self, word: int) -> None:
        self.word = word

    def read_word(self, address: int) -> int:
        """The word."""
        return self.word

    def write_word(self, address: int, value: int) -> None:
        """Another word."""
        self.word = value


@pytest.fixture
def fence_of() -> Iterator[Any]:
    """Makes the fence of a word."""
    with fake_cuda.installed():
        fences = fake_cuda.module("cuda.fences")
        yield lambda side: fences.WordFence(0, None, side, None)


@pytest.mark.parametrize(
    ("word", "seen", "released"),
    [
        (0, 0, 5),
        (4, 4, 5),
        (5, 5, 5),
        (9, 9, 9),
        (2**63 - 1, 2**63 - 1, 2**63 - 1),
        (2**63, -(2**63), 5),
        (2**64 - 1, -1, 5),
    ],
)
def test_a_release_ends_the_wait_of_a_stream_whatever_the_word_was(
    fence_of: Any, word: int, seen: int, released: int
) -> None:
    """A stream waits until the word less the value, as a signed number, is not negative."""
    side = Side(word)
    fence = fence_of(side)
    assert fence.poll() == seen
    assert fence.wait_on_host(5, 0.0) == (seen >= 5)
    fence.release(5)
    assert side.word == released
    assert (side.word - 5) % 2**64 < 2**63
