"""The histogram for many observations at once, against Prometheus' own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from slipstream.common.rpc.metrics import BulkHistogram

BUCKETS = (0.001, 0.5, 1.0, 20.0)
VALUES = st.one_of(st.sampled_from([0.0, *BUCKETS, 0.75, 1e6]), st.floats(0, 50))


@given(st.lists(st.tuples(VALUES, st.integers(0, 5)), max_size=20))
def test_it_is_what_prometheus_own_would_be(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("x_seconds", "Help.", BUCKETS, ours).labels()
    single = Histogram("x_seconds", "Help.", buckets=BUCKETS, registry=theirs)
    for value, count in observations:
        bulk.observe(value, count)
        for _ in range(count):
            single.observe(value)
    assert _without_sum(ours) == _without_sum(theirs)
    expected = sum(value * count for value, count in observations)
    found = ours.get_sample_value("x_seconds_sum")
    assert found is not None
    assert abs(found - expected) <= 1e-9 * max(1.0, expected)


def test_labels_are_apart_and_there_from_their_beginning() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("x_seconds", "Help.", BUCKETS, ours, ("first", "second"))
    own = Histogram("x_seconds", "Help.", ("first", "second"), buckets=BUCKETS, registry=theirs)
    assert _without_sum(ours) == _without_sum(theirs)
    for histogram in (bulk, own):
        histogram.labels(first="a", second="b").observe(0.75)
        histogram.labels(second="a", first="b")
        histogram.labels(second="b", first="a").observe(30)
    assert _without_sum(ours) == _without_sum(theirs)
    assert ours.get_sample_value("x_seconds_sum", {"first": "a", "second": "b"}) == 30.75


def _without_sum(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_sum" not in line and "_created" not in line]
