"""A job and the parts of its output as they cross a process border: tokens, text, logprobs, usage, and its state."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

from slipstream.common.wire.messages import LENGTH_DELIMITED, VARINT, Readers, decode, encode, new_varint, tag, varint
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


class FinishReason(enum.StrEnum):
    """The reason why a job or one of its samples ended."""

    STOP = "stop"
    """The model's end of sequence, or a stop token or a stop string of the request."""
    LENGTH = "length"
    """`max_new_tokens` were generated."""
    ABORT = "abort"
    """Cancelled."""

    def to_pb(self) -> generation_pb2.FinishReason:
        number: generation_pb2.FinishReason = _TO_PB[self]
        return number

    @staticmethod
    def from_pb(number: int) -> FinishReason | None:
        """Returns None for a job that has not ended."""
        return _FROM_PB.get(number)


_FROM_PB = {generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}
_TO_PB: dict[FinishReason, Any] = {reason: number for number, reason in _FROM_PB.items()}


class AbortCause(enum.StrEnum):
    """Who had a job cancelled."""

    CANCELLED = "cancelled"
    """A client that called CancelJob."""
    DISCONNECTED = "disconnected"
    """The last caller of its Generate, who left."""
    DEADLINE = "deadline"
    """The deadline of the last call of its Generate."""

    def to_pb(self) -> generation_pb2.AbortCause:
        number: generation_pb2.AbortCause = _CAUSE_TO_PB[self]
        return number

    @staticmethod
    def from_pb(number: int) -> AbortCause | None:
        """Returns None for a job that was not cancelled, and for a cause that this version does not know."""
        return _CAUSE_FROM_PB.get(number)


_CAUSE_FROM_PB = {generation_pb2.AbortCause.Value(f"ABORT_CAUSE_{cause.name}"): cause for cause in AbortCause}
_CAUSE_TO_PB: dict[AbortCause, Any] = {cause: number for number, cause in _CAUSE_FROM_PB.items()}


MatchedStop = int | str
"""The token id or the stop string that stopped a sample."""


def matched_stop_to_pb(matched: MatchedStop | None) -> dict[str, Any]:
    """Returns the field of the oneof `matched_stop` with its value; none if nothing matched."""
    if matched is None:
        return {}
    return {"matched_string" if isinstance(matched, str) else "matched_token_id": matched}


