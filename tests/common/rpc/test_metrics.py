"""The Prometheus endpoint, over HTTP, and its reader."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from slipstream.common.errors import AddressInUseError, ConfigError
from slipstream.common.rpc import metrics
from slipstream.common.rpc.metrics import (
    LINES_IN_A_TURN,
    PAUSE_S,
    PageInTurns,
    RpcMetrics,
    Scrape,
    counter,
    histogram,
    make_registry,
    scrape,
    serve_metrics,
)
from tests.harness.grpc_server import unserved_address
from tests.harness.waiting import block_until

BOUNDS = (0.001, 0.5, 1.0, 20.0)


def page(port: int) -> str:
    """Returns the text of the metrics endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text: bytes = response.read()
    return text.decode()


def test_counts_are_served() -> None:
    registry = make_registry()
    RpcMetrics(registry).count("/a.B/C", "OK")
    with serve_metrics(registry, 0) as port:
        text = page(port)
    assert 'slipstream_rpcs_total{code="OK",method="a.B/C"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text


def test_no_port_no_endpoint() -> None:
    threads = set(threading.enumerate())
    with serve_metrics(make_registry(), None) as port:
        assert port == 0
        assert set(threading.enumerate()) <= threads


def test_it_is_not_served_to_other_hosts() -> None:
    with serve_metrics(make_registry(), 0) as port:
        sockets = psutil.Process().net_connections("tcp")
        assert {one.laddr.ip for one in sockets if one.laddr.port == port} == {"127.0.0.1"}


def test_it_is_served_at_the_address_that_is_asked_for() -> None:
    with serve_metrics(make_registry(), 0, "0.0.0.0") as port, socket.create_connection(("127.0.0.2", port)):
        pass
    with (
        pytest.raises(ConfigError, match=r"metrics_host: got 'nowhere\.invalid'"),
        serve_metrics(make_registry(), 0, "nowhere.invalid"),
    ):
        pass


def test_a_port_in_use_is_refused() -> None:
    with serve_metrics(make_registry(), 0) as port, pytest.raises(AddressInUseError) as caught:
        serve_metrics(make_registry(), port).__enter__()
    assert caught.value.field == "metrics_port"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="metrics_port"), serve_metrics(make_registry(), port):
        pass


def test_nothing_is_left_behind_even_with_open_connections() -> None:
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    with serve_metrics(make_registry(), 0) as port:
        page(port)
        idle = socket.create_connection(("127.0.0.1", port))
        page(port)
    # The endpoint has hung up, although nothing was asked.
    assert idle.recv(1) == b""
    idle.close()
    # Some of earlier tests may end meanwhile, and the threads of the connections a moment later.
    block_until(lambda: set(os.listdir("/proc/self/fd")) <= descriptors and set(threading.enumerate()) <= threads)


def test_a_slow_scraper_holds_up_no_end_and_too_many_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # As one that sends a byte now and then.
    monkeypatch.setattr("slipstream.common.rpc.metrics._Handler.timeout", 1000.0)
    monkeypatch.setattr("slipstream.common.rpc.metrics.MOST_CONNECTIONS", 1)
    with serve_metrics(make_registry(), 0) as port:
        slow = socket.create_connection(("127.0.0.1", port))
        with pytest.raises(OSError, match=r"closed|reset|disconnected"):
            page(port)
    assert slow.recv(1) == b""
    slow.close()


def test_scrapes_at_the_same_time() -> None:
    registry = make_registry()
    both = threading.Barrier(2)
    Gauge("both", "Waits for the other.", registry=registry).set_function(lambda: both.wait(timeout=10) * 0 + 1)
    with serve_metrics(registry, 0) as port, ThreadPoolExecutor(2) as pool:
        assert all("both 1.0" in text for text in pool.map(page, [port, port]))


def test_a_page_is_made_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them another thread may run."""
    registry, pauses = CollectorRegistry(), []
    for name, count in (("some", 3 * LINES_IN_A_TURN + 1), ("others", 1)):
        gauge = Gauge(name, "Numbers.", ["number"], registry=registry)
        for number in range(count):
            gauge.labels(str(number)).set(number)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(sleep=pauses.append))
    assert generate_latest(PageInTurns(registry)) == generate_latest(registry)
    assert pauses == [PAUSE_S] * (4 + 1)
    restricted = PageInTurns(registry).restricted_registry(["others"])
    assert generate_latest(restricted) == generate_latest(registry.restricted_registry(["others"]))
    assert openmetrics.generate_latest(PageInTurns(registry)) == openmetrics.generate_latest(registry)


@given(st.lists(st.tuples(st.one_of(st.sampled_from([0.0, *BOUNDS, 0.75, 1e6]), st.floats(0, 50)), st.integers(0, 5))))
def test_many_observations_at_once_are_what_single_ones_would_be(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = histogram("x_seconds", "Help.", "label", buckets=BOUNDS).histogram(ours).labels("a")
    single = Histogram("x_seconds", "Help.", ["label"], buckets=BOUNDS, registry=theirs).labels("a")
    for value, count in observations:
        own.observe_many(value, count)
        for _ in range(count):
            single.observe(value)
    pages = [generate_latest(registry).decode().splitlines() for registry in (ours, theirs)]
    assert len(pages[0]) == len(pages[1])
    for line, expected in zip(*pages, strict=True):
        if "_sum" in line:
            assert float(line.split()[-1]) == pytest.approx(float(expected.split()[-1]))
        elif "_created" not in line:
            assert line == expected


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
