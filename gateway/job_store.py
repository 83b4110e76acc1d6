"""The jobs that a client may ask after: those that wait or run, and those that ended not long ago."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from slipstream.common.api.job_info import JobPage
from slipstream.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.gateway.job import Job

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


class JobStore:
    """Jobs by their ids, in memory. The queue and the slots bound those that are alive, this class the others."""

    def __init__(self, *, capacity: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Keeps `capacity` jobs at most after their end, each for `ttl_s` seconds of `clock`."""
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._ended: deque[tuple[float, Job]] = deque()

    def add(self, job: Job) -> None:
        """Adds a job that begins, in place of one of its name."""
        self._jobs.pop(job.job_id, None)
        self._jobs[job.job_id] = job

    def end(self, job: Job) -> None:
        """Says that a job is over: its time begins to run."""
        self._ended.append((self._clock() + self._ttl_s, job))
        self._forget()

    def get(self, job_id: str) -> Job | None:
        """The job of this name; None if there is none (any more)."""
        self._forget()
        return self._jobs.get(job_id)

    def page(self, size: int, token: str) -> JobPage:
        """The next jobs, the latest first. Raises InvalidArgumentError for a size or a token that cannot be."""
        if not 0 <= size <= MAX_PAGE_SIZE:
            raise InvalidArgumentError("page_size", size, f"0 to {MAX_PAGE_SIZE}")
        if token and not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InvalidArgumentError("page_token", token, "next_page_token of an answer, or nothing")
        self._forget()
        size = size or DEFAULT_PAGE_SIZE
        # Numbers only grow, so jobs that come or go between two calls move no other to another page.
        before = int(token) if token else None
        found: list[Job] = []
        for job in reversed(self._jobs.values()):
            if before is not None and job.number >= before:
                continue
            if len(found) == size:
                return JobPage(jobs=tuple(job.info() for job in found), next_page_token=str(found[-1].number))
            found.append(job)
        return JobPage(jobs=tuple(job.info() for job in found))

    def __len__(self) -> int:
        self._forget()
        return len(self._jobs)

    def _forget(self) -> None:
        now = self._clock()
        while self._ended and (len(self._ended) > self._capacity or self._ended[0][0] <= now):
            _, job = self._ended.popleft()
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id]
