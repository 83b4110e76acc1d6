"""What the loop's thread hands over, and when: on a clock of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slipstream.common.chunk import FinishReason
from slipstream.common.sampling import SamplingParams
from slipstream.scheduler.delivery import MESSAGE_S, DeliveryBox
from slipstream.scheduler.jobs import Job, JobSpec, Progress
from tests.scheduler.hand_clock import HandClockLoop

if TYPE_CHECKING:
    from slipstream.scheduler.delivery import Bundle

INTERVAL_S = 0.005


class Case:
    """A box, and the bundles that came out of it."""

    def __init__(self, loop: HandClockLoop) -> None:
        self.loop = loop
        self.bundles: list[Bundle] = []
        self.box = DeliveryBox(loop, INTERVAL_S, self.bundles.append)

    def put(self, *jobs: Job, finish_reason: FinishReason | None = None) -> None:
        """A step brings each a token."""
        for job in jobs:
            job.counts.num_output_tokens += 1
        number = jobs[0].counts.num_output_tokens
        self.box.put([(job, Progress(token_ids=(number,), finish_reason=finish_reason)) for job in jobs])
        self.loop.advance()

    def take(self) -> list[list[tuple[Job, tuple[int, ...]]]]:
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


def make_job(job_id: str = "job") -> Job:
    spec = JobSpec(job_id=job_id, prompt=(1,), max_new_tokens=99, sampling=SamplingParams(), stop_token_ids=frozenset())
    return Job(spec)


def started(case: Case, count: int) -> list[Job]:
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
    case.put(job)
    case.loop.advance(INTERVAL_S * 0.9)
    assert case.take() == []
    case.loop.advance(INTERVAL_S * 0.2)
    assert case.take() == [[(job, (3,)), (job, (4,))]]


def test_many_jobs_get_theirs_less_often(case: Case) -> None:
    jobs = started(case, 64)
    case.put(*jobs)
    assert len(case.take()[0]) == 64
    case.put(*jobs)
    case.loop.advance(64 * MESSAGE_S * 0.99)
    assert case.take() == []
    case.loop.advance(64 * MESSAGE_S * 0.02)
    assert len(case.take()[0]) == 64


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
    case.loop.advance(INTERVAL_S * 1.01)
    waiting = others if end is not None else [old, *others]
    assert case.take() == [[(job, (3,)) for job in waiting]]


def test_what_was_urgent_leaves_no_empty_turn(case: Case) -> None:
    (job,) = started(case, 1)
    case.put(job)
    case.put(job)
    case.put(job, finish_reason=FinishReason.LENGTH)
    case.loop.advance(INTERVAL_S * 1.01)
    assert case.take() == [[(job, (2,))], [(job, (3,)), (job, (4,))]]
    (other,) = started(case, 1)
    case.put(other)
    assert case.take() == [[(other, (2,))]]