def matched_stop_from_pb(message: generation_pb2.GenerateResponse | generation_pb2.Sample) -> MatchedStop | None:
    """Decodes the oneof `matched_stop`."""
    name = message.WhichOneof("matched_stop")
    return None if name is None else getattr(message, name)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities, before bias, penalties, masks, temperature and filters."""

    logprob: float
    """The output token's."""
    top: tuple[tuple[int, float], ...] = ()
    """Id and logprob of the most likely tokens, likeliest first, as many as the request asked for."""
    token: bytes = b""
    """The bytes that the output token adds to a text; the name of a special token. Set by the gateway."""
    top_tokens: tuple[bytes, ...] = ()
    """The same for each of `top`."""

    def to_pb(self) -> generation_pb2.TokenLogprobs:
        return generation_pb2.TokenLogprobs(
            logprob=self.logprob,
            top_token_ids=[token for token, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
            token=self.token,
            top_tokens=self.top_tokens,
        )

    @classmethod
    def from_pb(cls, message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
        """Decodes it; the numbers are float32."""
        top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
        return cls(message.logprob, top, message.token, tuple(message.top_tokens))


def mean_accept_length(num_accepted: int, num_verify_steps: int) -> float:
    """Returns the tokens of a verify step: 1 + accepted / steps; 1 when nothing was drafted."""
    return 1.0 + num_accepted / num_verify_steps if num_verify_steps else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens, drafts and times of a sample, or of all samples of a job. Times are in seconds from the job's arrival."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens generated, as the client has them."""
    total_draft_tokens: int
    """Draft tokens that were proposed. Drafts are counted in all steps, a few perhaps after a stop string."""
    total_accepted_tokens: int
    """Draft tokens that the target accepted."""
    num_verify_steps: int
    """Steps in which the target checked a draft."""
    mean_accept_length: float
    """1 + total_accepted_tokens / num_verify_steps; 1 when nothing was drafted."""
    accepted_per_position: tuple[int, ...] = ()
    """For each position in a draft, the number of checked drafts whose token there was accepted."""
    seed: int
    """The seed of the sample, or of the first one."""
    queue_seconds: float
    """Until the admission."""
    time_to_first_token_seconds: float
    """0 when there is none."""
    end_to_end_seconds: float
    mean_inter_token_latency_seconds: float = 0.0
    """From a token to the next; 0 when there are fewer than two."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had, of the sample or of the first one."""
    tokens_beyond_draft: int = 0
    """Tokens that were decoded plainly because prompt and output had become too long for the draft."""

    @classmethod
    def together(cls, samples: Sequence[Usage]) -> Usage:
        """Sums up a job's samples: the prompt counts once; the first admission and token, and the last end."""
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
            cached_tokens=samples[0].cached_tokens,
            tokens_beyond_draft=sum(usage.tokens_beyond_draft for usage in samples),
        )

    def to_pb(self) -> generation_pb2.Usage:
        return encode(generation_pb2.Usage, self)

    @classmethod
    def from_pb(cls, message: generation_pb2.Usage) -> Self:
        return decode(cls, message)


READERS: Readers = {
    "finish_reason": FinishReason.from_pb,
    "abort_cause": AbortCause.from_pb,
    "usage": Usage.from_pb,
    "job_usage": Usage.from_pb,
}
"""Decoders of the fields that chunks and jobs have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """The next tokens of one of a job's samples, in order and without gaps."""

    job_id: str
    token_offset: int
    """Tokens of the sample before this chunk."""
    token_ids: tuple[int, ...] = ()
    """Includes the token that stops the output, which is not in `text`. One that completes a stop string is last."""
    text: str = ""
    """The text that became certain. May lag the tokens: half a character or a possible stop string is held back."""
    is_draft: tuple[bool, ...] = ()
    """For each token, whether it was an accepted draft token."""
    text_lengths: tuple[int, ...] = ()
    """For each token, how many code points of `text` became certain with it; a cancelled job may end with more."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token; empty if the request did not ask for logprobs."""
    sample_index: int = 0
    """Index of the sample in its job."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk of a sample."""
    matched_stop: MatchedStop | None = None
    """The stop that matched. Set in the sample's last chunk, when the reason is "stop"."""
    usage: Usage | None = None
    """The sample's usage. Set in its last chunk."""
    job_usage: Usage | None = None
    """The usage of all samples together. Set in the job's last chunk."""
    attempt: int = 0
    """The job's attempt; tokens of different attempts do not belong together."""
    published_ns: int = 0
    """When the newest of the tokens was known on the server's host, by its `time.monotonic_ns`; 0 without tokens."""
    abort_cause: AbortCause | None = None
    """Who had the job cancelled. Set in the sample's last chunk, when the reason is "abort"."""

    def to_pb(self) -> generation_pb2.GenerateResponse:
        # Not `encode`, which takes twice as long: this is done for each stream in each step.
        return generation_pb2.GenerateResponse(
            job_id=self.job_id,
            token_offset=self.token_offset,
            token_ids=self.token_ids,
            text=self.text,
            is_draft=self.is_draft,
            text_lengths=self.text_lengths,
            logprobs=[logprobs.to_pb() for logprobs in self.logprobs],
            sample_index=self.sample_index,
            finish_reason=None if self.finish_reason is None else self.finish_reason.to_pb(),
            usage=None if self.usage is None else self.usage.to_pb(),
            job_usage=None if self.job_usage is None else self.job_usage.to_pb(),
            attempt=self.attempt,
            published_ns=self.published_ns,
            abort_cause=None if self.abort_cause is None else self.abort_cause.to_pb(),
            **matched_stop_to_pb(self.matched_stop),
        )

    @classmethod
    def from_pb(cls, message: generation_pb2.GenerateResponse) -> OutputChunk:
        # Not `decode`, which takes four times as long: a client does this for each message.
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
            attempt=message.attempt,
            published_ns=message.published_ns,
            abort_cause=AbortCause.from_pb(message.abort_cause),
        )


_FIELDS = generation_pb2.GenerateResponse.DESCRIPTOR.fields_by_name
_TOKEN_OFFSET, _PUBLISHED_NS = (tag(_FIELDS[name].number, VARINT) for name in ("token_offset", "published_ns"))
_TOKEN_IDS, _TEXT, _IS_DRAFT, _TEXT_LENGTHS = (
    tag(_FIELDS[name].number, LENGTH_DELIMITED) for name in ("token_ids", "text", "is_draft", "text_lengths")
)


@lru_cache(maxsize=16)
def _published(published_ns: int) -> bytes:
    """The last field, which the chunks of a step share."""
    return _PUBLISHED_NS + new_varint(published_ns)


