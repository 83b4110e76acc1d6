"""A part of a job's output, as the server sends it and the client gets it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


class FinishReason(enum.StrEnum):
    """Why a job or one of its samples ended."""

    STOP = "stop"
    """The model's end of sequence, or a stop token or a stop string of the request."""
    LENGTH = "length"
    """As many tokens as were asked for."""
    ABORT = "abort"
    """Cancelled."""

    @staticmethod
    def to_pb(reason: FinishReason | None) -> generation_pb2.FinishReason:
        """The reason as it travels; None is a job that has not ended."""
        return _TO_PB[reason]

    @staticmethod
    def from_pb(number: int) -> FinishReason | None:
        """The reason that `to_pb` was made of."""
        return _FROM_PB.get(number)


_TO_PB: dict[FinishReason | None, generation_pb2.FinishReason] = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
_FROM_PB: dict[int, FinishReason | None] = {number: reason for reason, number in _TO_PB.items()}


MatchedStop = int | str
"""What stopped a sample: a token id, or a stop string."""


class _HoldsMatchedStop(Protocol):
    matched_token_id: int
    matched_string: str

    def WhichOneof(self, oneof_group: Literal["matched_stop"], /) -> str | None: ...  # noqa: N802


def matched_stop_to_pb(matched: MatchedStop | None) -> dict[str, Any]:
    """The field of `matched_stop` that it travels in; none if nothing matched."""
    if matched is None:
        return {}
    return {"matched_string" if isinstance(matched, str) else "matched_token_id": matched}


def matched_stop_from_pb(message: _HoldsMatchedStop) -> MatchedStop | None:
    """What a message says of what stopped a sample."""
    match message.WhichOneof("matched_stop"):
        case "matched_token_id":
            return message.matched_token_id
        case "matched_string":
            return message.matched_string
        case _:
            return None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities.

    The model's: before bias, penalties, masks, temperature and filters.
    """

    logprob: float
    """Of the output token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, likeliest first, as many as were asked for: id and logprob."""

    def to_pb(self) -> generation_pb2.TokenLogprobs:
        """As it travels."""
        return generation_pb2.TokenLogprobs(
            logprob=self.logprob,
            top_token_ids=[token for token, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
        )

    @classmethod
    def from_pb(cls, message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
        """What `to_pb` was made of, in float32."""
        return cls(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """The next tokens of one of a job's samples, in order and without gaps."""

    job_id: str
    token_offset: int
    """Tokens of the sample before this chunk."""
    token_ids: tuple[int, ...] = ()
    """The token that stops the output is among them, but not in `text`; what completes a stop string is the last."""
    text: str = ""
    """The text that became certain; never half a character or what may become a stop string: it may lag the tokens."""
    is_draft: tuple[bool, ...] = ()
    """For each token, whether the draft proposed it."""
    text_lengths: tuple[int, ...] = ()
    """For each token, how many code points of `text` became certain with it; a cancelled job may end with more."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token; empty if they were not asked for."""
    sample_index: int = 0
    """Which of the job's samples this is of."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk of a sample."""
    matched_stop: MatchedStop | None = None
    """What stopped the sample. Set in its last chunk, when the reason is "stop"."""
    usage: Usage | None = None
    """What the sample took. Set in its last chunk."""
    job_usage: Usage | None = None
    """What all samples took together. Set in the last chunk of all."""

    def to_pb(self) -> generation_pb2.GenerateResponse:
        """The chunk as it travels."""
        return generation_pb2.GenerateResponse(
            job_id=self.job_id,
            token_offset=self.token_offset,
            token_ids=self.token_ids,
            text=self.text,
            is_draft=self.is_draft,
            text_lengths=self.text_lengths,
            logprobs=[logprobs.to_pb() for logprobs in self.logprobs],
            sample_index=self.sample_index,
            finish_reason=_TO_PB[self.finish_reason],
            usage=None if self.usage is None else self.usage.to_pb(),
            job_usage=None if self.job_usage is None else self.job_usage.to_pb(),
            **matched_stop_to_pb(self.matched_stop),
        )

    @classmethod
    def from_pb(cls, message: generation_pb2.GenerateResponse) -> OutputChunk:
        """The chunk that `to_pb` was made of."""
        return cls(
            job_id=message.job_id,
            token_offset=message.token_offset,
            token_ids=tuple(message.token_ids),
            text=message.text,
            is_draft=tuple(message.is_draft),
            text_lengths=tuple(message.text_lengths),
            logprobs=tuple(map(TokenLogprobs.from_pb, message.logprobs)),
            sample_index=message.sample_index,
            finish_reason=FinishReason.from_pb(message.finish_reason),
            matched_stop=matched_stop_from_pb(message),
            usage=Usage.from_pb(message.usage) if message.HasField("usage") else None,
            job_usage=Usage.from_pb(message.job_usage) if message.HasField("job_usage") else None,
        )
