"""A sequence as the gateway keeps it: whatever happens to the scheduler, it can be submitted again with its output."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import mean_accept_length

if TYPE_CHECKING:
    from slipstream.common.api.sequence import SequenceSpec
    from slipstream.protos import scheduler_pb2


@dataclass(slots=True)
class SequenceStats:
    """Counts and times of a sequence; times are in seconds of `time.monotonic`."""

    total_draft_tokens: int = 0
    """Tokens that the draft proposed: K for each checked draft, also where fewer may be accepted."""
    drafts_by_accepted: list[int] = field(default_factory=list)
    """[i]: drafts that the target checked, and accepted i tokens of."""
    tokens_beyond_draft: int = 0
    """Tokens that were decoded plainly because the sequence had become too long for the draft."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had, when the first token was to come."""
    submitted_at: float | None = None
    """When it was sent to a scheduler for the first time."""
    admitted_at: float | None = None
    """When it got a slot for the first time."""
    first_token_at: float | None = None
    first_sent_at: float | None = None
    """When the first token was sent to a client."""
    last_token_at: float | None = None
    finished_at: float | None = None

    def add_draft(self, num_proposed: int, num_accepted: int) -> None:
        """Counts one more draft that the target has checked."""
        self.total_draft_tokens += num_proposed
        try:
            self.drafts_by_accepted[num_accepted] += 1
        except IndexError:
            missing = max(num_proposed, num_accepted) + 1 - len(self.drafts_by_accepted)
            self.drafts_by_accepted += [0] * missing
            self.drafts_by_accepted[num_accepted] += 1

    @property
    def num_verify_steps(self) -> int:
        """Drafts that the target checked."""
        return sum(self.drafts_by_accepted)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[K]: drafts whose token at this place was accepted; empty if there was none."""
        return tuple(accumulate(reversed(self.drafts_by_accepted[1:])))[::-1]

    @property
    def total_accepted_tokens(self) -> int:
        """Draft tokens that the target accepted; a cut at the end of the output is not counted."""
        return sum(num_accepted * count for num_accepted, count in enumerate(self.drafts_by_accepted))

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify step: 1 + accepted / steps."""
        return mean_accept_length(self.total_accepted_tokens, self.num_verify_steps)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence that is not over, with or without a scheduler. Belongs to the event loop; compared by identity."""

    spec: SequenceSpec
    """The request's sequence, without output."""
    arrived_at: float = field(default_factory=time.monotonic)
    """Seconds of `time.monotonic`."""
    output: array[int] = field(default_factory=lambda: array("I"))
    """The tokens that it has. The array of its sample, which grows."""
    stats: SequenceStats = field(default_factory=SequenceStats)
    id: int = 0
    """The id under which the scheduler knows it; 0 if none does."""
    added_at: float = 0.0
    """When the link took it, in seconds of `time.monotonic`."""
    key: int = 0
    """Names its sample in the journal."""
    is_cancelled: bool = False
    is_in_slot: bool = False
    """True if the scheduler of now has given it a slot."""
    num_lost_epochs: int = 0
    """Epochs of the scheduler in a row that ended while it had a slot and had got no token."""
    _num_tokens_at_loss: int = 0

    def lose_epoch(self) -> None:
        """Called when the scheduler dropped it, with all output that came before."""
        if self.is_in_slot:
            has_progress = len(self.output) > self._num_tokens_at_loss
            self.num_lost_epochs = 1 if has_progress else self.num_lost_epochs + 1
            self._num_tokens_at_loss = len(self.output)
        self.id, self.is_in_slot = 0, False

    def to_pb(self, epoch: int) -> scheduler_pb2.NewSequence:
        """Encodes it with its output so far."""
        spec = replace(self.spec, output=tuple(self.output), arrived_ns=int(self.arrived_at * 1e9))
        return spec.to_pb(self.id, epoch)
