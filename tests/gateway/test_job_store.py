"""How long jobs are kept after their end: by age, number and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from slipstream.gateway.job import JobStore

BYTES = 1000
TTL_S = 60.0


@dataclass(frozen=True, eq=False)
class Ended:
    """What the store looks at of a job."""

    job_id: str
    number: int
    num_bytes: int = BYTES
    owner: str = ""


class Kept:
    """A store on a clock of the test's own, with what it forgets."""

    def __init__(self, **bounds: Any) -> None:
        self.now = 0.0
        self.forgotten: list[int] = []
        self.store = JobStore(**{"capacity": 100, "ttl_s": TTL_S, "clock": lambda: self.now, **bounds})
        self.store.on_forget = lambda job: self.forgotten.append(job.number)

    def add(self, number: int, name: str = "", *, is_over: bool = True) -> Any:
        """Adds a job, which ends now if it `is_over`."""
        job: Any = Ended(name or f"job-{number}", number)
        self.store.add(job)
        if is_over:
            self.store.end(job)
        return job

    @property
    def numbers(self) -> list[int]:
        """The jobs that are kept."""
        assert len(self.store) == len(list(self.store.jobs()))
        return [job.number for job in self.store.jobs()]


@pytest.mark.parametrize("bounds", [{"capacity": 3}, {"max_bytes": 3 * BYTES + 1}])
def test_the_job_that_ended_first_goes_first(bounds: dict[str, int]) -> None:
    kept = Kept(**bounds)
    running = kept.add(0, is_over=False)
    for number in range(1, 6):
        kept.add(number)
    assert (kept.numbers, kept.forgotten) == ([0, 3, 4, 5], [1, 2])
    kept.store.end(running)
    assert (kept.numbers, kept.forgotten) == ([0, 4, 5], [1, 2, 3])


def test_age_counts_from_the_end() -> None:
    kept = Kept()
    kept.add(1)
    kept.now = 40.0
    kept.add(2)
    kept.add(3, is_over=False)
    kept.now = 60.0
    assert kept.numbers == [2, 3]
    kept.now = 99.0
    assert kept.numbers == [2, 3]
    kept.now = 100.0
    assert (kept.numbers, kept.forgotten) == ([3], [1, 2])


def test_a_job_that_goes_on_or_is_replaced_no_longer_counts() -> None:
    kept = Kept(max_bytes=2 * BYTES)
    again = kept.add(1)
    kept.store.add(again)
    kept.add(2, "name")
    kept.add(3, "name")
    assert kept.forgotten == [2]
    kept.add(4)
    assert (kept.numbers, kept.forgotten) == ([1, 3, 4], [2])
    # The one before it has the name no more: its end is of no interest.
    kept.now = 2 * TTL_S
    assert (kept.numbers, kept.forgotten) == ([1], [2, 3, 4])
