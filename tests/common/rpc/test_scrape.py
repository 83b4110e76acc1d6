"""Tests of readings of a real metrics endpoint, and of the differences between two readings."""

from __future__ import annotations

import pytest

from slipstream.common.rpc.metrics import Scrape, counter, histogram, make_registry, scrape, serve_metrics
from tests.harness.grpc_server import unserved_address

OUTCOMES = counter("ends_total", "Ends.", "outcome", "phase")
TIMES = histogram("times_seconds", "Times.", buckets=(0.5, 1.0))


@pytest.mark.timeout(20)
async def test_differences_by_label_over_a_real_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    registry = make_registry()
    ends, times = OUTCOMES.counter(registry), TIMES.histogram(registry)
    ends.labels("stop", "decode").inc(5)
    with serve_metrics(registry, 0) as port:
        before = await scrape(port)
        for outcome, phase, count in (("stop", "decode", 2), ("stop", "prefill", 4), ("abort", "decode", 8)):
            ends.labels(outcome, phase).inc(count)
        times.observe(0.7)
        added = (await scrape(port)).since(before)
    assert added.total(OUTCOMES.name) == 14
    assert added.total(OUTCOMES.name, phase="decode") == 10
    assert added.by("outcome", OUTCOMES.name) == {"stop": 6, "abort": 8}
    assert added.by("outcome", OUTCOMES.name, phase="decode") == {"stop": 2, "abort": 8}
    assert added.by("le", "times_seconds_bucket") == {"0.5": 0, "1.0": 1, "+Inf": 1}
    assert added.by("le", "no_such_bucket") == {}


async def test_a_port_without_a_server() -> None:
    with unserved_address() as address, pytest.raises(OSError, match="refused"):
        await scrape(int(address.rpartition(":")[2]))


def test_a_page_that_is_no_scrape() -> None:
    with pytest.raises(ValueError, match="name"):
        Scrape.read("<html>not here</html>")
