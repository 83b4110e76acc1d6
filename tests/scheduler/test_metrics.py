"""The scheduler's metrics as Prometheus reads them: of steps, and of a real epoch over workers in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.wire.events import EventLog, Site
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.metrics import (
    DECODE,
    DRAFT_TO_VERIFY,
    DRAFTED,
    MIXED,
    PHASES,
    PREFILL,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    DraftMetrics,
    StepMetrics,
    StepTiming,
    time_step,
)
from slipstream.scheduler.server import ServerMetrics
from slipstream.scheduler.sizes import BatchCounts
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker, describe

LABELS = {"fence": "host", "mps": "off", "algorithm": "standalone"}
MS = 1_000_000
NS = 1_000_000_000
TO_DRAFT, TO_VERIFY = VERIFY_TO_DRAFT, DRAFT_TO_VERIFY
NO_BATCH: Any = SimpleNamespace(counts=BatchCounts())


class Measured:
    """Step metrics, and what is scraped of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = StepMetrics(self.registry)
        self.metrics.measure(**LABELS)
        self.log = EventLog()
        self.metrics.follow(NO_BATCH, self.log)

    def value(self, name: str, **labels: str) -> float | None:
        """The value of a sample; None if it is not there."""
        return self.registry.get_sample_value(f"slipstream_{name}", LABELS | labels)

    def drafting(self, name: str, **labels: str) -> float | None:
        """The same of a metric that has the algorithm as its only label for what it was measured with."""
        return self.registry.get_sample_value(f"slipstream_{name}", {"algorithm": "standalone"} | labels)

    def scrape(self) -> dict[tuple[str, str], float]:
        """The values of decode steps in one scrape, by name and by edge, service or phase."""
        return {
            (sample.name.removeprefix("slipstream_"), labels.get("edge") or labels.get("service") or labels["phase"]): (
                sample.value
            )
            for family in text_string_to_metric_families(generate_latest(self.registry).decode())
            for sample in family.samples
            if (labels := sample.labels).get("phase") == "decode"
        }


def drafts(*num_accepted: int, most: int = 3) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """The rows of a step, of which the last one does not speculate."""
    return np.array([*num_accepted, 0], np.uint32), np.array([most] * len(num_accepted) + [0], np.int32)


@pytest.fixture
def measured() -> Measured:
    """Nothing observed yet."""
    return Measured()


def test_a_decode_step_is_the_sum_of_its_parts(measured: Measured) -> None:
    bubbles = {VERIFY_TO_DRAFT: MS, DRAFT_TO_VERIFY: 2 * MS}
    timing = StepTiming(phase=DECODE, draft_ns=3 * MS, verify_ns=10 * MS, wall_ns=16 * MS, bubbles_ns=bubbles)
    measured.metrics.observe(lambda: timing)
    assert measured.value("step_seconds_sum", phase="decode") == pytest.approx(0.016)
    assert measured.value("busy_seconds_total", service="draft", phase="decode") == pytest.approx(0.003)
    assert measured.value("busy_seconds_total", service="verify", phase="decode") == pytest.approx(0.010)
    assert measured.value("bubble_seconds_total", edge=VERIFY_TO_DRAFT, phase="decode") == pytest.approx(0.001)
    assert measured.value("bubble_seconds_total", edge=DRAFT_TO_VERIFY, phase="decode") == pytest.approx(0.002)
    assert measured.value("overlap_efficiency") == pytest.approx(1 - 3 / 16)
    assert measured.value("step_seconds_count", phase="prefill") == 0


def test_phases_are_apart(measured: Measured) -> None:
    for phase in PHASES:
        bubbles = {VERIFY_TO_VERIFY: MS}
        measure = partial(StepTiming, phase=phase, draft_ns=0, verify_ns=MS, wall_ns=2 * MS, bubbles_ns=bubbles)
        measured.metrics.observe(measure)
    for phase in PHASES:
        assert measured.value("bubble_seconds_total", edge=VERIFY_TO_VERIFY, phase=phase) == pytest.approx(0.001)
        assert measured.value("step_seconds_count", phase=phase) == 1


def test_drafts_by_position(measured: Measured) -> None:
    measured.metrics.decoded(DRAFTED, *drafts())
    assert measured.drafting("accepted_tokens_per_position_total", position="1") is None
    measured.metrics.decoded(DRAFTED, *drafts(2, 0, 1))
    measured.metrics.decoded(DRAFTED, *drafts(1, most=2))
    assert measured.drafting("drafts_total") == 4
    assert measured.drafting("draft_tokens_total") == 11
    assert measured.drafting("accepted_tokens_total") == 4
    at = [measured.drafting("accepted_tokens_per_position_total", position=str(place)) for place in range(1, 5)]
    # No draft had a fourth token.
    assert at == [3, 1, 0, None]


