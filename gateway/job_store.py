"""Jobs by owner and id: those that are alive, and a bounded number of those that ended not long ago."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from slipstream.gateway.job import Job


class JobStore:
    """Jobs by owner and id, in memory. Ended ones are bounded by age, number and bytes.

    An owner knows of no job of another: both may use the same id.
    """

    def __init__(
        self,
        *,
        capacity: int,
        ttl_s: float,
        max_bytes: int = 2**30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps `capacity` jobs at most after their end, each for `ttl_s` seconds of `clock`.

        Together they take `max_bytes` of memory at most; the one that ended first goes first.
        """
        self.on_forget: Callable[[Job], None] = lambda _: None
        """Called with each job that is not kept any longer."""
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._jobs: dict[tuple[str, str], Job] = {}
        self._ended: dict[Job, tuple[float, int]] = {}
        """When each of them is forgotten, and its bytes; the earliest first."""
        self._ended_bytes = 0

    def __len__(self) -> int:
        self._forget()
        return len(self._jobs)

    def jobs(self) -> Iterable[Job]:
        """All that are kept, the earliest first."""
        return self._jobs.values()

    def add(self, job: Job) -> None:
        """Adds a job that begins, in place of its owner's of the same id."""
        before = self._jobs.pop((job.owner, job.job_id), None)
        if before is not None:
            self._take_from_ended(before)
            if before is not job:
                self.on_forget(before)
        self._jobs[job.owner, job.job_id] = job

    def end(self, job: Job, ago_s: float = 0.0) -> None:
        """Starts the time after which a job that is over is forgotten; it ended `ago_s` before now."""
        if self._jobs.get((job.owner, job.job_id)) is not job:
            return
        self._take_from_ended(job)
        self._ended[job] = self._clock() - ago_s + self._ttl_s, job.num_bytes
        self._ended_bytes += job.num_bytes
        self._forget()

    def get(self, owner: str, job_id: str) -> Job | None:
        """The owner's job of this id; None if there is none, or no more."""
        self._forget()
        return self._jobs.get((owner, job_id))

    def latest(self, owner: str, count: int, before: int = 0) -> list[Job]:
        """The owner's latest jobs, at most `count`, with numbers below `before`, unless that is 0."""
        self._forget()
        earlier = (job for job in reversed(self._jobs.values()) if not before or job.number < before)
        return list(islice((job for job in earlier if job.owner == owner), count))

    def _forget(self) -> None:
        now = self._clock()
        while self._ended:
            job, (until, _) = next(iter(self._ended.items()))
            if len(self._ended) <= self._capacity and until > now and self._ended_bytes <= self._max_bytes:
                return
            self._take_from_ended(job)
            del self._jobs[job.owner, job.job_id]
            self.on_forget(job)

    def _take_from_ended(self, job: Job) -> None:
        _, num_bytes = self._ended.pop(job, (0.0, 0))
        self._ended_bytes -= num_bytes
