"""A scheduler's epoch over workers with dummy kernels, and jobs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role, StepCommand
from slipstream.scheduler.config import SchedulerConfig
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker, describe


def make_job(prompt_tokens: int = 4, max_new_tokens: int = 8, max_draft_tokens: int | None = None) -> Job:
    """A greedy job."""
    spec = SequenceSpec(
        job_id="job",
        prompt=tuple(range(prompt_tokens)),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        max_draft_tokens=max_draft_tokens,
    )
    return Job(spec)


@contextmanager
def workers(
    *,
    draft_ms: float = 0.0,
    verify_ms: float = 0.0,
    before_draft: Callable[[StepCommand], StepCommand] | None = None,
    **traits: object,
) -> Iterator[tuple[LocalWorker, LocalWorker]]:
    """Dummies for verify and draft. `traits`: of both, see `WorkerDescription`."""
    both = (
        LocalWorker(DummyVerify(describe(Role.VERIFY, **traits), verify_ms)),
        LocalWorker(DummyDraft(describe(Role.DRAFT, **traits), draft_ms), before_send=before_draft),
    )
    yield both
    for worker in both:
        worker.close()


def make_epoch(both: tuple[LocalWorker, LocalWorker], **changes: object) -> LocalEpoch:
    """An epoch with run-ahead 1."""
    settings: dict[str, object] = {"context_tokens": 256, "slots": 4, "fixed_draft_tokens": 2, **changes}
    return LocalEpoch(1, SchedulerConfig(verify="unix:/none", **settings), both)  # type: ignore[arg-type]