@pytest.mark.parametrize(("num_steps", "tidied_after"), [(1, 0), (1, 1), (5, 3)])
def test_a_scrape_has_every_step_whenever_it_comes(measured: Measured, num_steps: int, tidied_after: int) -> None:
    timing = StepTiming(phase=DECODE, draft_ns=0, verify_ns=MS, wall_ns=MS, bubbles_ns={})
    for step in range(1, num_steps + 1):
        measured.metrics.observe(lambda: timing)
        measured.metrics.decoded(DRAFTED, *drafts(2, 0, 1))
        measured.log.stall(Site.WAIT, step, 1, 1 + NS // 2)
        if step == tidied_after:
            measured.metrics.tidy()
    for _ in range(2):
        assert measured.value("step_seconds_count", phase="decode") == num_steps
        assert measured.drafting("accepted_tokens_total") == 3 * num_steps
        assert measured.value("host_stall_seconds_total", service="scheduler", site="result") == 0.5 * num_steps


def test_the_next_epoch_goes_on_from_all_steps_of_the_last_one(measured: Measured) -> None:
    measured.metrics.decoded(DRAFTED, *drafts(1, most=2))
    measured.metrics.measure(fence="host", mps="off", algorithm="lookup")
    measured.metrics.decoded(DRAFTED, *drafts(1, most=2))
    measured.metrics.measure(**LABELS)
    measured.metrics.decoded(DRAFTED, *drafts(1, most=2))
    assert measured.drafting("drafts_total") == 2
    assert measured.drafting("drafts_total", algorithm="lookup") == 1


def test_stalls_add_up(measured: Measured) -> None:
    measured.log.stall(Site.WAIT, 1, 0, NS // 4)
    measured.log.stall(Site.WAIT, 2, 0, NS // 2)
    measured.log.add(Site.IDLE, 2, 0, NS)
    assert measured.value("host_stall_seconds_total", service="scheduler", site="result") == 0.75
    measured.metrics.follow(NO_BATCH, EventLog())
    assert measured.value("host_stall_seconds_total", service="scheduler", site="result") == 0.75


def test_a_scrape_is_a_snapshot(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is counted while a scrape is under way is in none of its metrics: the next scrape has it in all."""
    bubbles = {VERIFY_TO_DRAFT: MS, DRAFT_TO_VERIFY: 2 * MS}
    timing = StepTiming(phase=DECODE, draft_ns=3 * MS, verify_ns=10 * MS, wall_ns=16 * MS, bubbles_ns=bubbles)
    counting = threading.Thread(target=measured.metrics.observe, args=(lambda: timing,))
    busy_seconds = measured.metrics._busy_seconds
    collect = busy_seconds.collect

    def count_and_collect() -> Iterable[Metric]:
        """Called in the middle of the first scrape."""
        if counting.ident is None:
            counting.start()
            counting.join(timeout=0.2)
        return collect()

    measured.metrics.observe(lambda: timing)
    monkeypatch.setattr(busy_seconds, "collect", count_and_collect)
    per_step = {
        ("step_seconds_count", "decode"): 1,
        ("step_seconds_sum", "decode"): 0.016,
        ("busy_seconds_total", "draft"): 0.003,
        ("busy_seconds_total", "verify"): 0.010,
        ("bubble_seconds_total", VERIFY_TO_DRAFT): 0.001,
        ("bubble_seconds_total", DRAFT_TO_VERIFY): 0.002,
    }
    for num_steps in (1, 2):
        scraped = measured.scrape()
        counts = {key: scraped[key] / value for key, value in per_step.items()}
        assert counts == pytest.approx(dict.fromkeys(per_step, num_steps))
        counting.join()


def test_the_loop_does_not_wait_for_a_scrape(measured: Measured) -> None:
    """It tidies up when a scrape is under way, which has the lock for longer than a step may take."""
    timing = StepTiming(phase=DECODE, draft_ns=0, verify_ns=MS, wall_ns=MS, bubbles_ns={})
    counted: list[int] = []
    for _ in range(3):
        measured.metrics.observe(lambda: counted.append(1) or timing)
    tidying = threading.Thread(target=measured.metrics.tidy)
    with measured.metrics.lock:
        tidying.start()
        tidying.join(timeout=10)
        assert not tidying.is_alive()
        assert not counted
    measured.metrics.tidy()
    assert len(counted) == 3


def test_what_happens_in_a_batch_is_counted_across_epochs(measured: Measured) -> None:
    batch: Any = SimpleNamespace(counts=BatchCounts(1, 2, prefix_query_tokens=30, prefix_hit_tokens=20))
    measured.metrics.follow(batch, EventLog())
    assert measured.registry.get_sample_value("slipstream_preemptions_total") == 2
    batch.counts = BatchCounts(1, 3, prefix_query_tokens=30, prefix_hit_tokens=20)
    measured.metrics.follow(SimpleNamespace(counts=BatchCounts(preemptions=1)), EventLog())  # type: ignore[arg-type]
    found = [
        measured.registry.get_sample_value(f"slipstream_{name}_total")
        for name in ("sequences_not_finite", "preemptions", "prefix_cache_query_tokens", "prefix_cache_hit_tokens")
    ]
    assert found == [1, 4, 30, 20]


@pytest.mark.parametrize(
    ("phase", "before", "verify", "decoded", "prefilled", "bubbles", "wall_ns", "draft_ns"),
    [
        pytest.param(
            DECODE, (100, 100), (130, 180), (107, 120), None, {TO_DRAFT: 7, TO_VERIFY: 10}, 80, 13, id="drafted"
        ),
        pytest.param(DECODE, (100, 100), (111, 150), None, None, {VERIFY_TO_VERIFY: 11}, 50, 0, id="plain"),
        pytest.param(DECODE, None, (130, 180), (107, 120), None, {}, None, 13, id="after an idle time"),
        # Draft is not on the path of the step: verify starts late only because of the host.
        pytest.param(PREFILL, (100, 100), (104, 150), None, (101, 190), {VERIFY_TO_VERIFY: 4}, 50, 89, id="prefill"),
        # Verify was done at 150, draft not until 190. The next step starts right after draft.
        pytest.param(
            DECODE, (150, 190), (205, 240), (192, 204), None, {TO_DRAFT: 2, TO_VERIFY: 1}, 90, 12, id="draft was late"
        ),
        pytest.param(PREFILL, (100, 140), (110, 150), None, (141, 190), {VERIFY_TO_VERIFY: 0}, 50, 49, id="overlap"),
        # Verify was done at 125, with the chunks of the step before. Draft had drafted by then.
        pytest.param(MIXED, (125, 125), (128, 150), (102, 120), None, {TO_DRAFT: 0, TO_VERIFY: 3}, 25, 18, id="mixed"),
        pytest.param(
            MIXED, (100, 100), (122, 150), (105, 120), (151, 160), {TO_DRAFT: 5, TO_VERIFY: 2}, 50, 24, id="both parts"
        ),
        # Stamps that make no sense make no bubble longer than the step.
        pytest.param(
            DECODE, (100, 100), (130, 140), (135, 10), None, {TO_DRAFT: 35, TO_VERIFY: 5}, 40, 0, id="hostile"
        ),
    ],
)
def test_a_step_is_taken_apart(
    phase: str,
    before: tuple[int, int] | None,
    verify: tuple[int, int],
    decoded: tuple[int, int] | None,
    prefilled: tuple[int, int] | None,
    bubbles: dict[str, int],
    wall_ns: int | None,
    draft_ns: int,
) -> None:
    """`before`: verify's end, and the last end of both workers."""
    timing = time_step(phase, before, verify, decoded, prefilled, is_drafted=decoded is not None)
    assert timing == StepTiming(phase, draft_ns, verify[1] - verify[0], bubbles, wall_ns)


def test_a_step_without_draft_tokens_waits_for_draft_only_before_it_samples() -> None:
    timing = time_step(DECODE, (100, 100), verify=(111, 150), decoded=(105, 120))
    assert (timing.draft_ns, timing.bubbles_ns) == (15, {VERIFY_TO_VERIFY: 11})


CONFIG = SchedulerConfig(
    verify="unix:/none", run_ahead=2, fixed_draft_tokens=3, slots=5, context_tokens=64, page_tokens=16
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
    monkeypatch.setattr("slipstream.scheduler.metrics.time", SimpleNamespace(monotonic=lambda: now[0]))
    drafts = DraftMetrics(registry)
    drafts.set_missing(is_missing=True)
    for now_s, seconds in ((15.0, 5.0), (17.0, 7.0)):
        now[0] = now_s
        assert scraped(registry, "slipstream_draft_missing_seconds_total") == seconds
    drafts.set_missing(is_missing=False)
    now[0] = 30.0
    assert scraped(registry, "slipstream_draft_missing_seconds_total") == 7.0


def test_a_draft_that_joins_while_metrics_are_scraped_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, now = CollectorRegistry(), [10.0]
    monkeypatch.setattr("slipstream.scheduler.metrics.time", SimpleNamespace(monotonic=lambda: now[0]))
    drafts = DraftMetrics(registry)
    drafts.set_missing(is_missing=True)
    lock = drafts._lock

    class JoinsBefore:
        """The lock, which the session's thread takes before the scraper's."""

        def __enter__(self) -> None:
            drafts._lock = lock
            drafts.set_missing(is_missing=False)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    drafts._lock = JoinsBefore()  # type: ignore[assignment]
    for now_s in (15.0, 30.0):
        now[0] = now_s
        assert scraped(registry, "slipstream_draft_missing_seconds_total") == 5.0
