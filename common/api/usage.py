"""What a job took: tokens, drafts and time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Self

from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


def mean_accept_length(num_accepted: int, num_verify_steps: int) -> float:
    """Tokens per verify step: 1 + accepted / steps; 1 when nothing was drafted."""
    return 1.0 + num_accepted / num_verify_steps if num_verify_steps else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a sample took, or all samples of a job together. All times in seconds, from the job's arrival."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens generated, as the client has them."""
    total_draft_tokens: int
    """Tokens that the draft proposed. Drafts are counted in all steps: behind a stop string there may be a few."""
    total_accepted_tokens: int
    """Those of them that the target accepted."""
    num_verify_steps: int
    """Steps in which the target checked a draft."""
    mean_accept_length: float
    """1 + total_accepted_tokens / num_verify_steps; 1 when nothing was drafted."""
    accepted_per_position: tuple[int, ...] = ()
    """For each place in a draft, in how many of the checked drafts the token there was accepted."""
    seed: int
    """The one given, or drawn for the job; of several samples, the first one's."""
    queue_seconds: float
    """To its admission."""
    time_to_first_token_seconds: float
    """0 when there is none."""
    end_to_end_seconds: float
    mean_inter_token_latency_seconds: float = 0.0
    """From a token to the next; 0 when there are fewer than two."""

    @classmethod
    def together(cls, samples: Sequence[Usage]) -> Usage:
        """Of all samples of a job: the prompt counts once; the first admission and token count, and the last end."""
        if len(samples) == 1:
            return samples[0]
        num_accepted = sum(usage.total_accepted_tokens for usage in samples)
        num_verify_steps = sum(usage.num_verify_steps for usage in samples)
        places = zip_longest(*(usage.accepted_per_position for usage in samples), fillvalue=0)
        gaps = [max(0, usage.completion_tokens - 1) for usage in samples]
        first_tokens = [usage.time_to_first_token_seconds for usage in samples if usage.completion_tokens]
        waited = sum(usage.mean_inter_token_latency_seconds * count for usage, count in zip(samples, gaps, strict=True))
        return cls(
            prompt_tokens=samples[0].prompt_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in samples),
            total_draft_tokens=sum(usage.total_draft_tokens for usage in samples),
            total_accepted_tokens=num_accepted,
            num_verify_steps=num_verify_steps,
            mean_accept_length=mean_accept_length(num_accepted, num_verify_steps),
            accepted_per_position=tuple(map(sum, places)),
            seed=samples[0].seed,
            queue_seconds=min(usage.queue_seconds for usage in samples),
            time_to_first_token_seconds=min(first_tokens, default=0.0),
            end_to_end_seconds=max(usage.end_to_end_seconds for usage in samples),
            mean_inter_token_latency_seconds=waited / max(1, sum(gaps)),
        )

    def to_pb(self) -> generation_pb2.Usage:
        """The usage as it travels."""
        return generation_pb2.Usage(**{name: getattr(self, name) for name in Usage.__slots__})

    @classmethod
    def from_pb(cls, message: generation_pb2.Usage) -> Self:
        """The usage that `to_pb` was made of."""
        values = {name: getattr(message, name) for name in Usage.__slots__}
        return cls(**values | {"accepted_per_position": tuple(message.accepted_per_position)})
