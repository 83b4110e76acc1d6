"""The batch against a simulated device: whatever runs ahead, is cut into chunks or is cancelled, every job gets its
own tokens, each once, and gives back what it took."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.errors import InternalError, PendingLengthError
from slipstream.common.wire.job import FinishReason, TokenLogprobs
from slipstream.common.wire.sequence import StepOutput
from slipstream.common.wire.step import FenceOps
from slipstream.scheduler.records import NO_DRAFT, DraftKV
from slipstream.scheduler.sizes import BatchSizes
from tests.harness.counted_jobs import Job
from tests.harness.sampling import examples
from tests.harness.simulated_run import Run, make_job, reference, result_of, token_of
from tests.harness.step_kinds import Kind, kind_of_step

SIZES = st.builds(
    BatchSizes,
    num_slots=st.integers(2, 5),
    num_pages=st.just(0),
    page_tokens=st.integers(1, 9),
    chunk_tokens=st.integers(1, 12),
    mixes=st.sampled_from((True, True, False)),
    has_prefix_cache=st.sampled_from((True, True, False)),
    num_draft_tokens=st.integers(0, 4),
    run_ahead=st.integers(0, 2),
)
JOBS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), min_size=1, max_size=30).map(tuple),
        st.integers(1, 25),
        st.booleans(),
        st.sampled_from([None, None, 0, 1, 3, 7]),
        st.sampled_from([0, 0, 1, 5, 20]),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def sizes_that_hold(draw: st.DrawFn) -> BatchSizes:
    """Sizes with room for one request of the longest kind at least."""
    sizes = draw(SIZES)
    most = sizes.pages_for(30 + 25)
    return replace(sizes, num_pages=draw(st.integers(most + 1, 3 * most + 1)))


@settings(max_examples=examples(150))
@given(
    sizes=sizes_that_hold(),
    jobs=JOBS,
    random=st.randoms(use_true_random=False),
    cancel_rate=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_every_job_gets_its_own_tokens(
    sizes: BatchSizes,
    jobs: list[tuple[tuple[int, ...], int, bool, int | None, int, int]],
    random: Random,
    cancel_rate: float,
) -> None:
    run = Run(sizes, random)
    made = [
        make_job(
            str(number),
            prompt,
            most,
            stops=stops,
            max_draft_tokens=max_draft_tokens,
            output=output_of(prompt, most, stops=stops, length=had),
            priority=priority,
        )
        for number, (prompt, most, stops, max_draft_tokens, had, priority) in enumerate(jobs)
    ]
    to_submit, cancelled = deque(made), set[Job]()
    turns = 0
    while run.turn() or to_submit or len(run.queue):
        turns += 1
        assert turns < 5000, "the batch makes no progress"
        if to_submit and (random.random() < 0.4 or turns % 50 == 0):
            run.jobs.add(to_submit.popleft())
        if random.random() < cancel_rate and len(to_submit) < len(made):
            job = made[random.randrange(len(made) - len(to_submit))]
            run.jobs.cancel(job)
            cancelled.add(job)
    for job in made:
        expected, reason = reference(job)
        expected = expected[job.num_brought :]
        output = run.jobs.outputs.get(job, [])
        if run.jobs.ends[job] is FinishReason.ABORT:
            assert job in cancelled
            assert output == expected[: len(output)]
        else:
            assert (output, run.jobs.ends[job]) == (expected, reason)
        assert sum(job.stats.accepted_per_position) == job.stats.total_accepted_tokens
        bound = sizes.num_draft_tokens if job.spec.max_draft_tokens is None else job.spec.max_draft_tokens
        assert job.stats.total_draft_tokens == job.stats.num_verify_steps * min(bound, sizes.num_draft_tokens)
        assert job.stats.total_accepted_tokens <= job.stats.num_verify_steps * bound
    assert len(run.num_accepted) == sum(job.stats.num_verify_steps for job in made)
    assert sum(run.num_accepted) == sum(job.stats.total_accepted_tokens for job in made)
    for position in range(sizes.num_draft_tokens):
        counted = sum(sum(job.stats.accepted_per_position[position : position + 1]) for job in made)
        assert sum(accepted > position for accepted in run.num_accepted) == counted
    most = sum(len(job.spec.prompt) for job in made) if sizes.has_prefix_cache else 0
    assert run.batch.counts.prefix_hit_tokens <= run.batch.counts.prefix_query_tokens <= most
    assert run.batch.num_running == 0
    assert run.batch.pages.num_free == sizes.num_pages - 1
    assert run.batch.slots.num_free == sizes.num_slots - 1


def output_of(prompt: tuple[int, ...], most: int, *, stops: bool, length: int) -> tuple[int, ...]:
    """The first tokens of a job's output, without its end."""
    tokens, _ = reference(make_job("", prompt, most, stops=stops))
    return tuple(tokens[: min(length, len(tokens) - 1)])


