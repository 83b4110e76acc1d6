"""The homes of jobs: each job is kept by one of a server's gateways, which follows from the job's id."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Home:
    """One of a server's `count` gateways, counted from 0."""

    index: int = 0
    count: int = 1

    def new_job_id(self) -> str:
        """Draws the id of a job that is at home here."""
        while home_of(job_id := secrets.token_hex(16), self.count) != self.index:
            pass
        return job_id

    def numbers_after(self, last: int) -> Iterator[int]:
        """Yields a number for each new job: microseconds since 1970, growing. No other gateway gives the same."""
        while True:
            now = time.time_ns() // 1000
            last = max(now - now % self.count + self.index, last + self.count)
            yield last


ALONE = Home()
"""The only gateway of a server."""


def home_of(job_id: str, count: int) -> int:
    """Returns which of `count` gateways a job is at home at: the same in every process."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big") % count


def gateway_name(index: int) -> str:
    """Name of one of several gateways, of its log and of its socket."""
    return f"gateway-{index}"
