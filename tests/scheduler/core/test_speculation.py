"""Drafts that join, leave and are lost while sequences run, against drafts that miss no token and no step."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from slipstream.common.errors import UnavailableError
from slipstream.common.worker.step import StepCommand, StepKind
from slipstream.scheduler.core.batch import BatchSizes
from slipstream.scheduler.core.plan import DraftTraits, OrderedStep, consume, initial_state, plan_step, with_draft
from slipstream.scheduler.core.speculation import Speculation
from slipstream.scheduler.telemetry.draft_metrics import LossCause
from tests.harness.fake_drafts import FakeDraft, FakeFence
from tests.harness.simulated_run import Run, make_job, reference, token_of

if TYPE_CHECKING:
    from slipstream.scheduler.core.results import Step, StepResult
    from slipstream.scheduler.workers.attachment import DraftAttachment
    from tests.harness.counted_jobs import Job

SIZES = BatchSizes(num_slots=4, num_pages=200, page_tokens=4, chunk_tokens=16, num_draft_tokens=3, run_ahead=1)
NUM_RUNS = 4
NO_DRAFT = DraftTraits(is_present=False)


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.causes: list[LossCause] = []

    def joined(self, attachment: DraftAttachment, catch_up_s: float) -> None:
        """See `SpeculationListener.joined`."""
        self.events.append(("joined", attachment.number))

    def left(self, attachment: DraftAttachment, cause: LossCause, reason: str) -> None:
        """See `SpeculationListener.left`."""
        self.events.append(("left", attachment.number))
        self.causes.append(cause)

    def let_go(self, attachment: DraftAttachment) -> None:
        """See `SpeculationListener.let_go`."""
        self.events.append(("let go", attachment.number))


class DraftedRun(Run):
    """The loop without its surroundings, with drafts that come and go."""

    def __init__(self, sizes: BatchSizes, rng: random.Random, *, timeout_s: float | None = None) -> None:
        super().__init__(sizes, rng)
        self.random = rng
        self.listener = Listener()
        self.speculation = Speculation(self.batch, self.listener, timeout_s=timeout_s)
        self.kinds: list[StepKind] = []
        self.plan = initial_state(NO_DRAFT, sizes.run_ahead)
        self._planned_for: DraftAttachment | None = None
        self._drafts: dict[int, FakeDraft] = {}

    def offer(self, draft: FakeDraft) -> None:
        """A draft comes."""
        self._drafts[draft.number] = draft
        self.speculation.offer(cast("DraftAttachment", draft))

    def turn(self) -> bool:
        """See `Run.turn`."""
        self.batch.cancel(self.queue.take_cancelled())
        self.batch.admit(self.queue)
        part = self.speculation.next_part(self.plan.step, len(self.in_flight))
        step, attachment = None, None
        if part is not None:
            attachment = part.attachment
            step = (
                self.batch.empty_step()
                if part.is_empty
                else self.batch.next_step(part.num_draft_tokens, decodes_first=part.decodes_first)
            )
        if step is not None:
            self._send(step, attachment)
        self.take()
        if len(self.in_flight) > (0 if step is None else self.batch.sizes.run_ahead):
            step, result = self.in_flight.popleft()
            self.plan = consume(self.plan, step.number)
            self.speculation.consumed(step.number, 0.001, is_decode=step.kind is not StepKind.PREFILL)
            self.apply(step, result)
        for draft in self._drafts.values():
            if self.random.random() < 0.5:
                draft.work()
        return step is not None or bool(self.in_flight)

    def finish(self) -> None:
        """Turns until nothing is left to do."""
        for _ in range(3000):
            if not self.turn() and not len(self.queue):
                return
        raise AssertionError("no progress")

    def _send(self, step: Step, attachment: DraftAttachment | None) -> None:
        self.kinds.append(step.kind)
        if attachment is not self._planned_for:
            self.plan = with_draft(self.plan, NO_DRAFT if attachment is None else attachment.traits)
            self._planned_for = attachment
        planned, self.plan = plan_step(self.plan, OrderedStep(step.number, step.kind, step.members.mask))
        draft = None if attachment is None else self._drafts[attachment.number]
        if attachment is not None:
            self.speculation.sending(
                step.number,
                attachment,
                has_command=planned.draft is not None,
                brings_tokens=step.kind is StepKind.PREFILL,
            )
            assert not any(event == ("let go", attachment.number) for event in self.listener.events)
        if draft is not None and planned.draft is not None and draft.failure is None:
            draft.send(self._command(step, draft, planned.draft))
            if step.kind is StepKind.DECODE:
                draft.work(up_to=step.number)  # verify waits for it
        result = self.device.run(step)
        if draft is not None:
            for slot, output in zip(step.yielding.slots, _outputs(result), strict=True):
                state = self.device.slots[slot]
                draft.stash[slot] = len(state.prompt) + state.num_output - 1, output
        self.in_flight.append((step, result))

    def _command(self, step: Step, draft: FakeDraft, ops: object) -> StepCommand:
        return StepCommand(
            epoch=draft.number,
            step=step.number,
            kind=step.kind,
            slots=step.members.slots,
            ops=ops,  # type: ignore[arg-type]
            chunks=step.chunks,
            updates=step.updates,
        )


def _outputs(result: StepResult) -> list[list[int]]:
    columns = zip(result.tokens.tolist(), result.num_accepted.tolist(), strict=True)
    return [tokens[: accepted + 1] for tokens, accepted in columns]


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
        assert (run.jobs.outputs[job], run.jobs.ends[job]) == (expected[len(job.spec.output) :], reason)
    assert run.batch.num_running == 0
    assert run.batch.pages.num_free == run.batch.pages.num_pages


@pytest.mark.parametrize("reads_hidden", [False, True], ids=["language model", "head"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 64])
def test_drafts_come_and_go_at_any_time(reads_hidden: bool, run_ahead: int, chunk_tokens: int) -> None:
    """Each draft checks that it is told every token once, and that each step it drafts in was stashed for it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    num_joined = 0
    for number in range(NUM_RUNS):
        rng = random.Random(seed + number)
        sizes = replace(SIZES, chunk_tokens=chunk_tokens, run_ahead=run_ahead)
        run = DraftedRun(sizes, rng)
        jobs = make_jobs(rng, 10)
        to_submit, drafts = deque(jobs), list[FakeDraft]()
        for _ in range(20_000):
            if not run.turn() and not to_submit and not len(run.queue):
                break
            if to_submit and rng.random() < 0.1:
                run.jobs.add(to_submit.popleft())
            if rng.random() < 0.04 and (not drafts or run.speculation.joining is None):
                drafts.append(FakeDraft(len(drafts) + 10, rng.randrange(1, 4), reads_hidden=reads_hidden))
                run.offer(drafts[-1])
            if drafts and rng.random() < 0.02:
                rng.choice(drafts[-2:]).fail()
        check(run, jobs)
        joined = [number for event, number in run.listener.events if event == "joined"]
        num_joined += len(joined)
        for event in ("joined", "left", "let go"):
            numbers = [number for what, number in run.listener.events if what == event]
            assert len(set(numbers)) == len(numbers) or event == "joined", "each attachment has one end"
    assert num_joined > NUM_RUNS


