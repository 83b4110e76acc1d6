"""The batch against a simulated device, whose tokens are a function of the prompt."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import SlotUpdate
from slipstream.scheduler.batch import Batch
from slipstream.scheduler.records import Step, StepResult
from slipstream.scheduler.sizes import BatchSizes
from slipstream.scheduler.waiting_queue import WaitingQueue
from tests.harness.counted_jobs import Job, JobBook

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
    output: tuple[int, ...] = (),
    priority: int = 0,
) -> Job:
    """A job that is not submitted yet."""
    stop_token_ids = frozenset({STOP}) if stops else frozenset()
    return Job(
        SequenceSpec(
            job_id=name,
            prompt=prompt,
            output=output,
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(),
            stop_token_ids=stop_token_ids,
            max_draft_tokens=max_draft_tokens,
            top_logprobs=top_logprobs,
            priority=priority,
        )
    )


def reference(job: Job) -> tuple[list[int], FinishReason]:
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
    prompt_tokens: int | None = None
    prompt: tuple[int, ...] = ()
    num_output: int = 0

    def take_in(self, tokens: tuple[int, ...]) -> None:
        """Adds the next tokens of its prompt, or of the output that it came with."""
        start = len(self.prompt) + self.num_output
        end = len(tokens) if self.prompt_tokens is None else max(0, self.prompt_tokens - start)
        self.prompt += tokens[:end]
        self.num_output += len(tokens[end:])


@dataclass
class Device:
    """Carries out steps in order; knows nothing of jobs but what the steps say."""

    sizes: BatchSizes
    random: Random
    slots: dict[int, Slot] = field(default_factory=dict)
    last_step: int = 0
    memory: dict[int, list[int | None]] = field(default_factory=dict)
    """By page: the tokens whose KV it has."""

    def run(self, step: Step) -> StepResult:
        """Runs a step and returns its result."""
        assert step.number == self.last_step + 1
        self.last_step = step.number
        self._check_fields(step)
        for update in step.updates:
            self._update(update)
        decoding, most = step.decoded.slots, step.most_draft_tokens
        for slot in decoding:
            self._check_room(self.slots[slot], most)
        drafted = step.num_draft_tokens or (0,) * len(decoding)
        bounds = {slot: self._most_accepted(slot, count) for slot, count in zip(decoding, drafted, strict=True)}
        assert any(bounds.values()) == bool(most), "a step drafts for somebody, or it is plain"
        outputs = [self._output(slot, self.random.randint(0, bound) + 1) for slot, bound in bounds.items()]
        if step.chunks:
            outputs += self._prefill(step)
        assert all(len(output) <= most for output, most in zip(outputs, step.most_more.tolist(), strict=True))
        return result_of(outputs, self.sizes.num_draft_tokens + 1)

    @staticmethod
    def _check_fields(step: Step) -> None:
        """Checks the fields of a step that follow from its other fields."""
        assert step.is_bounded == any(most <= step.most_draft_tokens for most in step.most_more.tolist())
        assert step.num_prompt_tokens == sum(len(chunk.tokens) for chunk in step.chunks)
        most = step.most_draft_tokens
        assert len(step.num_draft_tokens) == (len(step.decoded.slots) if most else 0)
        assert max(step.num_draft_tokens, default=0) == most
        rows = zip(step.most_more.tolist(), step.num_draft_tokens, strict=False)
        assert all(bound <= drafted + 1 for bound, drafted in rows), "no more is accepted than is drafted"

    def _update(self, update: SlotUpdate) -> None:
        if update.sampling is not None:
            assert update.first_page_index == 0
            self.slots[update.slot] = Slot(
                update.pages, update.limit_tokens, update.max_draft_tokens, update.prompt_tokens
            )
            self.slots[update.slot].take_in(self._read(update.pages, update.cached_tokens))
            return
        slot = self.slots[update.slot]
        is_changed = update.max_draft_tokens != slot.max_draft_tokens
        assert update.pages or is_changed, "an update of a running request brings pages, or another bound"
        assert update.first_page_index == len(slot.pages), "each page is sent once"
        assert update.limit_tokens == slot.limit_tokens
        slot.pages += update.pages
        slot.max_draft_tokens = update.max_draft_tokens

    def _prefill(self, step: Step) -> list[list[int]]:
        num_decoded = len(step.decoded.slots) + sum(step.num_draft_tokens)
        assert 0 < step.num_prompt_tokens <= self.sizes.room_in_large_step(num_decoded)
        slots = [chunk.slot for chunk in step.chunks]
        assert self.sizes.mixes or not step.decoded.slots
        assert not set(slots) & set(step.decoded.slots)
        for chunk in step.chunks:
            slot = self.slots[chunk.slot]
            assert chunk.start == len(slot.prompt) + slot.num_output, "chunks follow each other"
            assert chunk.tokens, "no chunk is empty"
            slot.take_in(chunk.tokens)
            assert len(slot.prompt) + slot.num_output <= len(slot.pages) * self.sizes.page_tokens
            self._write(slot, chunk.start, chunk.tokens)
        ending = [chunk.slot for chunk in step.chunks if chunk.is_last]
        assert list(step.yielding.slots) == [*step.decoded.slots, *ending]
        return [self._output(slot, 1, is_decode=False) for slot in ending]

    def _output(self, slot_number: int, count: int, *, is_decode: bool = True) -> list[int]:
        slot = self.slots[slot_number]
        tokens = [token_of(slot.prompt, slot.num_output + number) for number in range(count)]
        if is_decode:
            # The step has taken in the last token and those of the draft that were right.
            inputs = token_of(slot.prompt, slot.num_output - 1), *tokens[:-1]
            self._write(slot, len(slot.prompt) + slot.num_output - 1, inputs)
        slot.num_output += count
        return tokens

    def _write(self, slot: Slot, start: int, tokens: tuple[int, ...]) -> None:
        page_tokens = self.sizes.page_tokens
        for position, token in enumerate(tokens, start):
            if position < slot.limit_tokens:
                page = self.memory.setdefault(slot.pages[position // page_tokens], [None] * page_tokens)
                page[position % page_tokens] = token

    def _read(self, pages: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """The tokens that the first pages of a sequence have from another one."""
        found = [token for page in pages[: num_tokens // self.sizes.page_tokens] for token in self.memory[page]]
        assert len(found) == num_tokens, "whole pages are shared"
        assert None not in found, "a shared page is full"
        return tuple(token for token in found if token is not None)

    def _most_accepted(self, slot_number: int, num_draft_tokens: int) -> int:
        most = self.slots[slot_number].max_draft_tokens
        return num_draft_tokens if most is None else min(most, num_draft_tokens)

    def _check_room(self, slot: Slot, most_accepted: int) -> None:
        # As the workers do it: what is at the limit or behind it goes to the padding page.
        end = min(len(slot.prompt) + slot.num_output + most_accepted, slot.limit_tokens)
        assert end <= len(slot.pages) * self.sizes.page_tokens


def result_of(outputs: list[list[int]], width: int) -> StepResult:
    """A step's result: for each row its tokens."""
    tokens = np.array([output + [-1] * (width - len(output)) for output in outputs], np.int64)
    num_tokens = np.array([len(output) for output in outputs], np.int32)
    return StepResult((num_tokens - 1).astype(np.uint32), num_tokens, tokens.reshape(len(outputs), width))


