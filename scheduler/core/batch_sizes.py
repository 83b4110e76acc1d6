"""The sizes of a batch."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def most_step_tokens(self) -> int:
        """The most tokens that a decode step brings a sequence."""
        return self.num_draft_tokens + 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages for so many tokens, prompt and output, with those that run-ahead may add."""
        return self.pages_of(num_tokens + (self.run_ahead + 1) * self.most_step_tokens)

    def pages_of(self, num_tokens: int) -> int:
        """Pages for so many tokens and no more."""
        return -(-num_tokens // self.page_tokens)