def test_a_draft_that_is_there_before_the_first_step_takes_part_in_it() -> None:
    run = DraftedRun(SIZES, random.Random(1))
    draft = FakeDraft(2, 3)
    run.offer(draft)
    run.speculation.settle()
    assert run.listener.events == [("joined", 2)]
    job = make_job("job", (1, 2, 3), 30)
    run.jobs.add(job)
    run.finish()
    assert run.kinds[0] is StepKind.PREFILL
    assert set(run.kinds[1:]) == {StepKind.DECODE}
    assert draft.kinds[: len(run.kinds)] == run.kinds
    check(run, [job])


def test_a_language_model_takes_in_what_it_missed_and_costs_one_plain_step() -> None:
    run = DraftedRun(SIZES, random.Random(1))
    jobs = [make_job(str(number), tuple(range(40 + number)), 60) for number in range(3)]
    run.jobs.add(*jobs)
    for _ in range(20):
        run.turn()
    assert StepKind.DECODE not in run.kinds
    draft = FakeDraft(2, 3)
    run.offer(draft)
    run.finish()
    assert run.listener.events[0] == ("joined", 2)
    assert draft.kinds.count(StepKind.CATCH_UP) >= 120 // SIZES.chunk_tokens
    assert StepKind.PLAIN not in run.kinds[run.kinds.index(StepKind.DECODE) :], "one change, and no way back"
    check(run, jobs)


def test_a_head_joins_within_two_steps_without_tokens() -> None:
    run = DraftedRun(SIZES, random.Random(1))
    job = make_job("job", tuple(range(40)), 60)
    run.jobs.add(job)
    for _ in range(10):
        run.turn()
    num_before = len(run.kinds)
    draft = FakeDraft(2, 3, reads_hidden=True)
    run.offer(draft)
    run.finish()
    assert run.kinds[num_before : num_before + 2] == [StepKind.PLAIN, StepKind.DECODE]
    assert draft.kinds[0] is StepKind.CATCH_UP
    assert draft.slots[1].history_from > 40
    check(run, [job])


def lost_run(**settings: float) -> tuple[DraftedRun, FakeDraft, Job]:
    """A run whose draft drafts."""
    run = DraftedRun(SIZES, random.Random(1), **settings)  # type: ignore[arg-type]
    draft, job = FakeDraft(2, 3), make_job("job", (1, 2, 3), 60)
    run.offer(draft)
    run.jobs.add(job)
    for _ in range(5):
        run.turn()
    assert run.kinds[-1] is StepKind.DECODE
    return run, draft, job


