"""The part of a draft in the steps: the work that it was given, how far it is, how long a step waits for it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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


class _Command(NamedTuple):
    """A command that a draft was sent."""

    number: int
    brings_tokens: bool
    stash: int
    """The stash that it waits for; 0 for none."""


class DraftWork:
    """One attachment's part in the steps, its commands that are not done, and what is known of those that are.

    Belongs to the loop.
    """

    def __init__(self, attachment: DraftAttachment) -> None:
        self.attachment = attachment
        self.part = Part(attachment, attachment.num_draft_tokens)
        """Its part in a step while it is active."""
        self.pending: deque[_Command] = deque()
        """Commands that draft is not known to have done."""
        self.done = 0
        """The fence's counter when it was last looked at. A draft may write anything there, and take it back."""
        self.moved_at = time.monotonic()
        """When one of `pending` was last found done, or the first was sent, or the stash that it waits for came."""
        self.lacks_stash = False
        """True if the first of `pending` was last seen to wait for verify."""
        self.last_step = 0
        """The last step of verify that refers to it."""
        self.last_command = 0
        """Number of the last command."""
        self.awaited = 0
        """The last value of the fence that verify was sent a wait for. They only grow."""
        self.is_lost = False
        self.has_drafted = False
        """True once a command that brings no tokens is done."""

    def add(self, number: int, *, brings_tokens: bool, stash: int = 0) -> None:
        """Notes a command that is sent. `stash`: see `_Command`."""
        if not self.pending:
            self.moved_at = time.monotonic()
        self.pending.append(_Command(number, brings_tokens, stash))
        self.last_command = number

    def did(self, number: int) -> None:
        """Notes that the commands up to this one are done."""
        while self.pending and self.pending[0].number <= number:
            self.has_drafted |= not self.pending.popleft().brings_tokens
            self.moved_at, self.lacks_stash = time.monotonic(), False

    def look(self) -> None:
        """Asks the device, which takes time on a GPU."""
        self.done = self.attachment.done.poll()
        self.did(self.done)
        if self.pending and (stash := self.pending[0].stash):
            lacked_stash, self.lacks_stash = self.lacks_stash, self.attachment.stash.poll() < stash
            if lacked_stash and not self.lacks_stash:
                self.pending[0] = self.pending[0]._replace(stash=0)
                self.moved_at = time.monotonic()


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
