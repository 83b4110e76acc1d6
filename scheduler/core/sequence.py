"""A sequence while the core has it: its prompt, its slot and pages, and how far it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.api.sequence import SequenceOutput, SequenceStats
from slipstream.common.errors import PendingLengthError
from slipstream.common.worker.step import PrefillChunk, SlotUpdate
from slipstream.scheduler.core.allocators import NO_SLOT

if TYPE_CHECKING:
    from slipstream.common.api.output_chunk import TokenLogprobs
    from slipstream.common.api.sequence import SequenceSpec
    from slipstream.scheduler.core.allocators import SlotLease


class PendingLength:
    """A length that steps under way add to. It refuses to be used as a number; read its bounds or `exactly`."""

    __slots__ = ("known", "least_more", "most_more")

    def __init__(self, known: int = 0) -> None:
        self.known = known
        """The length when the last result came in."""
        self.least_more = 0
        """Tokens that the steps under way add at least."""
        self.most_more = 0
        """Tokens that they add at most."""

    @property
    def least(self) -> int:
        """Lower bound once the steps under way are done."""
        return self.known + self.least_more

    @property
    def most(self) -> int:
        """Upper bound once the steps under way are done."""
        return self.known + self.most_more

    @property
    def exactly(self) -> int:
        """The length. Raises PendingLengthError while a step is under way."""
        if self.most_more:
            raise PendingLengthError(f"{self} is not known yet")
        return self.known

    def begin(self, least_more: int, most_more: int) -> None:
        """Counts one more step under way that adds `least_more` to `most_more` tokens."""
        self.least_more += least_more
        self.most_more += most_more

    def end(self, found: int, least_more: int, most_more: int) -> None:
        """Ends the oldest step under way, begun with the same bounds: it added `found`. Raises PendingLengthError."""
        if self.most_more < most_more:
            raise PendingLengthError(f"a step added {found} to {self} that no step was to change")
        if not least_more <= found <= most_more:
            raise PendingLengthError(f"a step added {found}, not {least_more} to {most_more}")
        self.known += found
        self.least_more -= least_more
        self.most_more -= most_more

    def __repr__(self) -> str:
        return f"PendingLength(known={self.known}, least_more={self.least_more}, most_more={self.most_more})"

    def __int__(self) -> NoReturn:
        raise PendingLengthError(f"{self} was used as a number")

    __index__ = __float__ = __bool__ = __neg__ = __int__

    def __add__(self, other: object) -> NoReturn:
        raise PendingLengthError(f"{self} was used as a number")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __add__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise PendingLengthError(f"{self} was compared with {other!r}")

    __hash__ = object.__hash__


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence from its submission to its end. Belongs to the loop's thread once it is submitted."""

    spec: SequenceSpec
    arrived_at: float = field(default_factory=time.monotonic)
    stats: SequenceStats = field(default_factory=SequenceStats)
    lease: SlotLease = NO_SLOT
    """Its slot, from its admission on."""
    pages: tuple[int, ...] = ()
    num_drafted: int = 0
    """How many of the tokens drafted in a step are for this sequence."""
    num_prefilled: int = 0
    """Tokens of the prompt that were sent to the workers."""
    num_output: PendingLength = field(default_factory=PendingLength)
    """Tokens generated, those of steps under way included as far as they are known."""

    def admit(self, lease: SlotLease, pages: tuple[int, ...], num_draft_tokens: int) -> None:
        """Gives it a slot and pages; `num_draft_tokens` is K."""
        most = self.spec.max_draft_tokens
        self.lease, self.pages = lease, pages
        self.num_drafted = num_draft_tokens if most is None else min(num_draft_tokens, most)
        self.stats.admitted_at = time.monotonic()
        self.stats.accepted_per_position = [0] * num_draft_tokens

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.spec.prompt) + self.spec.max_new_tokens

    @property
    def is_over(self) -> bool:
        """True if no more output comes."""
        return self.stats.finished_at is not None

    @property
    def is_prefilled(self) -> bool:
        """True if the whole prompt was sent."""
        return self.num_prefilled == len(self.spec.prompt)

    @property
    def wants_decode(self) -> bool:
        """True if another decode step may bring tokens."""
        return self.is_prefilled and not self.is_sure_to_end

    @property
    def is_sure_to_end(self) -> bool:
        """True if the steps under way reach the end in any case."""
        return self.num_output.least >= self.spec.max_new_tokens

    def slot_update(self) -> SlotUpdate:
        """The parameters that the workers get before its first step."""
        return SlotUpdate(
            slot=self.lease.slot,
            generation=self.lease.generation,
            pages=self.pages,
            limit_tokens=self.num_tokens_at_most,
            sampling=self.spec.sampling,
            max_draft_tokens=self.spec.max_draft_tokens,
        )

    def next_chunk(self, max_tokens: int) -> PrefillChunk:
        """Takes the next tokens of the prompt, `max_tokens` at most."""
        start = self.num_prefilled
        tokens = self.spec.prompt[start : start + max_tokens]
        self.num_prefilled += len(tokens)
        if self.is_prefilled:
            self.begin_output(1)
        return PrefillChunk(slot=self.lease.slot, start=start, tokens=tokens, is_last=self.is_prefilled)

    def begin_output(self, most_more: int) -> None:
        """Notes that a step was sent which brings 1 to `most_more` tokens."""
        self.num_output.begin(1, most_more)

    def end_output(
        self, tokens: list[int], most_more: int, logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> SequenceOutput:
        """Takes in the tokens of the oldest step under way, truncated where the output ends.

        `logprobs`: one for each token, or empty. `now`: seconds of `time.monotonic`.
        """
        stats, spec = self.stats, self.spec
        num_tokens = len(tokens)
        self.num_output.end(num_tokens, 1, most_more)
        # All but the last token of a step were the draft's; the last is the target's own.
        num_draft = num_tokens - 1
        room = spec.max_new_tokens - stats.num_output_tokens
        reason = None
        if num_tokens >= room:
            tokens, num_tokens, reason = tokens[:room], room, FinishReason.LENGTH
        if spec.stop_token_ids and not spec.stop_token_ids.isdisjoint(tokens):
            num_tokens = next(number for number, token in enumerate(tokens, start=1) if token in spec.stop_token_ids)
            tokens, reason = tokens[:num_tokens], FinishReason.STOP
        if stats.first_token_at is None:
            stats.first_token_at = now
        stats.last_token_at = now
        stats.num_output_tokens += num_tokens
        if reason is not None:
            stats.finished_at = now
            num_draft = min(num_draft, num_tokens)
        return SequenceOutput(tokens, num_draft, logprobs[:num_tokens] if logprobs else (), reason)