SMALL = BatchSizes(num_slots=3, num_pages=20, page_tokens=8, chunk_tokens=8, num_draft_tokens=2, run_ahead=1)


class FullAcceptance:
    """In place of a random generator: every draft token is accepted."""

    def randint(self, low: int, high: int) -> int:
        """The most."""
        return high


def run_of(sizes: BatchSizes = SMALL) -> Run:
    """A run without jobs, in which every draft token is accepted."""
    return Run(sizes, FullAcceptance())  # type: ignore[arg-type]


def test_workers_are_told_of_a_request_with_the_first_chunk_of_its_prompt() -> None:
    """Not before: a command says no more than its chunks have room for, however many requests there are."""
    sizes = BatchSizes(num_slots=5, num_pages=40, page_tokens=8, chunk_tokens=8, num_draft_tokens=2, run_ahead=1)
    run, told = run_of(sizes), list[tuple[tuple[int, ...], list[tuple[int, int]]]]()
    jobs = [make_job(name, (number,) * 6, 1) for number, name in enumerate("abcde")]
    *_, cancelled, last = jobs
    run.jobs.add(*jobs)
    while run.turn():
        if run.device.last_step > len(told):
            step, _ = run.in_flight[-1]
            slots = (*step.decoded.slots, *(chunk.slot for chunk in step.chunks))
            told.append((slots, [(update.slot, update.generation) for update in step.updates]))
        if len(told) == 1:
            # It has the slot that the last waits for, and nobody was told.
            run.jobs.cancel(cancelled)
    assert told == [((1, 2), [(1, 1), (2, 1)]), ((2, 3), [(3, 1)]), ((3, 4), [(4, 3)])]
    assert run.jobs.ends == dict.fromkeys(jobs, FinishReason.LENGTH) | {cancelled: FinishReason.ABORT}
    assert run.jobs.outputs[last] == reference(last)[0]


def test_a_job_that_is_sure_to_end_with_what_is_under_way_takes_part_in_no_more_steps() -> None:
    """Two tokens: the prompt's end and one decode step bring them for sure."""
    run = run_of()
    job = make_job("short", (1, 2), 2)
    run.jobs.add(job)
    while run.turn():
        pass
    assert run.device.last_step == 2
    assert job.stats.num_verify_steps == 1


def test_the_result_of_a_finished_request_is_dropped_though_another_has_its_slot() -> None:
    sizes = BatchSizes(num_slots=2, num_pages=9, page_tokens=8, chunk_tokens=8, num_draft_tokens=2, run_ahead=2)
    run = run_of(sizes)
    first, second = make_job("first", (1,), 20), make_job("second", (2,), 5)
    run.jobs.add(first)
    for _ in range(4):
        run.turn()
    run.jobs.add(second)
    run.jobs.cancel(first)
    while run.turn():
        pass
    assert run.jobs.ends == {first: FinishReason.ABORT, second: FinishReason.LENGTH}
    assert run.jobs.outputs[second] == reference(second)[0]
    # Both had slot 1: the only one.
    assert run.batch.slots.num_free == 1


def test_a_jobs_counts_are_those_of_its_own_steps() -> None:
    run = run_of()
    job = make_job("job", (1, 2, 3), 7)
    run.jobs.add(job)
    while run.turn():
        pass
    # 1 token from the prompt, 3 of each decode step.
    assert job.stats.num_verify_steps == 2
    assert job.stats.total_draft_tokens == 4
    assert job.stats.total_accepted_tokens == 4
    assert job.stats.accepted_per_position == [2, 2]
    assert job.stats.mean_accept_length == 3.0


