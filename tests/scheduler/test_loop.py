"""The loop with dummy kernels on real streams, when a worker is slow, hangs or is lost, and when it stops."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from prometheus_client import generate_latest

from slipstream.benchmarks import dummy_model
from slipstream.common.device.cpu.fence import HostFence
from slipstream.common.errors import DeadlineExceededError, UnavailableError
from slipstream.common.wire.layout import ring_rows
from slipstream.common.wire.step import FenceName, StepCommand
from slipstream.scheduler import loop
from slipstream.scheduler.draft import Draft
from slipstream.scheduler.metrics import DECODE
from slipstream.scheduler.observer import TIDY_STEPS
from slipstream.scheduler.records import StepOutcome
from slipstream.scheduler.results import ResultReader
from slipstream.scheduler.speculation import FIRST_STEP_TIMEOUT_S
from tests.harness.counted_jobs import Job
from tests.harness.dummy_epoch import make_epoch, make_job, workers
from tests.harness.leaks import nothing_left
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import VOCAB_SIZE


def metric(epoch: LocalEpoch, line_start: str) -> float:
    """The value of the one metric whose line begins so."""
    lines = generate_latest(epoch.registry).decode().splitlines()
    (value,) = (float(line.split()[-1]) for line in lines if line.startswith(line_start))
    return value


def test_a_verify_that_hangs_is_noticed_by_the_time_that_a_step_may_take() -> None:
    go_on = threading.Event()
    with workers() as both:
        epoch = make_epoch(both, step_timeout_s=0.3)
        job = make_job()
        epoch.jobs.add(job)
        steps = epoch.open()
        both[0].stream.enqueue(lambda: go_on.wait() and None)
        with pytest.raises(
            DeadlineExceededError,
            match=r"^step 1 did not end within \d\.\d s: the verify service hangs \(.*_PUBLISH is 0\)$",
        ):
            steps.run()
        go_on.set()
        assert epoch.epoch.batch.num_running == 1
        epoch.close(drain=False)


def test_all_steps_draft_the_fixed_number_of_tokens_whatever_requests_allow() -> None:
    """There are graphs for no other number then."""
    told = set[int]()

    def record(command: StepCommand) -> StepCommand:
        told.update(command.num_draft_tokens)
        return command

    with workers(before_draft=record, takes_even_steps=True) as both:
        make_epoch(both, fixed_draft_tokens=4).run([make_job(max_draft_tokens=2)])
    assert told == {4}


def test_steps_that_wait_for_draft_ask_for_its_progress_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each look is a copy from the device, on the thread that decides the steps."""
    looks: list[int] = []
    look = Draft.look
    monkeypatch.setattr(Draft, "look", lambda draft: (looks.append(draft.last_step), look(draft))[1])
    monkeypatch.setattr(loop, "WATCH_S", 20.0)  # no result of a busy machine is late
    with workers() as both:
        epoch = make_epoch(both, draft_timeout_ms=20_000.0)
        job = make_job(max_new_tokens=200)
        epoch.run([job])
        num_steps = epoch.epoch.batch.last_step
        assert num_steps > 60
        assert len(looks) < num_steps / 4, "only a result that is late is a reason to look"


