"""A sample of a job: its sequence and its output.

Whatever happens to the scheduler, the sequence can be submitted again with the output that it has.
"""

from __future__ import annotations

import logging
import time
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from slipstream.common.errors import InternalError
from slipstream.common.wire.job import FinishReason, SampleInfo, Usage, mean_accept_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from slipstream.common.errors import SlipstreamError
    from slipstream.common.wire.job import TokenLogprobs
    from slipstream.common.wire.sequence import SequenceSpec
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.sample_output import OutputColumns, SampleOutput
    from slipstream.gateway.text import Detokenizer
    from slipstream.protos import scheduler_pb2

BROKEN_OUTPUT = "the output could not be taken in; the server's log has more"
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SequenceStats:
    """Counts and times of a sequence; times are in seconds of `time.monotonic`."""

    total_draft_tokens: int = 0
    """Tokens that the draft proposed: K for each checked draft, also where fewer may be accepted."""
    drafts_by_accepted: list[int] = field(default_factory=list)
    """[i]: drafts that the target checked, and accepted i tokens of."""
    tokens_beyond_draft: int = 0
    """Tokens that were decoded plainly because the sequence had become too long for the draft."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had, when the first token was to come."""
    submitted_at: float | None = None
    """When it was sent to a scheduler for the first time."""
    admitted_at: float | None = None
    """When it got a slot for the first time."""
    first_token_at: float | None = None
    first_sent_at: float | None = None
    """When the first token was sent to a client."""
    last_token_at: float | None = None
    finished_at: float | None = None

    def add_draft(self, num_proposed: int, num_accepted: int) -> None:
        """Counts one more draft that the target has checked."""
        self.total_draft_tokens += num_proposed
        try:
            self.drafts_by_accepted[num_accepted] += 1
        except IndexError:
            missing = max(num_proposed, num_accepted) + 1 - len(self.drafts_by_accepted)
            self.drafts_by_accepted += [0] * missing
            self.drafts_by_accepted[num_accepted] += 1

    @property
    def num_verify_steps(self) -> int:
        """Drafts that the target checked."""
        return sum(self.drafts_by_accepted)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[K]: drafts whose token at this place was accepted; empty if there was none."""
        return tuple(accumulate(reversed(self.drafts_by_accepted[1:])))[::-1]

    @property
    def total_accepted_tokens(self) -> int:
        """Draft tokens that the target accepted; a cut at the end of the output is not counted."""
        return sum(num_accepted * count for num_accepted, count in enumerate(self.drafts_by_accepted))

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify step: 1 + accepted / steps."""
        return mean_accept_length(self.total_accepted_tokens, self.num_verify_steps)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence that is not over, with or without a scheduler. Belongs to the event loop; compared by identity."""

    spec: SequenceSpec
    """The request's sequence, without output."""
    arrived_at: float = field(default_factory=time.monotonic)
    """Seconds of `time.monotonic`."""
    output: array[int] = field(default_factory=lambda: array("I"))
    """The tokens that it has. The array of its sample, which grows."""
    stats: SequenceStats = field(default_factory=SequenceStats)
    id: int = 0
    """The id under which the scheduler knows it; 0 if none does."""
    added_at: float = 0.0
    """When the link took it, in seconds of `time.monotonic`."""
    key: int = 0
    """Names its sample in the journal, and orders it among those that wait: it grows from job to job."""
    is_waiting: bool = False
    """True while the link counts it among those that wait for their first slot."""
    is_leaving: bool = False
    """True while it had no slot and was cancelled, and the scheduler has not said that it is over."""
    is_cancelled: bool = False
    """True once its end was asked for, or is on its way: no scheduler gets it any more."""
    is_in_slot: bool = False
    """True if the scheduler of now has given it a slot."""
    num_lost_epochs: int = 0
    """Epochs of the scheduler in a row that ended while it had a slot and had got no token."""
    _num_tokens_at_loss: int = 0

    def lose_epoch(self) -> None:
        """Called when the scheduler dropped it, with all output that came before."""
        if self.is_in_slot:
            has_progress = len(self.output) > self._num_tokens_at_loss
            self.num_lost_epochs = 1 if has_progress else self.num_lost_epochs + 1
            self._num_tokens_at_loss = len(self.output)
        self.id, self.is_in_slot = 0, False

    def to_pb(self, epoch: int) -> scheduler_pb2.NewSequence:
        """Encodes it with its output so far."""
        spec = replace(self.spec, output=tuple(self.output), arrival=self.key)
        return spec.to_pb(self.id, epoch)


