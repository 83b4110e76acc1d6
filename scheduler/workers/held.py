"""The drafts of an epoch that a session knows of: what is wanted, what is attached, and what people are told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from slipstream.scheduler.telemetry.draft_metrics import LossCause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.scheduler.workers.attachment import DraftAttachment


class DraftTarget(NamedTuple):
    """The draft that is wanted."""

    address: str
    num_draft_tokens: int


class DraftStatus(NamedTuple):
    """What drafts now, for people."""

    state: str
    """ "attached", "catching up" or "missing"; empty where no draft is expected."""
    since: float
    """On time.monotonic's clock."""
    problem: str
    """While it is missing: why the last one left or was refused."""


class Held:
    """An attachment and its fate so far. Belongs to the session's lock."""

    def __init__(self, attachment: DraftAttachment, target: DraftTarget) -> None:
        self.attachment = attachment
        self.target = target
        self.joined_at = math.inf
        """On time.monotonic's clock; infinity before it joins."""
        self.position = 0
        """Decode steps that there were when it joined."""
        self.cause: LossCause | None = None
        """Set when it takes part in no further step."""
        self.reason = ""
        self.is_let_go = False
        """True once no step refers to it any more."""
        self.is_detached = False

    @property
    def has_joined(self) -> bool:
        """True from the first step on that it takes part in, also when it has left."""
        return self.joined_at < math.inf

    @property
    def is_well(self) -> bool:
        """True if it is not known to be lost: it comes to the end of its work."""
        return self.cause in (None, LossCause.SWAPPED, LossCause.LEFT) and not self.attachment.is_released


def drafting(held: Iterable[Held]) -> Held | None:
    """The attachment that drafts."""
    return next((one for one in held if one.has_joined and one.cause is None), None)


def state_of(held: Iterable[Held], *, is_expected: bool) -> str:
    """See `DraftStatus.state`."""
    staying = [one for one in held if one.cause is None]
    if any(one.has_joined for one in staying):
        return "attached"
    return "catching up" if staying else "missing" if is_expected else ""