def test_what_waits_to_be_counted_and_written_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scrape, and though nobody asks for the tokens."""
    waiting: list[int] = []
    with workers() as both:
        epoch = make_epoch(both, draft_timeout_ms=20_000.0)
        metrics, committed = epoch.metrics, epoch.epoch.batch.committed
        add, lengths = committed.append, epoch.epoch.batch.accounts.lengths

        def append(taken_in: StepOutcome) -> None:
            add(taken_in)
            waiting.append(max(map(len, (metrics._timings, metrics._decoded, committed._unwritten, lengths._ended))))

        monkeypatch.setattr(committed, "append", append)
        epoch.run([make_job(max_new_tokens=200)])
    assert len(waiting) > 2 * TIDY_STEPS
    assert TIDY_STEPS <= max(waiting) <= TIDY_STEPS + 1


def test_the_first_step_of_a_draft_may_be_acknowledged_later_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    with workers() as both:
        epoch = make_epoch(both, dispatch="acknowledged", draft_timeout_ms=1000.0)
        monkeypatch.setattr(
            both[1], "wait_for_acknowledgement", lambda _, timeout_s: (given.append(timeout_s), True)[1]
        )
        epoch.run([make_job(max_new_tokens=40)])
        first, last = 1.0 + 4 * 1.0 + FIRST_STEP_TIMEOUT_S, 1.0 + 4 * 1.0
        assert (given[0], given[-1]) == (first, last)
        assert sorted(set(given)) == [last, first]


def test_a_draft_that_does_not_acknowledge_a_step_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where verify could not be released from it: verify was not sent the step that waits for it."""
    monkeypatch.setattr(HostFence, "is_releasable", False)
    with workers() as both:
        epoch, job = make_epoch(both, dispatch="acknowledged"), make_job(max_new_tokens=40)

        def acknowledges(step: int, _: float) -> bool:
            if step == 10:
                both[1].stream.synchronize(5.0)  # verify may still wait for the step before
            return step < 10

        monkeypatch.setattr(both[1], "wait_for_acknowledgement", acknowledges)
        assert len(epoch.run([job])[job]) == 40
        assert [what for what, _ in epoch.events] == ["joined", "timeout", "gone"]


