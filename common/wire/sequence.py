"""Sequences between gateway and scheduler: sampling parameters, submission, and the output of a step.

A client's job has a sequence for each output that it asks for.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from slipstream.common.rpc.status import code_of, error_from_code
from slipstream.common.wire.job import FinishReason, TokenLogprobs
from slipstream.common.wire.messages import LENGTH_DELIMITED, decode, encode, tag, varint
from slipstream.protos import generation_pb2, scheduler_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.common.errors import SlipstreamError


MAX_SEED = 2**64 - 1
LEAST_TEMPERATURE = 2.0**-16
"""Below it, dividing the logits would overflow float32."""
MAX_TEMPERATURE = 100.0
LEAST_REPETITION_PENALTY = 2.0**-16
"""Below it, dividing the logits would overflow float32."""
MAX_REPETITION_PENALTY = 2.0
MAX_COUNT_PENALTY = 2.0
"""Largest frequency or presence penalty, of either sign."""
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each place."""
MAX_LISTED_IDS = 256
"""Most token ids with a bias, and most masked ones: they are a row of a table of this width."""
MAX_GRAMMAR_CHARACTERS = 2**20
"""Longest serialised grammar of a sequence, in characters."""

_MAX_TOKEN_ID = 2**31 - 1


def grammar_digest(grammar: str) -> bytes:
    """Returns the name of a serialised grammar in the commands of steps, which bring many at once after a loss."""
    return hashlib.sha256(grammar.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request.

    Logit bias, penalties and the mask come first, then temperature, top-k, top-p and min-p. The former count for
    greedy requests too. The order is vLLM's: the repetition penalty is the first of the penalties,
    and the mask overrides all before it.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token, and the filters then change nothing."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the most likely one."""
    seed: int = 0
    """Key of the noise: the same seed, prompt and parameters give the same tokens."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt or output where they are positive, multiplies them elsewhere; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, ascending, and what is added to their logits. -100 is added like any other: it bans nothing."""
    masked_before: int = 0
    """No token at an absolute position below it is one of `masked_token_ids`; 0 is off.

    For min_new_tokens: the length of the prompt plus that number, with the ids of all tokens that would end the output.
    """
    masked_token_ids: tuple[int, ...] = ()
    """Ascending."""

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not LEAST_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            accepted = f"0 (greedy), or from {LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise InvalidArgumentError("sampling_params.temperature", self.temperature, accepted)
        _in_range("sampling_params.top_p", self.top_p, 0.0, 1.0, above_low=True)
        _in_range("sampling_params.min_p", self.min_p, 0.0, 1.0)
        if not 0 <= self.top_k < 2**31:
            raise InvalidArgumentError("sampling_params.top_k", self.top_k, "0 (off) to 2147483647")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidArgumentError("sampling_params.seed", self.seed, f"0 to {MAX_SEED}")
        least, most = LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _in_range("sampling_params.repetition_penalty", self.repetition_penalty, least, most)
        for name in ("frequency_penalty", "presence_penalty"):
            _in_range(f"sampling_params.{name}", getattr(self, name), -MAX_COUNT_PENALTY, MAX_COUNT_PENALTY)
        for token, bias in self.logit_bias:
            _in_range(f"sampling_params.logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        _check_ids("sampling_params.logit_bias", tuple(token for token, _ in self.logit_bias))
        _check_ids("sampling_params.masked_token_ids", self.masked_token_ids)
        if not 0 <= self.masked_before <= _MAX_TOKEN_ID:
            raise InvalidArgumentError("sampling_params.masked_before", self.masked_before, f"0 to {_MAX_TOKEN_ID}")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidArgumentError for an id that is no token, or a mask that leaves none to be sampled."""
        for name, ids in (
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
            ("masked_token_ids", self.masked_token_ids),
        ):
            if ids and ids[-1] >= vocab_size:
                raise InvalidArgumentError(f"sampling_params.{name}", ids[-1], f"token ids of 0 to {vocab_size - 1}")
        if len(self.masked_token_ids) >= vocab_size:
            raise InvalidArgumentError("sampling_params.masked_token_ids", "every token", "fewer than there are")

    def to_pb(self) -> worker_pb2.SlotSampling:
        bias = [worker_pb2.TokenBias(token_id=token, bias=bias) for token, bias in self.logit_bias]
        return encode(worker_pb2.SlotSampling, self, logit_bias=bias)

    @classmethod
    def from_pb(cls, message: worker_pb2.SlotSampling) -> SamplingParams:
        """Decodes and checks it. Raises InvalidArgumentError."""
        return decode(cls, message, {"logit_bias": lambda bias: (bias.token_id, bias.bias)})

    @property
    def has_penalty(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def adjusts_logits(self) -> bool:
        """True if the logits are changed before temperature and filters."""
        return self.has_penalty or bool(self.logit_bias) or (self.masked_before > 0 and bool(self.masked_token_ids))

    @property
    def is_plain(self) -> bool:
        """True if neither filters (top-k, top-p, min-p) nor adjustments apply."""
        has_filter = not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        return not has_filter and not self.adjusts_logits

    @property
    def is_greedy(self) -> bool:
        """True if no noise is drawn."""
        return self.temperature == 0.0


def _in_range(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    too_low = value <= low if above_low else value < low
    if math.isnan(value) or too_low or value > high:
        raise InvalidArgumentError(name, value, f"{'above' if above_low else 'from'} {low:g} to {high:g}")


def _check_ids(name: str, ids: tuple[int, ...]) -> None:
    if len(ids) > MAX_LISTED_IDS:
        raise InvalidArgumentError(name, f"{len(ids)} token ids", f"at most {MAX_LISTED_IDS}")
    if any(low >= high for low, high in pairwise(ids)):
        raise InvalidArgumentError(name, ids, "token ids in ascending order, each once")
    if ids and not 0 <= ids[0] <= ids[-1] <= _MAX_TOKEN_ID:
        raise InvalidArgumentError(name, ids, f"token ids of 0 to {_MAX_TOKEN_ID}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """A sequence to run: its prompt, the output that it has, and its parameters."""

    job_id: str
    """The client's job, the same for all of its samples."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    output: tuple[int, ...] = ()
    """Output that it has already, fewer tokens than `max_new_tokens`: penalties, limits and noise count it."""
    max_new_tokens: int
    """Output tokens at most, those of `output` included."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    """Every token that ends the output: the request's own and, unless ignored, the model's."""
    top_logprobs: int | None = None
    """Number of most likely tokens beside each output token's own logprob; None: no logprobs."""
    max_draft_tokens: int | None = None
    """Draft tokens that may be accepted in a step; None: as many as are drafted, 0: no speculation."""
    priority: int = 0
    """A higher one is admitted before a lower one, and preempted after it."""
    arrival: int = 0
    """Of equal priority, the smallest is admitted first. It grows from job to job of a gateway."""
    deadline_ns: int = 0
    """By `time.monotonic_ns`; a sequence that still waits then is refused. 0 is never."""
    cache_salt: str = ""
    """Sequences of different salts share no KV pages."""
    grammar: str = ""
    """Grammar that the output keeps to, in llguidance's serialised form; empty: none."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError."""
        if not self.prompt:
            raise InvalidArgumentError("prompt", self.prompt, "at least one token id")
        if not len(self.output) < self.max_new_tokens:
            raise InvalidArgumentError("max_new_tokens", self.max_new_tokens, f"above {len(self.output)}")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidArgumentError("sampling_params.top_logprobs", self.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
        if self.max_draft_tokens is not None and not 0 <= self.max_draft_tokens < 2**32:
            raise InvalidArgumentError("speculation.max_draft_tokens", self.max_draft_tokens, "0 to 4294967295")
        if len(self.grammar) > MAX_GRAMMAR_CHARACTERS:
            accepted = f"at most {MAX_GRAMMAR_CHARACTERS} characters"
            raise InvalidArgumentError("grammar", f"{len(self.grammar)} characters", accepted)

    def to_pb(self, sequence_id: int, epoch: int) -> scheduler_pb2.NewSequence:
        """Encodes it under an id of a stream, for an epoch of the scheduler."""
        stops = sorted(self.stop_token_ids)
        return encode(scheduler_pb2.NewSequence, self, id=sequence_id, epoch=epoch, stop_token_ids=stops)

    @classmethod
    def from_pb(cls, message: scheduler_pb2.NewSequence) -> SequenceSpec:
        """Decodes and checks it. Raises InvalidArgumentError."""
        sampling = SamplingParams.from_pb(message.sampling)
        return decode(cls, message, sampling=sampling, stop_token_ids=frozenset(message.stop_token_ids))


_GOES_ON = generation_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The output of a step. The first four have an item for each sequence that got tokens or ended."""

    sequences: Sequence[int] = ()
    """Their ids."""
    num_tokens: Sequence[int] = ()
    """New tokens of each, 0 or more."""
    num_accepted: Sequence[int] = ()
    """Drafted tokens that the target accepted in the step, before the output was cut where it ends."""
    finish_reasons: Sequence[FinishReason | None] = ()
    """None while a sequence goes on."""
    tokens: Sequence[int] = ()
    """Token ids of all, one sequence after the other."""
    num_draft_tokens: int = 0
    """Tokens that were drafted for each sequence with speculation enabled; 0 if nothing was drafted in the step."""
    published_ns: int = 0
    """When the result of the step was on the host, by `time.monotonic_ns`."""
    admitted: Sequence[int] = ()
    """Sequences that got a slot since the last output."""
    admitted_ns: Sequence[int] = ()
    """When, by the same clock."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By sequence id, for each new token, of the sequences that asked for logprobs."""
    cached_tokens: Mapping[int, int] = field(default_factory=dict)
    """By sequence id, of those that have begun since: tokens of the prompt that the prefix cache had."""
    is_beyond_draft: Sequence[bool] = ()
    """For each of `sequences`, whether it was decoded plainly as it is too long for the draft; empty if none was."""

    def to_pb(self) -> scheduler_pb2.StepOutput:
        return scheduler_pb2.StepOutput(
            sequences=self.sequences,
            num_tokens=self.num_tokens,
            num_accepted=self.num_accepted,
            finish_reasons=[_GOES_ON if reason is None else reason.to_pb() for reason in self.finish_reasons],
            tokens=self.tokens,
            num_draft_tokens=self.num_draft_tokens,
            published_ns=self.published_ns,
            admitted=self.admitted,
            admitted_ns=self.admitted_ns,
            logprobs=_logprobs_to_pb(self.logprobs),
            cached_tokens=self.cached_tokens,
            is_beyond_draft=self.is_beyond_draft,
        )

    @classmethod
    def from_pb(cls, message: scheduler_pb2.StepOutput) -> StepOutput:
        """Decodes it. The arrays are lists."""
        return cls(
            sequences=list(message.sequences),
            num_tokens=list(message.num_tokens),
            num_accepted=list(message.num_accepted),
            finish_reasons=[FinishReason.from_pb(reason) for reason in message.finish_reasons],
            tokens=list(message.tokens),
            num_draft_tokens=message.num_draft_tokens,
            published_ns=message.published_ns,
            admitted=list(message.admitted),
            admitted_ns=list(message.admitted_ns),
            logprobs={
                item.sequence: tuple(TokenLogprobs.from_pb(token) for token in item.tokens) for item in message.logprobs
            },
            cached_tokens=dict(message.cached_tokens),
            is_beyond_draft=list(message.is_beyond_draft),
        )


class PackedStep(NamedTuple):
    """A `StepOutput` as a scheduler sends it: its columns are the bytes of arrays.

    It is made for each gateway in each step, and protobuf takes three to nine times as long for numbers one by one.
    """

    sequences: bytes = b""
    """64 bits each."""
    num_tokens: bytes = b""
    """32 bits each, as the next one and the tokens."""
    num_accepted: bytes = b""
    finish_reasons: bytes = b""
    """A number of `FinishReason` in generation.proto each; 0 while a sequence goes on."""
    tokens: bytes = b""
    num_draft_tokens: int = 0
    published_ns: int = 0
    admitted: Sequence[int] = ()
    admitted_ns: Sequence[int] = ()
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})
    cached_tokens: Mapping[int, int] = MappingProxyType({})
    is_beyond_draft: bytes = b""
    """8 bits each; empty if none was."""

    def to_pb(self) -> scheduler_pb2.StepOutput:
        parts: list[bytes] = []
        columns = (self.sequences, self.num_tokens, self.num_accepted, self.finish_reasons, self.tokens)
        for before, column in zip(_COLUMN_TAGS, columns, strict=True):
            parts += before, varint(len(column)), column
        if self.is_beyond_draft:
            parts += _BEYOND_TAG, varint(len(self.is_beyond_draft)), self.is_beyond_draft
        message = scheduler_pb2.StepOutput.FromString(b"".join(parts))
        message.num_draft_tokens, message.published_ns = self.num_draft_tokens, self.published_ns
        if self.admitted:
            message.admitted.extend(self.admitted)
            message.admitted_ns.extend(self.admitted_ns)
        if self.logprobs:
            message.logprobs.extend(_logprobs_to_pb(self.logprobs))
        if self.cached_tokens:
            message.cached_tokens.update(self.cached_tokens)
        return message


_COLUMN_TAGS = [
    tag(scheduler_pb2.StepOutput.DESCRIPTOR.fields_by_name[name].number, LENGTH_DELIMITED)
    for name in PackedStep._fields[:5]
]
_BEYOND_TAG = tag(scheduler_pb2.StepOutput.IS_BEYOND_DRAFT_FIELD_NUMBER, LENGTH_DELIMITED)


def _logprobs_to_pb(logprobs: Mapping[int, tuple[TokenLogprobs, ...]]) -> list[scheduler_pb2.SequenceLogprobs]:
    return [
        scheduler_pb2.SequenceLogprobs(sequence=sequence, tokens=[token.to_pb() for token in tokens])
        for sequence, tokens in logprobs.items()
    ]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that is over without a finish reason."""

    sequence: int
    error: SlipstreamError

    def to_pb(self) -> scheduler_pb2.Refusal:
        error, retry_after_ms = self.error, None
        if isinstance(error, ResourceExhaustedError | UnavailableError):
            retry_after_ms = error.retry_after_ms
        code = code_of(error).value[0]
        return scheduler_pb2.Refusal(
            sequence=self.sequence, code=code, message=str(error), retry_after_ms=retry_after_ms
        )

    @classmethod
    def from_pb(cls, message: scheduler_pb2.Refusal) -> Refusal:
        retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
        return cls(message.sequence, error_from_code(message.code, message.message, retry_after_ms=retry_after_ms))
