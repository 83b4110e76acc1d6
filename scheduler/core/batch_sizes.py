"""The sizes of a batch, and the counts of what happens in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The limits of a batch."""

    num_slots: int
    """Row 0 included."""
    num_pages: int
    """Page 0 included."""
    page_tokens: int
    chunk_tokens: int
    """Prompt tokens in one prefill step at most."""
    num_draft_tokens: int
    """The largest K that a draft may have."""
    run_ahead: int
    has_prefix_cache: bool = True
    shared_chunk_tokens: int | None = None
    """As `chunk_tokens` while sequences decode, which wait for the step; None is no less."""

    @property
    def most_step_tokens(self) -> int:
        """The most tokens that a decode step brings a sequence."""
        return self.num_draft_tokens + 1

    def room_for_prompts(self, num_decoding: int) -> int:
        """Prompt tokens in a step that so many sequences wait for."""
        shared = self.shared_chunk_tokens
        return shared if num_decoding and shared is not None else self.chunk_tokens

    def pages_for(self, num_tokens: int) -> int:
        """Pages for so many tokens, prompt and output, with those that run-ahead may add."""
        return self.pages_of(num_tokens + (self.run_ahead + 1) * self.most_step_tokens)

    def pages_of(self, num_tokens: int) -> int:
        """Pages for so many tokens and no more."""
        return -(-num_tokens // self.page_tokens)


class BatchCounts(NamedTuple):
    """Counts of a batch's events since it was made; they only grow."""

    not_finite: int = 0
    """Sequences that ended because the model's logits were NaN or infinite."""
    preemptions: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
