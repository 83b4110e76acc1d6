"""The knowledge of a stream, and the accesses to the buffers that it can come to know of.

A stream knows how far every counter has come before its next operation.

A small vector clock. Each fence counts the steps that its stream has signalled; `CONSUMED` counts
the steps that the scheduler has consumed, which no stream can wait for.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.common.wire.step import FenceName

CONSUMED = 0
"""The counter of the scheduler's consumption; the other counters are the fences' numbers."""

Known = tuple[int, ...]
"""The value that each counter has reached, by the number of the counter."""

NOTHING_KNOWN: Known = (0,) * (1 + len(FenceName))

assert set(FenceName) == set(range(1, len(NOTHING_KNOWN))), "a counter for every fence"


class Signal(NamedTuple):
    """A counter reaches a value, and the knowledge that a stream gains by seeing it."""

    counter: int
    value: int
    known: Known
    """Covers the signal itself."""


def join(left: Known, right: Known) -> Known:
    """The knowledge of a stream that knows both."""
    if left == right:
        return left
    return tuple(map(max, left, right))


def signal(known: Known, counter: int, value: int) -> Signal:
    """The signal of a stream that knows `known`."""
    return Signal(counter, value, (*known[:counter], value, *known[counter + 1 :]))


def without_implied(signals: list[Signal]) -> list[Signal]:
    """The fewest of `signals` that imply all of them, each once."""
    if len(signals) < 2:
        return signals
    distinct = list(dict.fromkeys(signals))
    return [
        candidate
        for candidate in distinct
        if not any(other.known[candidate.counter] >= candidate.value for other in distinct if other is not candidate)
    ]


Entries = tuple[tuple[int, Signal], ...]
"""Accesses of one stream, oldest first: a mask of rows, and the first signal after the access.

A row is in one entry at most, its latest: the stream is in order, so the latest implies the others.
"""


class GroupHistory(NamedTuple):
    """The accesses to one group of buffers."""

    writes: Entries = ()
    """Accesses of the group's writer."""
    reads: Entries = ()
    """Accesses of the group's reader."""


def latest(entries: Entries, rows: int) -> Signal | None:
    """The signal after the last access to any of `rows`."""
    for mask, signal in reversed(entries):
        if mask & rows:
            return signal
    return None


def record(entries: Entries, rows: int, signal: Signal, known_to_all: Known) -> Entries:
    """`entries` with one more access.

    Drops what lies under it, and what every command from now on knows (`known_to_all`): so no more
    is kept than the steps that are not consumed yet.
    """
    kept = []
    for mask, earlier in entries:
        remaining = mask & ~rows
        if remaining and earlier.value > known_to_all[earlier.counter]:
            kept.append((remaining, earlier))
    kept.append((rows, signal))
    return tuple(kept)
