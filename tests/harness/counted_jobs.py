"""Sequences as tests follow them: what came of each, from the scheduler's deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.job import FinishReason, TokenLogprobs, mean_accept_length
from slipstream.common.wire.sequence import SequenceSpec, StepOutput
from slipstream.scheduler.records import Sequence
from slipstream.scheduler.results import Outgoing
from slipstream.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class JobStats:
    """Counts of a sequence, as a gateway can know them."""

    num_output_tokens: int = 0
    num_verify_steps: int = 0
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    admitted_ns: int | None = None
    cached_tokens: int = 0
    tokens_beyond_draft: int = 0

    def add_draft(self, num_proposed: int, num_accepted: int) -> None:
        """Counts a checked draft."""
        self.num_verify_steps += 1
        self.total_draft_tokens += num_proposed
        self.total_accepted_tokens += num_accepted
        self.accepted_per_position += [0] * (num_proposed - len(self.accepted_per_position))
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify step."""
        return mean_accept_length(self.total_accepted_tokens, self.num_verify_steps)


class Job(Sequence):
    """A sequence with its counts."""

    def __init__(self, spec: SequenceSpec) -> None:
        super().__init__(spec)
        self.num_brought = len(spec.output)
        """Output tokens that it came with: one that is preempted has more."""
        self.stats = JobStats()


class OutputRow(NamedTuple):
    """What a step brought to one sequence."""

    sequence: int
    tokens: list[int]
    num_accepted: int
    finish_reason: FinishReason | None
    is_beyond_draft: bool


def rows_of(output: StepOutput) -> Iterator[OutputRow]:
    """The rows of a step's output."""
    tokens = iter(output.tokens)
    columns = (output.sequences, output.num_tokens, output.num_accepted, output.finish_reasons)
    beyond = output.is_beyond_draft or [False] * len(output.sequences)
    for sequence, count, num_accepted, reason, is_beyond in zip(*columns, beyond, strict=True):
        yield OutputRow(sequence, [next(tokens) for _ in range(count)], num_accepted, reason, is_beyond)
    assert next(tokens, None) is None, "every token belongs to a sequence"


class JobBook:
    """All jobs that were submitted, and what came of them."""

    def __init__(self, queue: WaitingQueue) -> None:
        self.queue = queue
        self.outputs: dict[Job, list[int]] = {}
        """New tokens, without those that a job came with."""
        self.logprobs: dict[Job, list[TokenLogprobs]] = {}
        self.ends: dict[Job, FinishReason] = {}
        self.refused: dict[Job, SlipstreamError] = {}
        self._by_key: dict[tuple[int, int], Job] = {}

    def add(self, *jobs: Job) -> None:
        """Submits jobs."""
        for job in jobs:
            job.id = len(self._by_key) + 1
            self._by_key[job.key] = job
            self.outputs[job], self.logprobs[job] = [], []
        assert self.queue.add(*jobs), "an epoch is open"

    def cancel(self, job: Job) -> None:
        """Cancels a job, at any time."""
        self.queue.cancel(job.stream, [job.id])

    def take(self, outgoing: Outgoing) -> list[tuple[Job, OutputRow]]:
        """Takes in and checks what the gateways' streams get; returns the rows."""
        rows = []
        for stream, output, refusals in outgoing.deliveries():
            for refusal in refusals:
                self.refused[self._by_key[stream, refusal.sequence]] = refusal.error
            if output is not None:
                rows += self._take(stream, StepOutput.from_pb(output.to_pb()))
        return rows

    def _take(self, stream: int, output: StepOutput) -> Iterator[tuple[Job, OutputRow]]:
        for number, when in zip(output.admitted, output.admitted_ns, strict=True):
            stats = self._by_key[stream, number].stats
            assert stats.admitted_ns is None, "an admission is told once"
            stats.admitted_ns = when
        for number, num_tokens in output.cached_tokens.items():
            self._by_key[stream, number].stats.cached_tokens = num_tokens
        for row in rows_of(output):
            job = self._by_key[stream, row.sequence]
            assert job not in self.ends, "nothing comes after the end"
            assert not row.tokens or job.stats.admitted_ns is not None, "a sequence is admitted before its first token"
            likely = output.logprobs.get(row.sequence, ())
            assert len(likely) == (0 if job.spec.top_logprobs is None else len(row.tokens))
            self.outputs[job] += row.tokens
            self.logprobs[job] += likely
            job.stats.num_output_tokens += len(row.tokens)
            if row.is_beyond_draft:
                assert job.spec.max_draft_tokens != 0
                assert row.num_accepted == 0
                job.stats.tokens_beyond_draft += len(row.tokens)
            elif output.num_draft_tokens and job.spec.max_draft_tokens != 0 and row.tokens:
                job.stats.add_draft(output.num_draft_tokens, row.num_accepted)
            if row.finish_reason is not None:
                self.ends[job] = row.finish_reason
            yield job, row