def test_requests_that_do_not_speculate_are_decoded_along_and_plainly_when_nobody_does() -> None:
    sizes = BatchSizes(num_slots=4, num_pages=40, page_tokens=8, chunk_tokens=64, num_draft_tokens=3, run_ahead=1)
    run, kinds = run_of(sizes), []
    off = make_job("off", (1,), 12, max_draft_tokens=0)
    one = make_job("one", (2,), 5, max_draft_tokens=1)
    full = make_job("all", (3,), 5, max_draft_tokens=9)
    for job in (off, one, full):
        run.jobs.add(job)
    while run.turn():
        if run.in_flight and (not kinds or kinds[-1] is not kind_of_step(run.in_flight[-1][0])):
            kinds.append(kind_of_step(run.in_flight[-1][0]))
    assert kinds == [Kind.PREFILL, Kind.DECODE, Kind.PLAIN]
    for job in (off, one, full):
        assert run.jobs.outputs[job] == reference(job)[0]
    counts = [(job.stats.num_verify_steps, job.stats.total_draft_tokens) for job in (off, one, full)]
    assert counts == [(0, 0), (2, 2), (1, 3)]
    assert [job.stats.accepted_per_position for job in (off, one, full)] == [[], [2], [1, 1, 1]]
    assert off.stats.mean_accept_length == 1.0


def test_logprobs_end_where_the_output_does() -> None:
    run = run_of()
    asked = make_job("asked", (1,), 5, top_logprobs=2)
    other = make_job("other", (2,), 5)
    run.jobs.add(other, asked)
    run.batch.admit(run.queue)
    while (step := run.batch.next_step(run.batch.sizes.num_draft_tokens)) is not None:
        assert step.command(FenceOps(), epoch=1).top_logprobs == 2
        assert step.top_logprobs == {step.yielding.slots.index(2): 2}
        result = run.device.run(step)
        likely = {
            at: tuple(TokenLogprobs(-float(token)) for token in result.tokens[at, : result.num_accepted[at] + 1])
            for at in step.top_logprobs
        }
        run.apply(step, result._replace(logprobs=likely))
    assert [-logprob.logprob for logprob in run.jobs.logprobs[asked]] == reference(asked)[0]
    plain = make_job("plain", (3,), 1)
    run.jobs.add(plain)
    run.batch.admit(run.queue)
    step = run.batch.next_step(run.batch.sizes.num_draft_tokens)
    assert step is not None
    assert (step.top_logprobs, step.command(FenceOps(), epoch=1).top_logprobs) == ({}, None)


@pytest.mark.parametrize("num_stops", [1, 8, 9, 40])
def test_the_first_of_any_number_of_stop_tokens_ends_the_output(num_stops: int) -> None:
    run = run_of()
    tokens = [token_of((1,), index) for index in range(20)]
    first = next(index for index in range(4, 20) if tokens[index] not in tokens[:index])
    stops = frozenset({tokens[first], *range(1000, 1000 + num_stops - 1)})
    job, other = make_job("stops", (1,), 20), make_job("goes on", (1,), 20)
    job.spec = replace(job.spec, stop_token_ids=stops)
    run.jobs.add(job, other)
    while run.turn():
        pass
    assert run.jobs.outputs[job] == tokens[: first + 1]
    assert run.jobs.ends == {job: FinishReason.STOP, other: FinishReason.LENGTH}


def test_a_stop_behind_the_limit_does_not_count() -> None:
    """Both are in the tokens of one step."""
    run = run_of()
    job = make_job("job", (1,), 3)
    job.spec = replace(job.spec, stop_token_ids=frozenset({token_of((1,), 3)}))
    assert token_of((1,), 3) not in [token_of((1,), index) for index in range(3)]
    run.jobs.add(job)
    while run.turn():
        pass
    assert (len(run.jobs.outputs[job]), run.jobs.ends[job]) == (3, FinishReason.LENGTH)


