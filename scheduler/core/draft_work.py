"""The part of a draft in the steps: the work that it was given, how far it is, how long a step waits for it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.step import FenceName, FencePoint, WaitPlace

if TYPE_CHECKING:
    from slipstream.common.wire.step import FenceOps
    from slipstream.scheduler.workers.attachment import DraftAttachment


class Part(NamedTuple):
    """The part that drafts have in the next step."""

    attachment: DraftAttachment | None = None
    """The draft that the step stashes for and, if it is drafted, copies from."""
    num_draft_tokens: int = 0
    """Tokens to draft; 0 decodes plainly."""
    decodes_first: bool = False
    """True if the step must be one that decodes."""
    is_empty: bool = False
    """True for a step of no sequence."""


NO_PART = Part()
"""No draft takes part."""


class _Work(NamedTuple):
    """A part of a command that a draft was sent."""

    step: int
    fence: FenceName
    """The fence that it signals."""
    stash: int
    """The stash that it waits for; 0 for none."""

    @property
    def takes_tokens(self) -> bool:
        """True if it takes in tokens of prompts, or to catch up."""
        return self.fence is FenceName.DRAFT_PREFILLED

    def is_up_to(self, point: FencePoint) -> bool:
        """True if it is done once `point` is signalled: draft's stream does its parts in order."""
        return self.step < point.value or (self.step == point.value and self.fence <= point.fence)


class DraftWork:
    """One attachment's part in the steps, its work that is not done, and what is known of that which is.

    Belongs to the loop.
    """

    def __init__(self, attachment: DraftAttachment) -> None:
        self.attachment = attachment
        self.part = Part(attachment, attachment.num_draft_tokens)
        """Its part in a step while it is active."""
        self.pending: deque[_Work] = deque()
        """Work that draft is not known to have done."""
        self.moved_at = time.monotonic()
        """When some of `pending` was last found done, or the first was sent, or the stash arrived that it waits for."""
        self.lacks_stash = False
        """True if the first of `pending` was last seen to wait for verify."""
        self.last_step = 0
        """The last step of verify that refers to it."""
        self.last_command = 0
        """Number of the last command."""
        self.awaited: dict[FenceName, int] = {}
        """The last value of each of its fences that verify was sent a wait for. They only grow."""
        self.is_lost = False
        self.has_drafted = False
        """True once a decode part is done."""

    def add(self, number: int, ops: FenceOps) -> None:
        """Notes a command that is sent."""
        if not self.pending:
            self.moved_at = time.monotonic()
        for fence, step in ops.signals:
            place = WaitPlace.START if fence is FenceName.DRAFT_PROPOSED else WaitPlace.PREFILL_HIDDEN
            self.pending.append(_Work(step, fence, ops.waits_for(FenceName.VERIFY_STASH, place)))
        self.last_command = number

    def verify_waits(self, ops: FenceOps) -> None:
        """Notes a command that verify was sent."""
        for fence, value, _ in ops.waits:
            self.awaited[fence] = value

    def did(self, point: FencePoint) -> None:
        """Notes that draft has signalled this point."""
        while self.pending and self.pending[0].is_up_to(point):
            self.has_drafted |= not self.pending.popleft().takes_tokens
            self.moved_at, self.lacks_stash = time.monotonic(), False

    def has_signalled(self, point: FencePoint) -> bool:
        """Asks the device. A draft may write anything there, and take it back."""
        return self.attachment.fence(point.fence).poll() >= point.value

    def look(self) -> None:
        """Asks the device for what is done of `pending`, which takes time on a GPU."""
        looked: FenceName | None = None
        while self.pending and (fence := self.pending[0].fence) is not looked:
            looked = fence
            self.did(FencePoint(fence, self.attachment.fence(fence).poll()))
        if self.pending and (stash := self.pending[0].stash):
            lacked_stash, self.lacks_stash = self.lacks_stash, self.attachment.stash.poll() < stash
            if lacked_stash and not self.lacks_stash:
                self.pending[0] = self.pending[0]._replace(stash=0)
                self.moved_at = time.monotonic()

    @property
    def has_unreleased_waits(self) -> bool:
        """True if verify waits for a signal that has not come, and no release can end the wait."""
        return any(
            not (fence := self.attachment.fence(name)).is_releasable and fence.poll() < value
            for name, value in self.awaited.items()
        )


LEAST_TIMEOUT_CPU_S, LEAST_TIMEOUT_GPU_S = 0.25, 0.05
"""Of the watchdog where it is not set: a CPU's threads are not always scheduled sooner."""
MOST_TOKENS_TIMEOUT_S = 2.0
"""The most that the watchdog adds for a command that brings tokens."""
_SMOOTHING = 0.1
_MOST_GROWTH = 4.0
"""A step counts at most as so many times the mean: a pause of the host is no step."""


class DraftPatience:
    """Times of the steps, and the watchdog's limits that follow from them. Belongs to the loop's thread."""

    def __init__(self, timeout_s: float | None, *, is_on_gpu: bool) -> None:
        """`timeout_s`: see `Speculation`."""
        self._timeout_s = timeout_s
        self._least_timeout_s = LEAST_TIMEOUT_GPU_S if is_on_gpu else LEAST_TIMEOUT_CPU_S
        self._step_s = {False: 0.0, True: 0.0}
        """Time of a plain and of a drafted step that decodes, smoothed, with the chunks of prompts that it takes in.
        While a draft rests, steps say nothing of it."""
        self._tokens_s = 0.0
        """Time of a command that brings tokens: of prompts, or to catch up; the longest of late."""

    @property
    def timeout_s(self) -> float:
        """The time that a step may wait for its draft now."""
        if self._timeout_s is not None:
            return self._timeout_s
        return max(2 * max(self._step_s.values()), self._least_timeout_s)

    @property
    def tokens_timeout_s(self) -> float:
        """The time that draft may take beyond that while it takes in tokens."""
        return min(2 * self._tokens_s, MOST_TOKENS_TIMEOUT_S)

    def took(self, seconds: float, *, decodes: bool, takes_prompts: bool, is_drafted: bool) -> None:
        """Takes in the time of a step, which may be mixed. `is_drafted`: verify waited for a draft in it."""
        if takes_prompts:
            self._tokens_s = max(seconds, self._tokens_s * (1 - _SMOOTHING))
        if decodes:
            seconds = min(seconds, max(self._least_timeout_s, _MOST_GROWTH * max(self._step_s.values())))
            known = self._step_s[is_drafted]
            self._step_s[is_drafted] += (seconds - known) * (_SMOOTHING if known else 1.0)

    def brought(self, seconds: float) -> None:
        """Takes in the time of a command to catch up."""
        self._tokens_s = max(self._tokens_s, seconds)
