"""The drafts of an epoch that a session knows of: what is wanted, attached and told, and when the next try is due."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from slipstream.scheduler.records import LossCause

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


FIRST_S, LONGEST_S = 0.2, 5.0
"""Between two tries to attach a draft: the time doubles while they fail."""
LONGEST_AFTER_TIMEOUT_S = 60.0
"""The same for a draft that is slower than the watchdog again and again: each try costs the steps that wait for it."""
STEADY_S = 10.0
"""A draft that was lost after it took part for so long is tried again at once; sooner than that the time doubles."""


class Retries:
    """The time of the next try. Belongs to the session's lock."""

    def __init__(self) -> None:
        self.due = 0.0
        """On time.monotonic's clock."""
        self._after_failure_s = self._after_loss_s = FIRST_S

    def failed(self) -> None:
        """A try has failed."""
        self.due = time.monotonic() + self._after_failure_s
        self._after_failure_s = min(2 * self._after_failure_s, LONGEST_S)

    def joined(self) -> None:
        """A draft takes part: tries succeed again."""
        self._after_failure_s = FIRST_S

    def left(self, cause: LossCause, joined_at: float) -> None:
        """A draft takes part no more. `joined_at`: since when it did, infinity if it never did."""
        now = time.monotonic()
        if cause in (LossCause.SWAPPED, LossCause.LEFT):
            self.due = now + FIRST_S
            return
        if now - joined_at >= STEADY_S:
            self._after_loss_s = FIRST_S
        longest = LONGEST_AFTER_TIMEOUT_S if cause is LossCause.TIMEOUT else LONGEST_S
        self.due = now + min(self._after_loss_s, longest)
        self._after_loss_s = min(2 * self._after_loss_s, longest)
