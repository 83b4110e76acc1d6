"""Tests which outputs the throttle hands over to the event loop, and when, on a clock that the test advances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.api.sampling import SamplingParams
from slipstream.common.api.sequence import SequenceOutput, SequenceSpec
from slipstream.gateway.throttle import MESSAGE_S, PATIENCE, OutputThrottle
from slipstream.scheduler.core.sequence import Sequence
from tests.harness.hand_clock import HandClockLoop

if TYPE_CHECKING:
    from random import Random

    from slipstream.gateway.throttle import Bundle

INTERVAL_S = 0.005


class Case:
    """A box, and the bundles that came out of it."""

    def __init__(self, loop: HandClockLoop) -> None:
        self.loop = loop
        self.bundles: list[Bundle] = []
        self.box = OutputThrottle(loop, INTERVAL_S, self.bundles.append, clock=loop.time)

    def put(self, *jobs: Sequence, finish_reason: FinishReason | None = None) -> None:
        """A step brings each a token."""
        for job in jobs:
            job.stats.num_output_tokens += 1
        self.box.put(
            [
                (job, SequenceOutput(token_ids=(job.stats.num_output_tokens,), finish_reason=finish_reason))
                for job in jobs
            ]
        )
        self.loop.advance()

    def take(self) -> list[list[tuple[Sequence, tuple[int, ...]]]]:
        """The bundles since the last time."""
        taken = [
            [(job, progress.token_ids) for job, steps in bundle.items() for progress in steps]
            for bundle in self.bundles
        ]
        self.bundles.clear()
        return taken


@pytest.fixture
def case() -> Any:
    """A box at rest."""
    loop = HandClockLoop()
    yield Case(loop)
    loop.close()


def make_job(job_id: str = "job") -> Sequence:
    spec = SequenceSpec(
        job_id=job_id, prompt=(1,), max_new_tokens=99, sampling=SamplingParams(), stop_token_ids=frozenset()
    )
    return Sequence(spec)


def started(case: Case, count: int) -> list[Sequence]:
    """Jobs whose first tokens are out, with nothing kept back."""
    jobs = [make_job(str(number)) for number in range(count)]
    case.put(*jobs)
    case.take()
    case.loop.advance(1.0)
    return jobs


def test_slow_steps_are_not_kept_back(case: Case) -> None:
    (job,) = started(case, 1)
    for number in (2, 3, 4):
        case.put(job)
        assert case.take() == [[(job, (number,))]]
        case.loop.advance(INTERVAL_S)


def test_fast_steps_come_in_bundles(case: Case) -> None:
    (job,) = started(case, 1)
    case.put(job)
    case.take()
    case.put(job)
    case.loop.advance(INTERVAL_S * 0.9)
    case.put(job)
    assert case.take() == []
    case.loop.advance(INTERVAL_S * 0.2)
    case.put(job)
    assert case.take() == [[(job, (3,)), (job, (4,)), (job, (5,))]]


def test_what_no_step_brings_along_comes_by_itself(case: Case) -> None:
    (job,) = started(case, 1)
    case.put(job)
    case.put(job)
    case.take()
    case.loop.advance(PATIENCE * INTERVAL_S * 0.9)
    assert case.take() == []
    case.loop.advance(PATIENCE * INTERVAL_S * 0.2)
    assert case.take() == [[(job, (3,))]]
    case.loop.advance(1.0)
    assert case.take() == [], "nor is there an empty turn"


def test_many_jobs_take_turns(case: Case) -> None:
    jobs, step_s = started(case, 64), 2.5 * MESSAGE_S
    case.put(*jobs)
    assert len(case.take()[0]) == 64, "nobody has had a message for long"
    told: list[Sequence] = []
    for number in range(1, 57):
        case.loop.advance(step_s)
        case.put(*jobs)
        bundles = case.take()
        assert sum(len({job for job, _ in bundle}) for bundle in bundles) <= 5, "no burst"
        told += [job for bundle in bundles for job in dict.fromkeys(job for job, _ in bundle)]
        assert len(told) <= number * step_s / MESSAGE_S
    assert told[:128] == [*jobs, *jobs], "one after the other"


@pytest.mark.parametrize("end", [None, FinishReason.LENGTH])
def test_first_tokens_and_ends_are_never_kept_back(case: Case, end: FinishReason | None) -> None:
    """Nor do they bring the others' along; what the job had waiting comes with it, in order."""
    old, *others = started(case, 5)
    case.put(old, *others)
    case.take()
    case.put(old, *others)
    assert case.take() == []
    if end is None:
        new = make_job("new")
        case.put(new)
        assert case.take() == [[(new, (1,))]]
    else:
        case.put(old, finish_reason=end)
        assert case.take() == [[(old, (3,)), (old, (4,))]]
    case.loop.advance(PATIENCE * INTERVAL_S * 1.01)
    waiting = others if end is not None else [old, *others]
    assert case.take() == [[(job, (3,)) for job in waiting]]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_everything_comes_once_and_in_order(random: Random) -> None:
    loop = HandClockLoop()
    case, jobs = Case(loop), [make_job(str(number)) for number in range(6)]
    for _ in range(40):
        some = [job for job in jobs if random.random() < 0.5]
        if some:
            case.put(*some)
        loop.advance(random.choice([0.0001, 0.001, 0.004, 0.02]))
    running = [job for job in jobs if job.stats.num_output_tokens]
    num_tokens = {job: job.stats.num_output_tokens for job in running}
    for job in running[:3]:
        case.put(job, finish_reason=FinishReason.LENGTH)
        num_tokens[job] += 1
    loop.advance(1.0)
    got: dict[Sequence, list[int]] = {}
    for bundle in case.take():
        for job, tokens in bundle:
            got.setdefault(job, []).extend(tokens)
    assert got == {job: list(range(1, count + 1)) for job, count in num_tokens.items()}
    assert set(case.box._sent_at) == set(running[3:]), "of jobs that are over nothing is kept"
    loop.close()
