"""The step loop without its surroundings, with drafts that come and go."""

from __future__ import annotations

import random
from collections import deque

from slipstream.scheduler.draft import Draft
from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.observer import SentStep
from slipstream.scheduler.plan import consume, initial_state, plan_step, with_draft
from slipstream.scheduler.records import NO_OUTCOME, DraftTraits, LossCause, Step, StepResult
from slipstream.scheduler.sizes import BatchSizes
from slipstream.scheduler.speculation import Speculation
from tests.harness.counted_jobs import Job
from tests.harness.fake_drafts import FakeDraft
from tests.harness.simulated_run import Run, make_job, reference, token_of
from tests.harness.step_kinds import Kind, kind_of_step

SIZES = BatchSizes(num_slots=4, num_pages=200, page_tokens=4, chunk_tokens=16, num_draft_tokens=3, run_ahead=1)
NO_DRAFT = DraftTraits(is_present=False)


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.causes: list[LossCause] = []

    def joined(self, draft: Draft, catch_up_s: float) -> None:
        """See `SpeculationListener.joined`."""
        self.events.append(("joined", draft.number))

    def left(self, draft: Draft, cause: LossCause, reason: str) -> None:
        """See `SpeculationListener.left`."""
        self.events.append(("left", draft.number))
        self.causes.append(cause)

    def gone(self, draft: Draft) -> None:
        """See `SpeculationListener.gone`."""
        self.events.append(("gone", draft.number))


class DraftedRun(Run):
    """The loop without its surroundings, with drafts that come and go."""

    def __init__(
        self,
        sizes: BatchSizes,
        rng: random.Random,
        *,
        timeout_s: float | None = None,
        choice: DraftChoice | None = None,
    ) -> None:
        super().__init__(sizes, rng)
        self.random = rng
        self.listener = Listener()
        self._choice = choice
        self.speculation = Speculation(self.batch, self.listener, timeout_s=timeout_s, choice=choice)
        self.kinds: list[Kind] = []
        self.plan = initial_state(NO_DRAFT, sizes.run_ahead)
        self._planned_for: Draft | None = None
        self._sent: deque[SentStep] = deque()
        self._drafts: dict[int, FakeDraft] = {}

    def offer(self, draft: FakeDraft) -> None:
        """A draft comes."""
        self._drafts[draft.number] = draft
        self.speculation.offer(draft.draft)

    def turn(self) -> bool:
        """See `Run.turn`."""
        if self.queue.cancelled:
            self.batch.cancel(self.queue.take_cancelled())
        self.batch.admit(self.queue)
        step, draft = self.speculation.next_step(self.plan.step, len(self.in_flight))
        if step is not None:
            self._send(step, draft)
        self.take()
        if len(self.in_flight) > (0 if step is None else self.batch.sizes.run_ahead):
            step, result = self.in_flight.popleft()
            self.plan = consume(self.plan, step.number)
            self.speculation.consumed(self._sent.popleft(), 0.001)
            self.apply(step, result)
            if self._choice is not None and step.decoded.slots:
                self._choice.take_in(NO_OUTCOME)
        for fake in self._drafts.values():
            if self.random.random() < 0.5:
                fake.work()
        return step is not None or bool(self.in_flight)

    def finish(self) -> None:
        """Turns until nothing is left to do."""
        for _ in range(3000):
            if not self.turn() and not len(self.queue):
                return
        raise AssertionError("no progress")

    def _send(self, step: Step, life: Draft | None) -> None:
        self.kinds.append(kind_of_step(step))
        if life is not self._planned_for:
            self.plan = with_draft(self.plan, NO_DRAFT if life is None else life.attachment.traits)
            self._planned_for = life
        draft_ops, verify_ops, self.plan = plan_step(
            self.plan, step.number, step.decoded.mask, step.prompts, step.kept, is_drafted=step.most_draft_tokens > 0
        )
        draft = None if life is None else self._drafts[life.number]
        self._sent.append(SentStep(step, life, draft_ops, verify_ops, verify_ops.last_of_draft, 0, 0))
        if life is not None:
            life.sending(step.number, draft_ops)
            assert not any(event == ("gone", life.number) for event in self.listener.events)
        running = self.batch._running.items()
        for one in self._drafts.values():
            one.undrafted = frozenset(slot for slot, sequence in running if sequence.max_draft_tokens == 0)
        if draft is not None and draft.failure is None:
            if draft_ops is not None:
                draft.send(step.command_to_draft(draft_ops, draft.number))
            if step.is_kept:
                draft.work(up_to=step.number)  # verify waits for it
                for slot in step.decoded.slots:
                    self._check_pages_of(draft, slot)
        result = self.device.run(step)
        if draft is not None:
            draft.stash.value = step.number
            for slot, output in zip(step.yielding.slots, _outputs(result), strict=True):
                state = self.device.slots[slot]
                draft.stashed[slot] = len(state.prompt) + state.num_output - 1, output
        self.in_flight.append((step, result))

    def _check_pages_of(self, draft: FakeDraft, slot: int) -> None:
        held = self.batch._running[slot]
        if held.max_draft_tokens != 0:
            assert draft.slots[slot].pages == tuple(held.pages), "a draft has the pages of what it drafts for"


def _outputs(result: StepResult) -> list[list[int]]:
    columns = zip(result.tokens.tolist(), result.num_accepted.tolist(), strict=True)
    return [tokens[: accepted + 1] for tokens, accepted in columns]


def lost_run(**settings: float) -> tuple[DraftedRun, FakeDraft, Job]:
    """A run whose draft drafts."""
    run = DraftedRun(SIZES, random.Random(1), **settings)  # type: ignore[arg-type]
    draft, job = FakeDraft(2, 3), make_job("job", (1, 2, 3), 60)
    run.offer(draft)
    run.jobs.add(job)
    for _ in range(5):
        run.turn()
    assert run.kinds[-1] is Kind.DECODE
    return run, draft, job


def make_jobs(rng: random.Random, count: int, *, most: int = 60) -> list[Job]:
    """Jobs of all lengths, some with output."""
    jobs = []
    for number in range(count):
        prompt = tuple(rng.randrange(30) for _ in range(rng.randrange(1, 50)))
        output = tuple(token_of(prompt, index) for index in range(rng.choice((0, 0, 5))))
        jobs.append(make_job(str(number), prompt, rng.randrange(10, most), output=output))
    return jobs


def check(run: DraftedRun, jobs: list[Job]) -> None:
    """Each job has its own tokens, and slots and pages are back."""
    for job in jobs:
        expected, reason = reference(job)
        assert (run.jobs.outputs[job], run.jobs.ends[job]) == (expected[job.num_brought :], reason)
    assert run.batch.num_running == 0
    assert run.batch.pages.num_free == run.batch.pages.num_pages
