"""Who touched which rows of a group of buffers last, as far as it can still matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.scheduler.ordering.knowledge import Known, Signal

Entries = tuple[tuple[int, "Signal"], ...]
"""Accesses of one stream, oldest first: a mask of rows, and the first signal after the access.

A row is in one entry at most, its latest: the stream is in order, so the latest implies the others.
"""


class GroupHistory(NamedTuple):
    """The accesses to one group of buffers."""

    writes: Entries = ()
    """Those of the group's writer."""
    reads: Entries = ()
    """Those of the group's reader."""


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
