"""What a timeline is made of: slices in lanes, and arrows from one slice to another."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Place(NamedTuple):
    """Numbers and names of a lane, as the viewers have them: no number of a thread is there twice, in any process."""

    process_number: int
    thread_number: int
    process: str
    thread: str


class Lane(enum.Enum):
    """Something that does one thing at a time. In the order in which they are shown."""

    STEPS = Place(1, 11, "scheduler", "steps, and what they lose")
    LOOP = Place(1, 12, "scheduler", "loop")
    COPIES = Place(1, 13, "scheduler", "copies of results")
    DRAFT_HOST = Place(2, 21, "draft", "host")
    DRAFT_STREAM = Place(2, 22, "draft", "stream")
    VERIFY_HOST = Place(3, 31, "verify", "host")
    VERIFY_STREAM = Place(3, 32, "verify", "stream")


STEP, BUBBLE, HOST, COPY, KERNEL, WAIT, IDLE = "step", "bubble", "host", "copy", "kernel", "wait", "idle"
"""The kinds of slices."""
FENCE, COMMAND, LAUNCH = "fence", "command", "launch"
"""The kinds of arrows."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time, in nanoseconds of the host's clock."""

    lane: Lane
    kind: str
    name: str
    begin_ns: int
    end_ns: int
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def last_ns(self) -> int:
        """The last moment that is surely within it: an end may be the beginning of the next."""
        return max(self.begin_ns, self.end_ns - 1)

    def within(self, time_ns: int) -> int:
        """The moment within it that is closest to `time_ns`."""
        return min(max(time_ns, self.begin_ns), self.last_ns)


@dataclass(frozen=True, slots=True)
class Arrow:
    """One thing let another begin."""

    kind: str
    name: str
    source: Slice
    source_ns: int
    """Within it."""
    target: Slice
    target_ns: int


@dataclass(slots=True)
class Timeline:
    """All of it."""

    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
