"""The interface between the gateway and the scheduler's core: sequences go in, their output comes back.

A client's job has one sample for each output it asks for; the core runs each sample as a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.common.api.output_chunk import mean_accept_length
from slipstream.common.api.sampling import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.messages import decode, encode
from slipstream.protos import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.api.output_chunk import FinishReason, TokenLogprobs
    from slipstream.common.errors import SlipstreamError


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
    """A higher one is admitted before a lower one."""
    arrived_ns: int = 0
    """When the client's job arrived, by `time.monotonic_ns`: of equal priority, the oldest is admitted first."""
    deadline_ns: int = 0
    """By the same clock; a sequence that still waits then is refused. 0 is never."""

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


class SequenceOutput(NamedTuple):
    """The output that one step adds to a sequence. Made on the loop's thread, read on the event loop's."""

    token_ids: Sequence[int] = ()
    num_draft: int = 0
    """Number of the tokens, from the first on, that the draft proposed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token; empty if the sequence asked for none."""
    finish_reason: FinishReason | None = None
    error: SlipstreamError | None = None
    """Set when the sequence cannot go on; it is over then."""

    @property
    def is_last(self) -> bool:
        """True if the sequence is over."""
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True)
class SequenceStats:
    """Counts and times of a sequence. The loop's thread writes them before the output that they belong to."""

    num_output_tokens: int = 0
    num_verify_steps: int = 0
    """Drafts that the target checked; steps in which the sequence did not speculate are not counted."""
    total_draft_tokens: int = 0
    """Tokens that the draft proposed: K for each draft, also where fewer may be accepted."""
    total_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """[K]: drafts whose token at this place was accepted; empty until the sequence is admitted."""
    admitted_at: float | None = None
    """Seconds of `time.monotonic`, like all times here."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    def add_draft(self, num_proposed: int, num_accepted: int) -> None:
        """Counts one more draft that the target has checked."""
        self.num_verify_steps += 1
        self.total_draft_tokens += num_proposed
        self.total_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify step: 1 + accepted / steps; truncation at a stop is not counted."""
        return mean_accept_length(self.total_accepted_tokens, self.num_verify_steps)


class SubmittedSequence(Protocol):
    """A sequence in the core, as the gateway sees it. Compared by identity."""

    spec: SequenceSpec
    arrived_at: float
    """Seconds of `time.monotonic`."""
    stats: SequenceStats


Outputs = list[tuple[SubmittedSequence, SequenceOutput]]
"""The new output of some sequences."""


class Core(Protocol):
    """The scheduler's core, as the gateway uses it. All methods return at once, on any thread."""

    def submit(self, *specs: SequenceSpec) -> tuple[SubmittedSequence, ...]:
        """Queues sequences, all or none. Raises ResourceExhaustedError if the queue is full, UnavailableError."""

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises the error that `submit` would raise for so many sequences now."""

    def cancel(self, sequence: SubmittedSequence) -> None:
        """Asks for the end of a sequence, waiting or running; no effect if it is over."""


class OutputSink(Protocol):
    """Takes the output of sequences out of the core."""

    def put(self, outputs: Outputs) -> None:
        """Called on the loop's thread after each step; returns at once. Keeps the order of each sequence's output."""
