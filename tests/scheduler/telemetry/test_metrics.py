"""The server's metrics, of a real epoch over workers in this process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.telemetry.metrics import DraftMetrics, ServerMetrics
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker, describe

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CONFIG = SchedulerConfig(
    verify="unix:/none", run_ahead=2, num_draft_tokens=3, slots=5, context_tokens=64, page_tokens=16
)


def scraped(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """A sample's value, None if there is no such sample."""
    return registry.get_sample_value(name, labels)


def test_before_the_first_epoch_there_is_nothing_to_say() -> None:
    registry = CollectorRegistry()
    ServerMetrics(registry, epoch=lambda: None)
    assert generate_latest(registry) == b""


@contextmanager
def epoch_with(number: int = 1, *, draft_kv_bytes: int) -> Iterator[LocalEpoch]:
    """Dummies, described as if verify had 64 bytes of KV a token and draft this many."""
    draft = LocalWorker(DummyDraft(describe(Role.DRAFT), 0))
    verify = LocalWorker(DummyVerify(describe(Role.VERIFY), 0))
    for worker, kv_bytes in ((verify, 64), (draft, draft_kv_bytes)):
        worker.engine.description = replace(worker.engine.description, kv_bytes_per_token=kv_bytes)
    running = LocalEpoch(number, CONFIG, [draft, verify])
    yield running
    draft.close()
    verify.close()


def registry_of(running: LocalEpoch) -> CollectorRegistry:
    """With the metrics of this epoch and nothing else."""
    registry = CollectorRegistry()
    ServerMetrics(registry, epoch=lambda: running.epoch)
    return registry


def test_sizes_pages_and_what_runs() -> None:
    spec = SequenceSpec(
        job_id="job", prompt=(1, 2, 3), max_new_tokens=9, sampling=SamplingParams(), stop_token_ids=frozenset()
    )
    draft: set[tuple[float | None, ...]] = set()
    names = [f"slipstream_kv_{name}" for name in ("page_bytes", "pages", "pages_used")]
    with epoch_with(3, draft_kv_bytes=8) as running:
        registry = registry_of(running)
        num_pages = running.epoch.batch.pages.num_pages
        running.on_progress = lambda _job, row: (
            None
            if row.finish_reason is not None
            else draft.add(tuple(scraped(registry, name, service="draft") for name in names))
        )
        running.run([Job(spec)])
        # 3 + 9 tokens in pages of 16.
        assert draft == {(8 * 16, num_pages, 1)}
        assert [scraped(registry, name, service="verify") for name in names] == [64 * 16, num_pages, 0]
        assert [scraped(registry, name, service="draft") for name in names] == [None] * 3, "it has left by now"
        sizes = ("epoch", "run_ahead", "num_draft_tokens", "slots")
        values = [scraped(registry, f"slipstream_{size}") for size in sizes]
        assert values == [3, 2, 0, 5], "K is 0 while nothing drafts"
        text = generate_latest(registry).decode()
    assert 'algorithm="standalone",device="cpu",fence="host",model="a-verify",mps="off",service="scheduler"' in text


def test_a_drafter_without_a_kv_cache_has_no_pool() -> None:
    with epoch_with(draft_kv_bytes=0) as running:
        registry = registry_of(running)
        assert scraped(registry, "slipstream_kv_pages", service="verify") == running.epoch.batch.pages.num_pages
        assert scraped(registry, "slipstream_kv_pages", service="draft") is None


def test_a_scrape_has_the_time_without_a_draft_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, now = CollectorRegistry(), [10.0]
    monkeypatch.setattr("slipstream.scheduler.telemetry.metrics.time", SimpleNamespace(monotonic=lambda: now[0]))
    drafts = DraftMetrics(registry)
    drafts.set_missing(is_missing=True)
    for now_s, seconds in ((15.0, 5.0), (17.0, 7.0)):
        now[0] = now_s
        assert scraped(registry, "slipstream_draft_missing_seconds_total") == seconds
    drafts.set_missing(is_missing=False)
    now[0] = 30.0
    assert scraped(registry, "slipstream_draft_missing_seconds_total") == 7.0
