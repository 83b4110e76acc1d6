"""A sequence as a gateway submits it. A client's job has one for each output that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.api.sampling import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.messages import decode, encode
from slipstream.protos import scheduler_pb2


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
    """Number of most likely tokens that come with each output token's own logprob; None: no logprobs at all."""
    max_draft_tokens: int | None = None
    """Draft tokens that may be accepted in a step; None: as many as are drafted, 0: no speculation."""
    priority: int = 0
    """A higher one is admitted before a lower one, and preempted after it."""
    arrived_ns: int = 0
    """When the client's job arrived, by `time.monotonic_ns`: of equal priority, the oldest is admitted first."""
    deadline_ns: int = 0
    """By the same clock; a sequence that still waits then is refused. 0 is never."""
    cache_salt: str = ""
    """Sequences of different salts share no KV pages."""

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

    def to_pb(self, sequence_id: int, epoch: int) -> scheduler_pb2.NewSequence:
        """Encodes it under an id of a stream, for an epoch of the scheduler."""
        stops = sorted(self.stop_token_ids)
        return encode(scheduler_pb2.NewSequence, self, id=sequence_id, epoch=epoch, stop_token_ids=stops)

    @classmethod
    def from_pb(cls, message: scheduler_pb2.NewSequence) -> SequenceSpec:
        """Decodes and checks it. Raises InvalidArgumentError."""
        sampling = SamplingParams.from_pb(message.sampling)
        return decode(cls, message, sampling=sampling, stop_token_ids=frozenset(message.stop_token_ids))
