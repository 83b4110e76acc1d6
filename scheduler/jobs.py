"""A client's job: what it asks for, and what comes back for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.common.chunk import FinishReason
    from slipstream.common.errors import SlipstreamError
    from slipstream.common.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A checked request: everything in it can be honoured."""

    job_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    """Every token that ends the output: the request's own and, unless ignored, the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step brought a job. Made on the loop's thread, read on the event loop's."""

    token_ids: tuple[int, ...] = ()
    is_draft: tuple[bool, ...] = ()
    """For each token, whether the draft proposed it."""
    finish_reason: FinishReason | None = None
    error: SlipstreamError | None = None
    """Set when the job cannot go on; then it is over too."""

    @property
    def is_last(self) -> bool:
        """Whether the job is over."""
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True)
class JobCounts:
    """What a job took so far. Written by the loop's thread before the progress that it belongs to."""

    num_output_tokens: int = 0
    num_verify_steps: int = 0
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0
    admitted_at: float | None = None
    """Seconds of `time.monotonic`, like all times here."""
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verify step: 1 + accepted / steps; truncation at a stop is not counted."""
        return 1.0 + self.total_accepted_tokens / self.num_verify_steps if self.num_verify_steps else 1.0


@dataclass(slots=True, eq=False)
class Job:
    """A job on its way: the loop's thread delivers progress, the client's handler takes it.

    `deliver` and `take` run on the event loop; the loop's thread gets there with `call_soon_threadsafe`.
    """

    spec: JobSpec
    arrived_at: float = field(default_factory=time.monotonic)
    counts: JobCounts = field(default_factory=JobCounts)
    _pending: list[Progress] = field(default_factory=list)
    _has_progress: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, progress: Progress) -> None:
        """Adds progress; a client that reads slowly finds several steps' worth at once."""
        self._pending.append(progress)
        self._has_progress.set()

    async def take(self) -> list[Progress]:
        """Waits for progress and takes all there is, oldest first."""
        await self._has_progress.wait()
        self._has_progress.clear()
        taken, self._pending = self._pending, []
        return taken
