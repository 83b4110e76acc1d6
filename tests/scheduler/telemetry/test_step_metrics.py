"""The step metrics as Prometheus reads them."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.scheduler.core.batch_sizes import BatchCounts
from slipstream.scheduler.telemetry.step_metrics import (
    DECODE,
    DRAFT_TO_VERIFY,
    PHASES,
    RESULT,
    VERIFY_TO_DRAFT,
    VERIFY_TO_VERIFY,
    StepMetrics,
    StepTiming,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from prometheus_client import Metric

LABELS = {"fence": "host", "mps": "off", "algorithm": "standalone"}
MS = 1_000_000


class Measured:
    """Step metrics, and what is scraped of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = StepMetrics(self.registry)
        self.metrics.measure(**LABELS)

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


def drafts(*num_accepted: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """The rows of a step, of which the last one does not speculate."""
    return np.array([*num_accepted, 0], np.uint32), np.array([True] * len(num_accepted) + [False])


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
    measured.metrics.drafted(*drafts(), 3)
    assert measured.drafting("accepted_tokens_per_position_total", position="1") is None
    measured.metrics.drafted(*drafts(2, 0, 1), 3)
    assert measured.drafting("drafts_total") == 3
    assert measured.drafting("draft_tokens_total") == 9
    assert measured.drafting("accepted_tokens_total") == 3
    at = [measured.drafting("accepted_tokens_per_position_total", position=str(place)) for place in range(1, 5)]
    # No draft had a fourth token.
    assert at == [2, 1, 0, None]


@pytest.mark.parametrize(("num_steps", "tidied_after"), [(1, 0), (1, 1), (5, 3)])
def test_a_scrape_has_every_step_whenever_it_comes(measured: Measured, num_steps: int, tidied_after: int) -> None:
    timing = StepTiming(phase=DECODE, draft_ns=0, verify_ns=MS, wall_ns=MS, bubbles_ns={})
    for step in range(1, num_steps + 1):
        measured.metrics.observe(lambda: timing)
        measured.metrics.drafted(*drafts(2, 0, 1), 3)
        measured.metrics.host_stalled(RESULT, 0.5)
        if step == tidied_after:
            measured.metrics.tidy()
    for _ in range(2):
        assert measured.value("step_seconds_count", phase="decode") == num_steps
        assert measured.drafting("accepted_tokens_total") == 3 * num_steps
        assert measured.value("host_stall_seconds_total", service="scheduler", site=RESULT) == 0.5 * num_steps


def test_the_next_epoch_goes_on_from_all_steps_of_the_last_one(measured: Measured) -> None:
    measured.metrics.drafted(*drafts(1), 2)
    measured.metrics.measure(fence="host", mps="off", algorithm="lookup")
    measured.metrics.drafted(*drafts(1), 2)
    measured.metrics.measure(**LABELS)
    measured.metrics.drafted(*drafts(1), 2)
    assert measured.drafting("drafts_total") == 2
    assert measured.drafting("drafts_total", algorithm="lookup") == 1


def test_stalls_add_up(measured: Measured) -> None:
    measured.metrics.host_stalled(RESULT, 0.25)
    measured.metrics.host_stalled(RESULT, 0.5)
    assert measured.value("host_stall_seconds_total", service="scheduler", site=RESULT) == 0.75


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
    measured.metrics.count_batch(batch)
    assert measured.registry.get_sample_value("slipstream_preemptions_total") == 2
    batch.counts = BatchCounts(1, 3, prefix_query_tokens=30, prefix_hit_tokens=20)
    measured.metrics.count_batch(SimpleNamespace(counts=BatchCounts(preemptions=1)))  # type: ignore[arg-type]
    found = [
        measured.registry.get_sample_value(f"slipstream_{name}_total")
        for name in ("sequences_not_finite", "preemptions", "prefix_cache_query_tokens", "prefix_cache_hit_tokens")
    ]
    assert found == [1, 4, 30, 20]