def test_a_step_goes_out_as_one_message_for_each_stream() -> None:
    run = run_of()
    jobs = [make_job(name, (number,), 3) for number, name in enumerate("ab", start=1)]
    for stream, job in enumerate(jobs):
        job.stream = stream
    run.jobs.add(*jobs)
    run.batch.admit(run.queue)
    step = run.batch.next_step(run.batch.sizes.num_draft_tokens)
    assert step is not None
    run.batch.apply(step, run.device.run(step), published_ns=77)
    one, other = run.batch.take_output().deliveries()
    for (stream, packed, refusals), job in ((one, jobs[0]), (other, jobs[1])):
        assert (stream, refusals) == (job.stream, ())
        assert packed is not None
        output = StepOutput.from_pb(packed.to_pb())
        assert output.published_ns == 77
        assert (output.sequences, output.admitted) == ([job.id], [job.id])
        assert output.tokens == reference(job)[0][:1]
    assert not list(run.batch.take_output().deliveries())


def test_an_admission_is_told_before_there_are_tokens() -> None:
    run = run_of()
    job = make_job("job", (1,), 3)
    run.jobs.add(job)
    run.batch.admit(run.queue)
    [(_, output, _)] = run.batch.take_output().deliveries()
    assert output is not None
    assert (output.admitted, output.published_ns > 0) == ([job.id], True)


def test_a_cancel_that_comes_too_late_changes_nothing() -> None:
    run = run_of()
    running, waiting = make_job("running", (1,), 20), make_job("waiting", (2,), 5)
    run.jobs.add(running)
    run.turn()
    run.batch.cancel([running, running])
    run.take()
    assert run.jobs.ends == {running: FinishReason.ABORT}
    run.jobs.add(waiting)
    run.batch.cancel([running])
    assert not list(run.batch.take_output().deliveries())


def test_a_result_that_no_step_was_to_bring_is_an_error() -> None:
    run = run_of()
    run.jobs.add(make_job("job", (1,), 5))
    run.batch.admit(run.queue)
    step = run.batch.next_step(run.batch.sizes.num_draft_tokens)
    assert step is not None
    run.apply(step, run.device.run(step))
    with pytest.raises(PendingLengthError, match="no step was to change"):
        run.batch.apply(step, result_of([[1]], 3))


@pytest.mark.parametrize("num_steps", [3, 20])
def test_pages_of_a_sequence_whose_logits_are_not_finite_are_not_shared(num_steps: int) -> None:
    """The prompt takes 3 steps."""
    run = run_of()
    job = make_job("job", tuple(range(20)), 60)
    run.jobs.add(job)
    run.batch.admit(run.queue)
    for number in range(1, num_steps + 1):
        step = run.batch.next_step(0)
        assert step is not None
        run.apply(step, run.device.run(step)._replace(not_finite=(0,) if number == num_steps else ()))
    assert isinstance(run.jobs.refused[job], InternalError)
    assert len(run.jobs.outputs[job]) == num_steps - 3
    assert (run.batch.counts.not_finite, run.batch.num_running) == (1, 0)
    assert (run.batch.pages.num_cached, run.batch.pages.num_free) == (0, run.batch.pages.num_pages)


@pytest.mark.parametrize(
    ("draft", "of_prompt", "of_all"),
    [
        (NO_DRAFT, [7, 15, 19], 29),
        (DraftKV(1), [7, 15, 19], 26),
        (DraftKV(1, tokens_ahead=1), [7, 15, 19], 26),
        (DraftKV(1, tokens_ahead=3), [5, 13, 17], 24),
    ],
)
def test_a_page_is_kept_when_what_a_draft_writes_to_it_is_whole(
    draft: DraftKV, of_prompt: list[int], of_all: int
) -> None:
    """With pages of one token, 20 in the prompt and 10 in the output: those kept after each chunk, and at the end."""
    run, num_draft_tokens = run_of(replace(SMALL, num_pages=100, page_tokens=1)), 2 if draft.attachment else 0
    job, num_cached = make_job("job", tuple(range(20)), 10), list[int]()
    run.jobs.add(job)
    run.batch.admit(run.queue)
    while (step := run.batch.next_step(num_draft_tokens, draft=draft)) is not None:
        if step.chunks:
            num_cached.append(run.batch.pages.num_cached)
        run.apply(step, run.device.run(step))
    assert (num_cached, run.batch.pages.num_cached) == (of_prompt, of_all)
