"""The numbers of one interval: what two readings of a server say of the time between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cli.quantiles import quantile
from slipstream.cli.step_times import StepTimes
from slipstream.common.worker.step import Role
from slipstream.gateway.request_metrics import (
    FIRST_TOKEN,
    GENERATION_TOKENS,
    INTER_TOKEN,
    OUTCOMES,
    PROMPT_TOKENS,
    REQUESTS,
)
from slipstream.scheduler.telemetry.server_metrics import KV_PAGE_BYTES, KV_PAGES, KV_PAGES_USED
from slipstream.scheduler.telemetry.step_metrics import (
    ACCEPTED_PER_POSITION,
    ACCEPTED_TOKENS,
    BUBBLE_SECONDS,
    BUSY_SECONDS,
    DRAFTS,
    STEP_SECONDS,
)
from slipstream.scheduler.telemetry.timings import DRAFT_TO_VERIFY, VERIFY_TO_DRAFT, VERIFY_TO_VERIFY

if TYPE_CHECKING:
    from slipstream.cli.server_status import ServerStatus
    from slipstream.common.rpc.metrics import MetricSpec
    from slipstream.common.rpc.scrape import Scrape

DECODE = "decode"
DRAFT, VERIFY = Role.DRAFT.value, Role.VERIFY.value
PARTS = (VERIFY_TO_DRAFT, DRAFT, DRAFT_TO_VERIFY, VERIFY, VERIFY_TO_VERIFY)
"""What a decode step consists of, in the order of time."""
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A server at one moment."""

    at_s: float
    """On a clock that never goes back."""
    status: ServerStatus
    metrics: Scrape | None
    """Of the scheduler; None when they cannot be read."""
    why_no_metrics: str = ""

    def is_same_process(self, earlier: Reading) -> bool:
        """Whether both are of one scheduler process, so that their counters can be subtracted."""
        if self._pids() != earlier._pids():
            return False
        # In containers the next process can have the same id.
        both = [metrics.total(_STARTED) for metrics in (self.metrics, earlier.metrics) if metrics is not None]
        return len(set(both)) <= 1

    def _pids(self) -> list[int]:
        return [service.pid for service in self.status.state.services if service.name == "scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Of the steps of the interval; None where there were none."""

    overlap_efficiency: float | None
    """1 - bubble / wall, of steps of all phases."""
    decode_per_s: float
    prefill_per_s: float
    decode_step_s: float | None
    """Mean time from the end of one decode step to the end of the next."""
    decode_parts_s: dict[str, float]
    """Seconds of each of PARTS in a mean decode step; empty when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNumbers:
    """Of the drafts that were checked in the interval."""

    mean_accept_length: float | None
    """Tokens that a step brings a request: 1 and the accepted ones; None when nothing was drafted."""
    accepted_at: dict[str, float]
    """Share of the drafts whose token was accepted, by position, from "1" on; empty when nothing was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds; None when nothing was observed in the interval."""

    p50_s: float | None
    p90_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNumbers:
    """What clients got in the interval."""

    finished_per_s: dict[str, float]
    """By outcome."""
    tokens_per_s: float
    prompt_tokens_per_s: float
    first_token: Latency
    inter_token: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """The KV pool of one service, now."""

    service: str
    pages: int
    used_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalNumbers:
    """Rates and means of the time between two readings of one process."""

    seconds: float
    steps: StepNumbers
    drafts: DraftNumbers
    requests: RequestNumbers

    @classmethod
    def between(cls, earlier: Reading | None, later: Reading) -> IntervalNumbers | None:
        """None when there is nothing to subtract: the first reading, no metrics, or another process."""
        if earlier is None or earlier.metrics is None or later.metrics is None or not later.is_same_process(earlier):
            return None
        added, seconds = later.metrics.since(earlier.metrics), later.at_s - earlier.at_s
        return cls(seconds=seconds, steps=_steps(added, seconds), drafts=_drafts(added), requests=_ends(added, seconds))


def finished(metrics: Scrape) -> dict[str, int]:
    """Requests that ended since the scheduler's start, by outcome."""
    return {outcome: int(metrics.total(REQUESTS.name, outcome=outcome)) for outcome in OUTCOMES}


def kv_pools(metrics: Scrape) -> list[KvPool]:
    """The pools that there are."""
    return [
        KvPool(
            service=service,
            pages=int(pages),
            used_pages=int(metrics.total(KV_PAGES_USED.name, service=service)),
            page_bytes=int(metrics.total(KV_PAGE_BYTES.name, service=service)),
        )
        for service, pages in metrics.by("service", KV_PAGES.name).items()
    ]


def _steps(added: Scrape, seconds: float) -> StepNumbers:
    times = StepTimes.of(added)
    num_decode = added.total(f"{STEP_SECONDS.name}_count", phase=DECODE)
    wall_s = added.total(f"{STEP_SECONDS.name}_sum", phase=DECODE)
    return StepNumbers(
        overlap_efficiency=None if math.isnan(times.overlap_efficiency) else times.overlap_efficiency,
        decode_per_s=num_decode / seconds,
        prefill_per_s=(times.num_steps - num_decode) / seconds,
        decode_step_s=wall_s / num_decode if num_decode else None,
        decode_parts_s={part: _decode_s(added, part) / num_decode for part in PARTS} if num_decode else {},
    )


def _decode_s(added: Scrape, part: str) -> float:
    if part in (DRAFT, VERIFY):
        return added.total(BUSY_SECONDS.name, phase=DECODE, service=part)
    return added.total(BUBBLE_SECONDS.name, phase=DECODE, edge=part)


def _drafts(added: Scrape) -> DraftNumbers:
    num_drafts = added.total(DRAFTS.name)
    if not num_drafts:
        return DraftNumbers(mean_accept_length=None, accepted_at={})
    positions = added.by("position", ACCEPTED_PER_POSITION.name)
    return DraftNumbers(
        mean_accept_length=1 + added.total(ACCEPTED_TOKENS.name) / num_drafts,
        accepted_at={position: positions[position] / num_drafts for position in sorted(positions, key=int)},
    )


def _ends(added: Scrape, seconds: float) -> RequestNumbers:
    return RequestNumbers(
        finished_per_s={outcome: added.total(REQUESTS.name, outcome=outcome) / seconds for outcome in OUTCOMES},
        tokens_per_s=added.total(GENERATION_TOKENS.name) / seconds,
        prompt_tokens_per_s=added.total(PROMPT_TOKENS.name) / seconds,
        first_token=_latency(added, FIRST_TOKEN),
        inter_token=_latency(added, INTER_TOKEN),
    )


def _latency(added: Scrape, histogram: MetricSpec) -> Latency:
    buckets = added.by("le", f"{histogram.name}_bucket")
    return Latency(p50_s=quantile(0.5, buckets), p90_s=quantile(0.9, buckets))
