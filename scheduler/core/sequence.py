"""A job of the loop, a sample of a client's job: what it asks for, and what comes back for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.api.output_chunk import Usage, mean_accept_length
from slipstream.common.api.sampling import MAX_TOP_LOGPROBS
from slipstream.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections import abc

    from slipstream.common.api.output_chunk import FinishReason, TokenLogprobs
    from slipstream.common.api.sampling import SamplingParams
    from slipstream.common.errors import SlipstreamError


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What the loop must know of a checked request: everything in it can be honoured."""

    job_id: str
    """Of the client's job, for all of its samples."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    """Every token that ends the output: the request's own and, unless ignored, the model's."""
    top_logprobs: int | None = None
    """How many of the most likely tokens come with each output token's own logprob; None is no logprobs at all."""
    max_draft_tokens: int | None = None
    """Draft tokens that may be accepted in a step; None is as many as are drafted, 0 is no speculation."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError."""
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidArgumentError("sampling_params.top_logprobs", self.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
        if self.max_draft_tokens is not None and not 0 <= self.max_draft_tokens < 2**32:
            raise InvalidArgumentError("speculation.max_draft_tokens", self.max_draft_tokens, "0 to 4294967295")


class SequenceOutput(NamedTuple):
    """What one step brought a job. Made on the loop's thread, read on the event loop's."""

    token_ids: abc.Sequence[int] = ()
    num_draft: int = 0
    """How many of the tokens, from the first on, the draft proposed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token; empty where the job asked for none."""
    finish_reason: FinishReason | None = None
    error: SlipstreamError | None = None
    """Set when the job cannot go on; then it is over too."""

    @property
    def is_last(self) -> bool:
        """Whether the job is over."""
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True)
class SequenceStats:
    """What a job took so far. Written by the loop's thread before the progress that it belongs to."""

    num_output_tokens: int = 0
    num_verify_steps: int = 0
    """Drafts that the target checked; steps in which the job did not speculate are not counted."""
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """[K]: drafts whose token at this place was accepted; empty until the job is admitted."""
    admitted_at: float | None = None
    """Seconds of `time.monotonic`, like all times here."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    def add_draft(self, num_drafted: int, num_accepted: int) -> None:
        """The target has checked one more draft."""
        self.num_verify_steps += 1
        self.total_draft_tokens += num_drafted
        self.total_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify step: 1 + accepted / steps; truncation at a stop is not counted."""
        return mean_accept_length(self.total_accepted_tokens, self.num_verify_steps)


@dataclass(slots=True, eq=False)
class Sequence:
    """A job on its way through the scheduler's loop, which delivers its progress."""

    spec: SequenceSpec
    arrived_at: float = field(default_factory=time.monotonic)
    counts: SequenceStats = field(default_factory=SequenceStats)

    def usage(self, num_tokens: int, last_token_at: float | None) -> Usage:
        """What the job took; for one that has come to its end, and whose client gets so many tokens."""
        counts = self.counts
        ended_at = time.monotonic() if counts.finished_at is None else counts.finished_at
        admitted_at = ended_at if counts.admitted_at is None else counts.admitted_at
        first_token_at = self.arrived_at if counts.first_token_at is None else counts.first_token_at
        decoding_s = last_token_at - first_token_at if last_token_at is not None and num_tokens > 1 else 0.0
        return Usage(
            prompt_tokens=len(self.spec.prompt),
            completion_tokens=num_tokens,
            total_draft_tokens=counts.total_draft_tokens,
            total_accepted_tokens=counts.total_accepted_tokens,
            num_verify_steps=counts.num_verify_steps,
            mean_accept_length=counts.mean_accept_length,
            accepted_per_position=tuple(counts.accepted_per_position),
            seed=self.spec.sampling.seed,
            queue_seconds=admitted_at - self.arrived_at,
            time_to_first_token_seconds=first_token_at - self.arrived_at,
            end_to_end_seconds=ended_at - self.arrived_at,
            mean_inter_token_latency_seconds=decoding_s / max(1, num_tokens - 1),
        )
