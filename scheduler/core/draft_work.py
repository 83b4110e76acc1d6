"""The work that a draft was given, and how far it is."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.scheduler.workers.attachment import DraftAttachment


class _Command(NamedTuple):
    """A command that a draft was sent."""

    number: int
    brings_tokens: bool
    stash: int
    """The stash that it waits for; 0 for none."""


class DraftWork:
    """The commands of one attachment that are not done, and what is known of those that are. Belongs to the loop."""

    def __init__(self, attachment: DraftAttachment) -> None:
        self.attachment = attachment
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
        """The last value of the fence that verify was sent a wait for."""
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
