"""The sizes of a batch, and the counts of what happens in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAST_PROMPTS = 4
"""One in so many tokens of a step is for prompts, however many sequences decode."""
SMALL_STEPS, LEAST_SMALL = 3, 1024
"""If SMALL_STEPS small steps take in all prompts that wait, steps are small: they have half of the tokens, at least
LEAST_SMALL. With fewer a token takes longer on a GPU."""
MANY_GUESSES, FEW_WAITING, MOST_WITHOUT = 32, 8, 32
"""While more wait than that, steps of more than LEAST_SMALL tokens draft none if draft tokens would be one in
MANY_GUESSES of these or more, and two prompts wait at least, and more than one for FEW_WAITING sequences that decode.
First tokens come sooner then, and others later. So MOST_WITHOUT steps do so at most until fewer wait: what lasts
longer is no burst, but the usual load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The limits of a batch."""

    num_slots: int
    """Row 0 included."""
    num_pages: int
    """Page 0 included."""
    page_tokens: int
    chunk_tokens: int
    """Tokens of a step that takes in prompts: those that it decodes, draft tokens included, and prompt tokens."""
    num_draft_tokens: int
    """The largest K that a draft may have."""
    run_ahead: int
    has_prefix_cache: bool = True
    shared_chunk_tokens: int | None = None
    """As `chunk_tokens` while sequences decode, which wait for the step: verify's measurement; None is no less."""
    doubling_context: int | None = None
    """Behind so many tokens, a prompt's token counts for two in such a step: verify's measurement; None if each counts
    for one."""
    mixes: bool = True
    """Whether a step may both decode and take in prompts; if not, they take turns."""

    @property
    def mixed_tokens(self) -> int:
        """Tokens of a step that takes in prompts while sequences decode."""
        return self.chunk_tokens if self.shared_chunk_tokens is None else self.shared_chunk_tokens

    @property
    def most_step_tokens(self) -> int:
        """The most tokens that a decode step brings a sequence."""
        return self.num_draft_tokens + 1

    @property
    def most_choices(self) -> int:
        """The most tokens that are sampled in a step."""
        return (self.num_slots - 1) * self.most_step_tokens

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step."""
        if not self.mixes:
            return max(self.chunk_tokens, self.most_choices)
        return max(self.chunk_tokens, self.most_choices + self.room_for_prompts(self.chunk_tokens))

    def room_for_prompts(self, num_decoded: int) -> int:
        """Prompt tokens in a step that decodes so many tokens: what these leave, and a part in any case.

        It may always have as many as it decodes, which hardly doubles its time, up to that part of the largest step.
        """
        return self._room(self.mixed_tokens if num_decoded else self.chunk_tokens, num_decoded)

    def room_in_small_step(self, num_decoded: int) -> int:
        """The same in a small step, which those that decode wait for half as long; where there are none, all."""
        if not num_decoded or not self.mixes:
            return self.room_for_prompts(num_decoded)
        return self._room(max(self.mixed_tokens // 2, min(self.mixed_tokens, LEAST_SMALL)), num_decoded)

    def skips_drafting(self, num_draft_tokens: int, num_decoding: int, num_waiting: int) -> bool:
        """Whether a step drafts none while more prompts wait than small steps take in."""
        if not self.mixes or self.mixed_tokens <= LEAST_SMALL:
            return False
        has_many = MANY_GUESSES * num_decoding * num_draft_tokens >= self.mixed_tokens
        return has_many and num_waiting > 1 + num_decoding // FEW_WAITING

    def _room(self, num_tokens: int, num_decoded: int) -> int:
        if not self.mixes:
            return num_tokens
        part, most_part = -(-num_tokens // LEAST_PROMPTS), -(-self.chunk_tokens // LEAST_PROMPTS)
        return max(num_tokens - num_decoded, part, min(num_decoded, most_part))

    def pages_for(self, num_tokens: int) -> int:
        """Pages for so many tokens, prompt and output, with those that run-ahead may add."""
        return self.pages_of(num_tokens + (self.run_ahead + 1) * self.most_step_tokens)

    def context_of(self, num_pages: int) -> int:
        """The most tokens, prompt and output, for which `pages_for` says no more than so many pages."""
        return num_pages * self.page_tokens - (self.run_ahead + 1) * self.most_step_tokens

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
