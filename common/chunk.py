"""A part of a job's output, as the server sends it and the client gets it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slipstream.protos import generation_pb2


class FinishReason(enum.StrEnum):
    """Why a job ended."""

    STOP = "stop"
    """The model's end of sequence, or a stop token of the request."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a job took. All times in seconds, from its arrival at the scheduler."""

    prompt_tokens: int
    completion_tokens: int
    total_draft_tokens: int
    """Tokens that the draft proposed."""
    total_accepted_tokens: int
    """Those of them that the target accepted."""
    num_verify_steps: int
    """Steps in which the target checked a draft."""
    mean_accept_length: float
    """1 + total_accepted_tokens / num_verify_steps; 1 when nothing was drafted."""
    seed: int
    """The one given, or drawn for the job."""
    queue_seconds: float
    """To its admission."""
    time_to_first_token_seconds: float
    end_to_end_seconds: float

    def to_pb(self) -> generation_pb2.Usage:
        """The usage as it travels."""
        return generation_pb2.Usage(**{name: getattr(self, name) for name in Usage.__slots__})

    @classmethod
    def from_pb(cls, message: generation_pb2.Usage) -> Usage:
        """The usage that `to_pb` was made of."""
        return cls(**{name: getattr(message, name) for name in Usage.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next tokens of a job, in order and without gaps."""

    job_id: str
    token_offset: int
    """Tokens before this chunk."""
    token_ids: tuple[int, ...] = ()
    """The token that stops the output is among them, but not in `text`."""
    text: str = ""
    """The text that became certain; never half a character, so it may lag the tokens."""
    is_draft: tuple[bool, ...] = ()
    """For each token, whether the draft proposed it."""
    text_lengths: tuple[int, ...] = ()
    """For each token, how many code points of `text` became certain with it; a cancelled job may end with more."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk."""
    usage: Usage | None = None
    """Set in the last chunk."""

    def to_pb(self) -> generation_pb2.GenerateResponse:
        """The chunk as it travels."""
        return generation_pb2.GenerateResponse(
            job_id=self.job_id,
            token_offset=self.token_offset,
            token_ids=self.token_ids,
            text=self.text,
            is_draft=self.is_draft,
            text_lengths=self.text_lengths,
            finish_reason=_TO_PB[self.finish_reason],
            usage=None if self.usage is None else self.usage.to_pb(),
        )

    @classmethod
    def from_pb(cls, message: generation_pb2.GenerateResponse) -> Chunk:
        """The chunk that `to_pb` was made of."""
        return cls(
            job_id=message.job_id,
            token_offset=message.token_offset,
            token_ids=tuple(message.token_ids),
            text=message.text,
            is_draft=tuple(message.is_draft),
            text_lengths=tuple(message.text_lengths),
            finish_reason=FinishReason.from_pb(message.finish_reason),
            usage=Usage.from_pb(message.usage) if message.HasField("usage") else None,
        )