class Run:
    """The scheduler's loop without its surroundings."""

    def __init__(self, sizes: BatchSizes, random: Random) -> None:
        self.queue = WaitingQueue(100)
        self.queue.open(1)
        self.batch = Batch(sizes)
        self.device = Device(sizes, random)
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.num_accepted: list[int] = []
        """The number of accepted tokens of each draft."""
        self.jobs = JobBook(self.queue)

    def turn(self) -> bool:
        """One turn of the loop; False when there is nothing to do."""
        if self.queue.cancelled:
            self.batch.cancel(self.queue.take_cancelled())
        self.batch.admit(self.queue)
        self._check_pages()
        step = self.batch.next_step(self.batch.sizes.num_draft_tokens)
        if step is not None:
            running = set(self.batch._running)
            assert {update.slot for update in step.updates} <= running, "nothing is told of requests that are over"
            self.in_flight.append((step, self.device.run(step)))
        self.take()
        self.batch.grow_ahead()
        if len(self.in_flight) > (0 if step is None else self.batch.sizes.run_ahead):
            step, result = self.in_flight.popleft()
            self.apply(step, result)
        return step is not None or bool(self.in_flight)

    def apply(self, step: Step, result: StepResult) -> None:
        """Takes a result in, and its output."""
        outcome = self.batch.apply(step, result)
        self.num_accepted += outcome.num_accepted[outcome.is_speculating].tolist()
        self.take()

    def take(self) -> None:
        """Takes what a gateway would get."""
        self.jobs.take(self.batch.take_output())

    def _check_pages(self) -> None:
        held = Counter(page for request in self.batch._running.values() for page in request.pages)
        assert held == self.batch.pages._references
        assert len(held) + self.batch.pages.num_free == self.batch.pages.num_pages