class Sample:
    """A sequence and its output. Belongs to the event loop."""

    def __init__(self, sequence: RunningSequence, output: SampleOutput, *, key: int = 0) -> None:
        """`key` names the sample in the journal."""
        self.output = output
        self.error: SlipstreamError | None = None
        """The reason why the sample could not go on."""
        self.spec = sequence.spec
        """The request's sequence, without output."""
        self.sequence: RunningSequence | None = sequence
        """None when it is over."""
        self.stats = sequence.stats
        """Counts and times so far."""
        self.arrived_at = sequence.arrived_at
        """Seconds of `time.monotonic`."""
        self._is_drafted = sequence.spec.max_draft_tokens != 0
        self.usage: Usage | None = None
        """Tokens, drafts and times of the sample; None while it goes on."""
        self._num_measured = 0
        self._measured_at = 0.0
        sequence.key = key
        sequence.output = output.token_ids

    def add(
        self,
        token_ids: Sequence[int],
        num_accepted: int,
        logprobs: Sequence[TokenLogprobs],
        reason: FinishReason | None,
        *,
        num_draft_tokens: int,
        published_ns: int,
        is_beyond_draft: bool = False,
    ) -> bool:
        """Adds the output of a step; ignored after the end. Returns True if the scheduler must end the sequence.

        `is_beyond_draft`: nothing was drafted for it as it is too long for the draft.
        """
        if self.usage is not None:
            return False
        output, stats = self.output, self.stats
        was_cut = output.is_cut
        if is_beyond_draft:
            stats.tokens_beyond_draft += len(token_ids)
        elif num_draft_tokens and token_ids and self._is_drafted:
            stats.add_draft(num_draft_tokens, num_accepted)
        if token_ids and not was_cut:
            stats.last_token_at = published_ns / 1e9
            if stats.first_token_at is None:
                stats.first_token_at = stats.last_token_at
        output.add(token_ids, num_accepted, logprobs, reason, published_ns=published_ns)
        if reason is not None:
            self._finish(None)
            return False
        return output.is_cut and not was_cut

    def end(self, reason: FinishReason | None, error: SlipstreamError | None) -> None:
        """Ends the sample where it is, with a reason or an error; output that still comes is ignored."""
        if self.usage is not None:
            return
        if reason is not None or self.output.is_cut:
            self.output.add((), 0, (), reason or FinishReason.ABORT, published_ns=0)
            error = None
        self._finish(error)

    @property
    def is_whole(self) -> bool:
        """True if the same request would bring no more output."""
        has_end = self.output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return self.error is None and (has_end or (self.usage is None and self.output.is_cut))

    def go_on(
        self, detokenizer: Detokenizer, token_bytes: Callable[[int], bytes], *, key: int
    ) -> RunningSequence | None:
        """Begins again from the output kept, unless the output is whole, or broken. Returns the sequence."""
        if self.is_whole:
            self.end(FinishReason.ABORT, None)
            return None
        self.error = self.usage = self.sequence = None
        with self.failing_alone():
            self.output.reopen(detokenizer, token_bytes)
            self.stats.finished_at = None
            self.sequence = RunningSequence(
                self.spec, arrived_at=self.arrived_at, output=self.output.token_ids, stats=self.stats, key=key
            )
        return self.sequence

    def restore(self, columns: OutputColumns, usage: Usage | None, error: SlipstreamError | None) -> None:
        """Takes over what was kept of it. `usage` is set if it is over."""
        with self.failing_alone():
            self.output.restore(columns)
        self.usage, self.error = usage or self.usage, error or self.error
        if usage is not None:
            self.output.finish(usage)

    def settle(self) -> None:
        """Called when all of its output has come back from the journal: it is not measured again."""
        if self.output.is_cut:
            # A stop string ended it; the scheduler's answer to that is of no interest.
            self.end(FinishReason.STOP, None)
        self._num_measured = len(self.output.token_ids)
        self._measured_at = time.monotonic()
        self.output.published_ns = self.output.published_before_ns = 0
        if self.usage is not None:
            self.sequence = None

    def measure(self, metrics: RequestMetrics, now: float) -> int:
        """Measures the tokens added since the last call and returns their number. Drops the sequence if it is over."""
        if self.sequence is None:
            return 0
        num_tokens = len(self.output.token_ids)
        num_new = num_tokens - self._num_measured
        if num_new:
            if self._num_measured:
                metrics.went_on(num_new, now - self._measured_at)
            elif num_new > 1:
                metrics.went_on(num_new - 1, 0.0)
            self._measured_at = now
            self._num_measured = num_tokens
        if self.usage is not None:
            self.sequence = None
        return num_new

    def info(self) -> SampleInfo:
        """The sample as it is now."""
        return SampleInfo(
            num_tokens=self.output.num_tokens,
            finish_reason=self.output.finish_reason,
            matched_stop=self.output.matched_stop,
            usage=self.usage,
        )

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Fails it, and nothing else, if the output that was kept cannot become text in the context."""
        try:
            yield
        except Exception:
            logger.exception("the output that was kept cannot become text", extra={"job": self.spec.job_id})
            self.end(None, InternalError(BROKEN_OUTPUT))

    def _finish(self, error: SlipstreamError | None) -> None:
        self.error = error
        self.stats.finished_at = time.monotonic()
        self.usage = self._usage_now(self.stats.finished_at)
        self.output.finish(self.usage)

    def _usage_now(self, ended_at: float) -> Usage:
        stats, arrived_at, num_tokens = self.stats, self.arrived_at, self.output.num_tokens
        admitted_at = ended_at if stats.admitted_at is None else stats.admitted_at
        first_token_at = arrived_at if stats.first_token_at is None else stats.first_token_at
        decoding_s = 0.0
        if stats.last_token_at is not None and num_tokens > 1:
            decoding_s = stats.last_token_at - first_token_at
        return Usage(
            prompt_tokens=len(self.spec.prompt),
            completion_tokens=num_tokens,
            total_draft_tokens=stats.total_draft_tokens,
            total_accepted_tokens=stats.total_accepted_tokens,
            num_verify_steps=stats.num_verify_steps,
            mean_accept_length=stats.mean_accept_length,
            accepted_per_position=stats.accepted_per_position,
            seed=self.spec.sampling.seed,
            # Times of another process, by a clock that was set meanwhile, may be in any order.
            queue_seconds=max(0.0, admitted_at - arrived_at),
            time_to_first_token_seconds=max(0.0, first_token_at - arrived_at),
            end_to_end_seconds=ended_at - arrived_at,
            mean_inter_token_latency_seconds=max(0.0, decoding_s) / max(1, num_tokens - 1),
            cached_tokens=stats.cached_tokens,
            tokens_beyond_draft=stats.tokens_beyond_draft,
        )