def test_a_lost_draft_is_released_up_to_the_last_step_until_that_is_consumed() -> None:
    run, draft, job = lost_run()
    last = run.plan.step
    draft.done.value = last - 1
    draft.fail()
    run.speculation.check()
    assert draft.done.releases == [last]
    draft.done.value = last - 1  # a late write
    run.speculation.watch(None, 0, time.monotonic())
    assert draft.done.value == last
    assert run.listener.events[1:] == [("left", 2)]
    run.turn()
    assert run.kinds[-1] is StepKind.PLAIN
    run.turn()
    assert run.listener.events[1:] == [("left", 2), ("let go", 2)]
    assert run.listener.causes == [LossCause.DIED]
    run.finish()
    check(run, [job])


def test_a_draft_that_refuses_a_command_is_counted_so() -> None:
    run, draft, _ = lost_run()
    draft.has_refused = True
    draft.fail()
    run.turn()
    assert run.listener.causes == [LossCause.REFUSED]


def test_the_watchdog_loses_a_draft_that_holds_a_step_up() -> None:
    run, draft, _ = lost_run(timeout_s=0.2)
    step = run.plan.step
    attachment = cast("DraftAttachment", draft)
    draft.done.value = step - 1
    run.speculation.watch(attachment, step, time.monotonic())
    assert run.speculation.active is attachment
    draft.done.value = step
    run.speculation.watch(attachment, step, time.monotonic() - 1.0)
    assert run.speculation.active is attachment, "it is verify that the step waits for"
    next_step = step + 1
    run.speculation.sending(next_step, attachment, has_command=True, brings_tokens=False)
    deadline = time.monotonic() + 5.0
    while run.speculation.active is attachment:
        assert time.monotonic() < deadline
        run.speculation.watch(attachment, next_step, time.monotonic() - 1.0)
    assert run.listener.causes == [LossCause.TIMEOUT]
    assert draft.done.value == next_step


def test_a_draft_whose_fence_falls_back_is_lost_as_one_that_never_came_so_far() -> None:
    run, draft, _ = lost_run(timeout_s=0.1)
    step, attachment = run.plan.step + 1, cast("DraftAttachment", draft)
    run.speculation.sending(step, attachment, has_command=True, brings_tokens=False)
    draft.done.value = 2**63
    run.speculation.watch(attachment, step, time.monotonic() - 1.0)
    assert run.speculation.active is attachment
    draft.done.value = 0
    deadline = time.monotonic() + 5.0
    while run.speculation.active is attachment:
        assert time.monotonic() < deadline
        run.speculation.watch(attachment, step, time.monotonic() - 1.0)
    assert run.listener.causes == [LossCause.TIMEOUT]
    assert draft.done.value == step


def test_a_step_waits_two_steps_for_its_draft_unless_a_time_is_set() -> None:
    run, _, _ = lost_run()
    assert run.speculation.timeout_s == 0.25
    for step in range(100):
        run.speculation.consumed(step, 0.5, is_decode=True)
    assert run.speculation.timeout_s == pytest.approx(1.0, rel=0.01)
    run, _, _ = lost_run(timeout_s=0.125)
    assert run.speculation.timeout_s == 0.125


def test_a_draft_that_verify_cannot_be_released_from_ends_the_epoch() -> None:
    run, draft, _ = lost_run()
    draft.done = FakeFence(is_releasable=False)
    draft.fail()
    draft_step = run.plan.step
    attachment = cast("DraftAttachment", draft)
    run.speculation._find(attachment).add(draft_step, brings_tokens=False)  # type: ignore[union-attr]
    with pytest.raises(UnavailableError, match="cannot be released"):
        run.speculation.check()


def test_a_draft_that_is_withdrawn_finishes_its_steps() -> None:
    run, draft, job = lost_run()
    run.speculation.withdraw(cast("DraftAttachment", draft), LossCause.LEFT)
    run.finish()
    assert run.listener.events[1:] == [("left", 2), ("let go", 2)]
    assert run.listener.causes == [LossCause.LEFT]
    assert draft.done.releases == []
    check(run, [job])


def test_another_draft_takes_over_from_one_step_to_the_next() -> None:
    run, _, job = lost_run()
    second = FakeDraft(3, 2)
    run.offer(second)
    run.finish()
    assert run.listener.events[1:] == [("left", 2), ("let go", 2), ("joined", 3)]
    assert run.listener.causes == [LossCause.SWAPPED]
    assert run.kinds.count(StepKind.PLAIN) == 1
    check(run, [job])


def test_the_draft_before_catches_up_again_if_the_other_is_lost_on_its_way_in() -> None:
    run, first, job = lost_run()
    second = FakeDraft(3, 2)
    run.offer(second)
    while run.kinds[-1] is not StepKind.PLAIN:
        run.turn()
    second.fail()
    run.finish()
    assert [event for event in run.listener.events if event[0] == "joined"] == [("joined", 2), ("joined", 2)]
    assert run.kinds[-1] is StepKind.DECODE
    assert first.kinds.count(StepKind.CATCH_UP) >= 1
    check(run, [job])
