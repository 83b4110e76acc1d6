"""A job while it runs: its slot, its pages, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.worker.step import PrefillChunk, SlotUpdate
from slipstream.scheduler.core.lengths import PendingLength
from slipstream.scheduler.core.sequence import SequenceOutput

if TYPE_CHECKING:
    from slipstream.common.api.output_chunk import TokenLogprobs
    from slipstream.scheduler.core.sequence import Sequence
    from slipstream.scheduler.core.slots import SlotLease


@dataclass(slots=True, eq=False)
class Request:
    """A running job. Belongs to the scheduler's loop."""

    job: Sequence
    lease: SlotLease
    pages: tuple[int, ...]
    num_drafted: int
    """How many of the tokens drafted in a step are for this request."""
    num_prefilled: int = 0
    """Tokens of the prompt that were sent to the workers."""
    num_output: PendingLength = field(default_factory=PendingLength)
    """Tokens generated, those of steps under way included as far as they are known."""

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt was sent."""
        return self.num_prefilled == len(self.job.spec.prompt)

    @property
    def wants_decode(self) -> bool:
        """Whether another decode step may bring tokens."""
        return self.is_prefilled and not self.is_sure_to_end

    @property
    def is_sure_to_end(self) -> bool:
        """Whether the steps under way reach the end, whatever they bring."""
        return self.num_output.least >= self.job.spec.max_new_tokens

    def slot_update(self) -> SlotUpdate:
        """What the workers must know of this request before its first step."""
        spec = self.job.spec
        return SlotUpdate(
            slot=self.lease.slot,
            generation=self.lease.generation,
            pages=self.pages,
            limit_tokens=len(spec.prompt) + spec.max_new_tokens,
            sampling=spec.sampling,
            max_draft_tokens=spec.max_draft_tokens,
        )

    def next_chunk(self, max_tokens: int) -> PrefillChunk:
        """Takes the next tokens of the prompt, `max_tokens` at most."""
        start = self.num_prefilled
        tokens = self.job.spec.prompt[start : start + max_tokens]
        self.num_prefilled += len(tokens)
        if self.is_prefilled:
            self.begin_output(1)
        return PrefillChunk(slot=self.lease.slot, start=start, tokens=tokens, is_last=self.is_prefilled)

    def begin_output(self, most_more: int) -> None:
        """A step was sent that brings 1 to `most_more` tokens."""
        self.num_output.begin(1, most_more)

    def end_output(
        self, tokens: list[int], most_more: int, logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> SequenceOutput:
        """The oldest of those steps has brought `tokens`, `now`; truncates them where the output ends.

        `logprobs`: for each of them, or empty.
        """
        counts, spec = self.job.counts, self.job.spec
        num_tokens = len(tokens)
        self.num_output.end(num_tokens, 1, most_more)
        # All but the last token of a step were the draft's; the last is the target's own.
        num_draft = num_tokens - 1
        room = spec.max_new_tokens - counts.num_output_tokens
        reason = None
        if num_tokens >= room:
            tokens, num_tokens, reason = tokens[:room], room, FinishReason.LENGTH
        if spec.stop_token_ids and not spec.stop_token_ids.isdisjoint(tokens):
            num_tokens = next(number for number, token in enumerate(tokens, start=1) if token in spec.stop_token_ids)
            tokens, reason = tokens[:num_tokens], FinishReason.STOP
        if counts.first_token_at is None:
            counts.first_token_at = now
        counts.last_token_at = now
        counts.num_output_tokens += num_tokens
        if reason is not None:
            counts.finished_at = now
            num_draft = min(num_draft, num_tokens)
        return SequenceOutput(tokens, num_draft, logprobs[:num_tokens] if logprobs else (), reason)