class PlainChunkEncoder:
    """Encodes chunks of one sample that have no logprobs and are not its last, in half the time of `OutputChunk.to_pb`.

    The bytes are those that protobuf makes of the same `GenerateResponse`.
    """

    def __init__(self, job_id: str, sample_index: int, attempt: int) -> None:
        """The arguments are the same in all chunks of the sample."""
        self._begin = generation_pb2.GenerateResponse(job_id=job_id).SerializeToString()
        self._end = generation_pb2.GenerateResponse(sample_index=sample_index, attempt=attempt).SerializeToString()

    def encode(
        self,
        token_offset: int,
        token_ids: Sequence[int],
        text: str,
        is_draft: bytes | bytearray,
        text_lengths: Sequence[int],
        published_ns: int,
    ) -> bytes:
        """The message of some tokens; `is_draft` has a byte for each, 0 or 1. Its fields as in `OutputChunk`."""
        ids = b"".join(map(varint, token_ids))
        # A number below 128 is one byte.
        is_short = max(text_lengths) < 128
        lengths = bytes(text_lengths) if is_short else b"".join(map(varint, text_lengths))
        offset = _TOKEN_OFFSET + new_varint(token_offset) if token_offset else b""
        encoded = text.encode()
        before_text = _TEXT + varint(len(encoded)) if text else b""
        end = self._end + _published(published_ns) if published_ns else self._end
        return b"".join(
            (
                *(self._begin, offset, _TOKEN_IDS, varint(len(ids)), ids, before_text, encoded),
                *(_IS_DRAFT, varint(len(token_ids)), is_draft, _TEXT_LENGTHS, varint(len(lengths)), lengths, end),
            )
        )


class JobState(enum.StrEnum):
    """The state of a job."""

    WAITING = "waiting"
    """In the queue."""
    RUNNING = "running"
    ENDED = "ended"
    """`finish_reason` or `error` says how."""


_STATE_FROM_PB = {generation_pb2.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInfo:
    """One of a job's outputs at one moment."""

    num_tokens: int
    """Tokens generated so far."""
    finish_reason: FinishReason | None = None
    """Why it ended; None before that, and when the job failed first."""
    matched_stop: MatchedStop | None = None
    """The stop that matched, when the reason is "stop"."""
    usage: Usage | None = None
    """Set when it has ended."""

    def to_pb(self) -> generation_pb2.Sample:
        return encode(generation_pb2.Sample, self, **matched_stop_to_pb(self.matched_stop))

    @classmethod
    def from_pb(cls, message: generation_pb2.Sample) -> SampleInfo:
        return decode(cls, message, READERS, matched_stop=matched_stop_from_pb(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job at one moment."""

    job_id: str
    state: JobState
    created_at: datetime
    """By the server's clock, in UTC."""
    num_tokens: int
    """Tokens generated so far, of all samples together."""
    finish_reason: FinishReason | None = None
    """Why it ended; None before that, and for a job that failed. If its samples differ: "abort", else "length"."""
    error: str = ""
    """The error that ended it; empty if there was none."""
    usage: Usage | None = None
    """The usage of all samples together. Set when it has ended."""
    samples: tuple[SampleInfo, ...] = ()
    """Each of its outputs."""
    attempt: int = 0
    """Names this beginning of the job: another job of the same name, which began later, has a larger number."""
    abort_cause: AbortCause | None = None
    """Who had it cancelled; set when the finish reason is "abort"."""

    @property
    def is_over(self) -> bool:
        """True if there will be no more tokens."""
        return self.state is JobState.ENDED

    def to_pb(self) -> generation_pb2.Job:
        message = encode(generation_pb2.Job, self, state=f"JOB_STATE_{self.state.name}")
        message.create_time.FromDatetime(self.created_at)
        return message

    @classmethod
    def from_pb(cls, message: generation_pb2.Job) -> JobInfo:
        """Decodes it. A state that this version does not know counts as running."""
        state = _STATE_FROM_PB.get(message.state, JobState.RUNNING)
        readers = {**READERS, "samples": SampleInfo.from_pb}
        return decode(cls, message, readers, state=state, created_at=message.create_time.ToDatetime(tzinfo=UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Some of a server's jobs, the latest first."""

    jobs: tuple[JobInfo, ...]
    next_page_token: str = ""
    """For the next page; empty when this is the last."""

    def to_pb(self) -> generation_pb2.ListJobsResponse:
        return encode(generation_pb2.ListJobsResponse, self)

    @classmethod
    def from_pb(cls, message: generation_pb2.ListJobsResponse) -> JobPage:
        return decode(cls, message, {"jobs": JobInfo.from_pb})
