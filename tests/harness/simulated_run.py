"""The batch against a simulated device, whose tokens are a function of the prompt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.api.sampling import SamplingParams
from slipstream.common.api.sequence import SequenceSpec
from slipstream.common.worker.step import StepKind
from slipstream.scheduler.core.batch import Batch, BatchSizes
from slipstream.scheduler.core.results import Step, StepResult
from slipstream.scheduler.core.sequence import Sequence
from slipstream.scheduler.core.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from random import Random

    from slipstream.common.api.sequence import Outputs

STOP = 7
"""A token that some jobs end at."""


def token_of(prompt: tuple[int, ...], index: int) -> int:
    """The reference: what the model says at place `index` of the output."""
    return (sum(prompt) * 31 + len(prompt) * 17 + index * index * 5 + index) % 23


def make_job(
    name: str,
    prompt: tuple[int, ...],
    max_new_tokens: int,
    *,
    stops: bool = False,
    max_draft_tokens: int | None = None,
    top_logprobs: int | None = None,
) -> Sequence:
    """A job that is not submitted yet."""
    stop_token_ids = frozenset({STOP}) if stops else frozenset()
    return Sequence(
        SequenceSpec(
            job_id=name,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(),
            stop_token_ids=stop_token_ids,
            max_draft_tokens=max_draft_tokens,
            top_logprobs=top_logprobs,
        )
    )


def reference(job: Sequence) -> tuple[list[int], FinishReason]:
    """Returns a job's complete output and its finish reason."""
    output = []
    for index in range(job.spec.max_new_tokens):
        output.append(token_of(job.spec.prompt, index))
        if output[-1] in job.spec.stop_token_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@dataclass
class Slot:
    """A slot's state on the device."""

    pages: tuple[int, ...] = ()
    limit_tokens: int = 0
    max_draft_tokens: int | None = None
    prompt: tuple[int, ...] = ()
    num_output: int = 0


@dataclass
class Device:
    """Carries out steps in order; knows nothing of jobs but what the steps say."""

    sizes: BatchSizes
    random: Random
    slots: dict[int, Slot] = field(default_factory=dict)
    last_step: int = 0

    def run(self, step: Step) -> StepResult:
        """Runs a step and returns its result."""
        assert step.number == self.last_step + 1
        self.last_step = step.number
        for update in step.updates:
            self.slots[update.slot] = Slot(update.pages, update.limit_tokens, update.max_draft_tokens)
        if step.kind is StepKind.PREFILL:
            self._prefill(step)
            accepted = [0] * len(step.yielding)
        else:
            most = self.sizes.num_draft_tokens if step.kind is StepKind.DECODE else 0
            for lease in step.members:
                self._check_room(self.slots[lease.slot], most)
            bounds = [self._most_accepted(lease.slot) for lease in step.yielding]
            assert any(bounds) == (step.kind is StepKind.DECODE), "a step drafts for somebody, or it is plain"
            accepted = [self.random.randint(0, min(most, bound)) for bound in bounds]
        return StepResult([self._output(lease.slot, a + 1) for lease, a in zip(step.yielding, accepted, strict=True)])

    def _prefill(self, step: Step) -> None:
        assert 0 < sum(len(chunk.tokens) for chunk in step.chunks) <= self.sizes.chunk_tokens
        assert [chunk.slot for chunk in step.chunks] == list(step.slots)
        for chunk in step.chunks:
            slot = self.slots[chunk.slot]
            assert chunk.start == len(slot.prompt), "chunks follow each other"
            assert chunk.tokens, "no chunk is empty"
            slot.prompt += chunk.tokens
        assert [lease.slot for lease in step.yielding] == [chunk.slot for chunk in step.chunks if chunk.is_last]

    def _output(self, slot_number: int, count: int) -> list[int]:
        slot = self.slots[slot_number]
        tokens = [token_of(slot.prompt, slot.num_output + number) for number in range(count)]
        slot.num_output += count
        return tokens

    def _most_accepted(self, slot_number: int) -> int:
        most = self.slots[slot_number].max_draft_tokens
        return self.sizes.num_draft_tokens if most is None else min(most, self.sizes.num_draft_tokens)

    def _check_room(self, slot: Slot, most_accepted: int) -> None:
        # As the workers do it: a length past the limit is clamped to it.
        length = min(len(slot.prompt) + slot.num_output - 1, slot.limit_tokens)
        assert length + most_accepted < len(slot.pages) * self.sizes.page_tokens


class Run:
    """The scheduler's loop without its surroundings."""

    def __init__(self, sizes: BatchSizes, random: Random) -> None:
        self.queue = WaitingQueue(100)
        self.queue.open()
        self.batch = Batch(sizes)
        self.device = Device(sizes, random)
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.num_accepted: list[int] = []
        """The number of accepted tokens of each draft."""
        self.outputs: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, FinishReason | None] = {}

    def turn(self) -> bool:
        """One turn of the loop; False when there is nothing to do."""
        self.take(self.batch.cancel(self.queue.take_cancelled()))
        self.batch.admit(self.queue)
        self._check_pages()
        step = self.batch.next_step()
        if step is not None:
            running = set(self.batch._running)
            assert {update.slot for update in step.updates} <= running, "nothing is told of requests that are over"
            self.in_flight.append((step, self.device.run(step)))
        if len(self.in_flight) > (0 if step is None else self.batch.sizes.run_ahead):
            step, result = self.in_flight.popleft()
            outputs, num_accepted = self.batch.apply(step, result)
            self.num_accepted += num_accepted
            self.take(outputs)
        return step is not None or bool(self.in_flight)

    def take(self, outputs: Outputs) -> None:
        """Records and checks the outputs that the clients' side would get."""
        for job, progress in outputs:
            assert job not in self.ends, "nothing comes after the end"
            assert 0 <= progress.num_draft <= len(progress.token_ids)
            self.outputs.setdefault(job, []).extend(progress.token_ids)
            if progress.is_last:
                self.ends[job] = progress.finish_reason

    def _check_pages(self) -> None:
        held = [page for request in self.batch._running.values() for page in request.pages]
        assert len(set(held)) == len(held)
        assert len(held) + self.batch.pages.num_free == self.batch.pages.num_pages
