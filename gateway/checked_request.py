"""A client's request when everything in it was checked and can be honoured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.common.api.sampling import MAX_SEED

if TYPE_CHECKING:
    from slipstream.scheduler.core.sequence import SequenceSpec

SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: seeds that are near each other have samples whose seeds are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A job for the loop for each of its samples, and what the loop need not know."""

    job_id: str
    digest: bytes
    """Of the request as it came, before anything was drawn for it: the same request has the same."""
    samples: tuple[SequenceSpec, ...]
    stop: tuple[str, ...] = ()
    """Texts that end a sample."""
    min_new_tokens: int = 0
    """What is text with the first so many tokens completes no stop string."""


def samples_of(spec: SequenceSpec, n: int) -> tuple[SequenceSpec, ...]:
    """`n` jobs that differ in their seeds; the first is `spec` itself."""
    return tuple(
        replace(spec, sampling=replace(spec.sampling, seed=sample_seed(spec.sampling.seed, index)))
        for index in range(n)
    )


def sample_seed(seed: int, index: int) -> int:
    """The seed of a sample of a job: part of the contract with clients."""
    return (seed + index * SEED_STEP) & MAX_SEED