def test_the_end_of_an_epoch_releases_a_worker_that_does_not_do_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may be held up by the very stream that waits."""
    go_on = threading.Event()
    with workers() as both:
        epoch = make_epoch(both, step_timeout_s=0.3, draft_timeout_ms=60_000.0)
        job = make_job()
        epoch.jobs.add(job)
        steps = epoch.open()
        both[1].stream.enqueue(lambda: go_on.wait() and None)
        with pytest.raises(DeadlineExceededError):
            steps.run()
        with pytest.raises(DeadlineExceededError, match="verify"):
            both[0].stream.synchronize(0.05)
        monkeypatch.setattr(both[0], "detach", lambda drain: None)
        monkeypatch.setattr(both[1], "detach", lambda drain: None)
        epoch.close(drain=False)
        both[0].stream.synchronize(5.0)
        go_on.set()


@pytest.mark.parametrize("prompt_tokens", [4, 100], ids=["in a decode step", "in a prefill"])
def test_a_draft_that_hangs_costs_no_more_than_the_watchdogs_time(prompt_tokens: int) -> None:
    """Verify needs nothing of draft for a prompt: there the bound on draft's backlog stops the loop."""
    go_on = threading.Event()
    with workers() as both:
        expected = make_epoch(both).run([make_job(prompt_tokens)])
        for worker in both:
            worker.engine.last_epoch = 0
        epoch = make_epoch(both, max_batched_tokens=2, draft_timeout_ms=100.0)
        job = make_job(prompt_tokens)
        epoch.jobs.add(job)
        epoch.on_progress = lambda job, row: epoch.queue.stop() if job in epoch.jobs.ends else None
        steps = epoch.open()
        both[1].stream.enqueue(lambda: go_on.wait() and None)
        started = time.monotonic()
        steps.run()
        steps.finish()
        assert 0.1 <= time.monotonic() - started < 20.0, "not the time that a step may take"
        assert list(expected.values()) == [epoch.outputs[job]]
        assert [event for event, _ in epoch.events] == ["joined", "timeout", "gone"]
        go_on.set()
        epoch.close(drain=True)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_slow_draft_is_never_a_whole_ring_behind(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft stands still until verify is as far ahead as it may be."""
    behind: list[int] = []
    go_on = threading.Event()

    def look(command: StepCommand) -> StepCommand:
        if command.chunks and not command.slots:
            behind.append(command.step - epoch.attachments[0].fences[FenceName.DRAFT_PREFILLED].poll())
        return command

    def wait_for_draft(up_to: int) -> Any:
        if (found := backlog(up_to)) is not None:
            go_on.set()
        return found

    with workers(before_draft=look) as both:
        epoch = make_epoch(both, max_batched_tokens=2, run_ahead=run_ahead, draft_timeout_ms=20_000.0)
        backlog = epoch.epoch.speculation.backlog
        monkeypatch.setattr(epoch.epoch.speculation, "backlog", wait_for_draft)
        epoch.on_open = lambda: both[1].stream.enqueue(lambda: go_on.wait() and None)
        epoch.run([make_job(prompt_tokens=60)])
        assert max(behind) == ring_rows(run_ahead), "verify ran ahead of draft as far as it may"
        assert (
            metric(
                epoch,
                'slipstream_host_stall_seconds_total{algorithm="standalone",fence="host",mps="off",ser'
                'vice="scheduler",site="draft_backlog"}',
            )
            > 0
        )


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_lost_verify_ends_the_loop(is_idle: bool) -> None:
    with workers() as both:
        epoch = make_epoch(both)
        failure = UnavailableError("the verify service is lost")

        def lose(*_: object) -> None:
            both[0].failure = failure

        steps = epoch.open()
        if is_idle:
            lose()
        else:
            epoch.on_progress = lose
            job = make_job(max_new_tokens=100)
            epoch.jobs.add(job)
        with pytest.raises(UnavailableError, match="verify service is lost") as raised:
            steps.run()
        assert raised.value is not failure, "an error that is kept must not keep the loop's frames"
        assert failure.__traceback__ is None
        epoch.close(drain=False)


def test_a_lost_draft_ends_no_sequence() -> None:
    with workers() as both:
        expected = make_epoch(both).run([make_job(max_new_tokens=100)], [make_job()])
        for worker in both:
            worker.engine.last_epoch = 0
        epoch = make_epoch(both)

        def lose(job: Job, _: object) -> None:
            if len(epoch.outputs[job]) > 20:
                both[1].failure = UnavailableError("the draft service is lost")

        epoch.on_progress = lose
        assert list(epoch.run([make_job(max_new_tokens=100)], [make_job()]).values()) == list(expected.values())
        assert [event for event, _ in epoch.events] == ["joined", "died", "gone"]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_draft_that_comes_while_sequences_run_catches_up_and_drafts(run_ahead: int) -> None:
    """The dummies guess right where they know what was before, so that acceptance says whether they do."""
    with workers() as both:
        whole = make_epoch(both, run_ahead=run_ahead)
        expected = whole.run([make_job(prompt_tokens=90, max_new_tokens=120) for _ in range(3)])
        for worker in both:
            worker.engine.last_epoch = 0
        epoch = make_epoch(both[:1], run_ahead=run_ahead)  # type: ignore[arg-type]

        def come(job: Job, _: object) -> None:
            if len(epoch.outputs[job]) > 20 and not epoch.attachments:
                epoch.epoch.speculation.offer(epoch.attach(both[1]))  # type: ignore[arg-type]
            if not epoch.events:
                both[1].stream.synchronize(20.0)  # or all sequences may end before it has caught up

        epoch.on_progress = come
        outputs = epoch.run([make_job(prompt_tokens=90, max_new_tokens=120) for _ in range(3)])
        assert list(outputs.values()) == list(expected.values())
        assert [event for event, _ in epoch.events] == ["joined"]
        assert metric(epoch, 'slipstream_drafts_total{algorithm="standalone"}') > 20


def test_stops_while_it_is_busy_and_takes_in_what_is_under_way() -> None:
    with workers(verify_ms=1.0) as both:
        epoch = make_epoch(both, run_ahead=2)
        job = make_job(max_new_tokens=200)
        epoch.jobs.add(job)
        epoch.on_progress = lambda job, progress: epoch.queue.stop() if len(epoch.outputs[job]) > 20 else None
        with epoch.loop() as steps:
            steps.run()
            num_before = len(epoch.outputs[job])
            steps.finish()
            assert len(epoch.outputs[job]) > num_before, "the steps that were under way"
            assert job not in epoch.jobs.ends
        assert all(worker.engine.epoch is None for worker in both)


def test_an_epoch_leaves_nothing() -> None:
    with workers() as both:
        make_epoch(both).run([make_job()])
        for worker in both:
            worker.engine.last_epoch = 0
        with nothing_left():
            make_epoch(both).run([make_job(), make_job(), make_job()], [make_job()])


def test_drafts_of_requests_that_are_over_are_not_counted() -> None:
    """Steps that ran ahead of a request's end were work, but say nothing of how well the draft guesses."""
    with workers() as both:
        epoch = make_epoch(both, run_ahead=2, slots=1, fixed_draft_tokens=2)
        jobs = [make_job(max_new_tokens=9, max_draft_tokens=most) for most in (None, 0, None, 1, None)]
        epoch.run(*([job] for job in jobs))
        assert len({tuple(epoch.outputs[job]) for job in jobs}) == 1
        counts = [job.stats for job in jobs]
        drafts = metric(epoch, 'slipstream_drafts_total{algorithm="standalone"}')
        assert drafts == sum(count.num_verify_steps for count in counts)
        accepted = metric(epoch, 'slipstream_accepted_tokens_total{algorithm="standalone"}')
        assert accepted == sum(count.total_accepted_tokens for count in counts) > 0
        proposed = metric(epoch, 'slipstream_draft_tokens_total{algorithm="standalone"}')
        assert proposed == sum(count.total_draft_tokens for count in counts)
        assert proposed == sum(job.stats.num_verify_steps * (job.spec.max_draft_tokens or 2) for job in jobs)
        first = 'slipstream_accepted_tokens_per_position_total{algorithm="standalone",position="1"}'
        second = 'slipstream_accepted_tokens_per_position_total{algorithm="standalone",position="2"}'
        assert metric(epoch, first) + metric(epoch, second) == accepted
        assert metric(epoch, first) >= metric(epoch, second)


def test_time_is_counted_where_it_went() -> None:
    """Busy times and bubbles of a run add up to its wall time, and the busy times are those of the dummy kernels."""
    with workers(draft_ms=1.0, verify_ms=3.0) as both:
        epoch = make_epoch(both, run_ahead=1, slots=1, fixed_draft_tokens=2)
        epoch.run([make_job(max_new_tokens=61)])
        timings = [timing for timing in epoch.metrics.timings if timing.wall_ns is not None]
        assert len(timings) >= 20
        # Behind the prefill, draft may still be at the prompt when verify's step begins to count.
        for timing in timings[1:]:
            assert timing.phase == DECODE
            assert timing.wall_ns is not None
            parts = timing.draft_ns + timing.verify_ns + sum(timing.bubbles_ns.values())
            assert parts == timing.wall_ns
            assert timing.draft_ns >= 1e6
            assert timing.verify_ns >= 3e6
        efficiency = metric(epoch, 'slipstream_overlap_efficiency{algorithm="standalone"')
        walls = sum(timing.wall_ns or 0 for timing in timings)
        bubbles = sum(sum(timing.bubbles_ns.values()) for timing in timings)
        assert efficiency == pytest.approx(1 - bubbles / walls)


def test_a_draft_that_is_always_wrong_rests_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed = dummy_model._guessed
    monkeypatch.setattr(dummy_model, "_guessed", lambda *args: (guessed(*args) + 1) % VOCAB_SIZE)
    jobs = [make_job(prompt_tokens=20, max_new_tokens=230) for _ in range(3)]
    with workers(draft_ms=8.0, verify_ms=1.0) as both:
        expected = make_epoch(both[:1]).run(jobs)  # type: ignore[arg-type]
        both[0].engine.last_epoch = 0
        epoch = make_epoch(both, fixed_draft_tokens=None, draft_timeout_ms=20_000.0)
        again = [make_job(prompt_tokens=20, max_new_tokens=230) for _ in range(3)]
        outputs = epoch.run(again)
        assert [outputs[job] for job in again] == [expected[job] for job in jobs]
        assert [event for event, _ in epoch.events] == ["joined"], "it is attached all the time"
    resting = metric(epoch, 'slipstream_decode_steps_total{mode="resting"}')
    assert resting > metric(epoch, 'slipstream_decode_steps_total{mode="drafted"}') > 0
    assert metric(epoch, 'slipstream_draft_rests_total{cause="slower"}') > 0


@pytest.mark.parametrize("debug", [False, True])
def test_debug_has_results_looked_at(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify then marks what no step has published."""
    asked: list[bool] = []

    class Reader(ResultReader):
        def __init__(self, *args: Any, is_debug: bool) -> None:
            asked.append(is_debug)
            super().__init__(*args, is_debug=is_debug)

    monkeypatch.setattr("slipstream.scheduler.epoch.ResultReader", Reader)
    with workers() as both, make_epoch(both[:1], debug=debug).loop():
        assert asked == [debug]
