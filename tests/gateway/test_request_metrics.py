"""The metrics of requests as Prometheus reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.common.errors import InternalError
from slipstream.common.rpc.metrics import RpcMetrics, make_registry
from slipstream.gateway.metrics import OUTCOMES, RequestMetrics, ServerInfo
from tests.harness.example_states import STATE, TOKENS_PER_STEP
from tests.harness.generation_server import collect
from tests.harness.tokenizers_by_kind import break_first_detokenizer

if TYPE_CHECKING:
    from slipstream.client import AsyncClient
    from tests.harness.generation_server import GenerationServer


@pytest.fixture
def text() -> str:
    registry = make_registry()
    RpcMetrics(registry).count("/a.B/C", "OK")
    RequestMetrics(registry, num_running=lambda: 2, num_waiting=lambda: 3)
    return generate_latest(registry).decode()


def test_names_and_help_are_as_prometheus_wants_them(text: str) -> None:
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        if not family.name.startswith("slipstream_"):
            continue
        assert re.fullmatch(r"slipstream(_[a-z0-9]+)+", family.name)
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names == {f"{family.name}_total"}
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        if family.type == "gauge":
            assert names == {family.name}


def test_promtool_has_no_complaint(text: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_outcome_is_there_from_the_beginning(text: str) -> None:
    outcomes = re.findall(r'slipstream_requests_total\{outcome="(\w+)"\} 0\.0', text)
    assert sorted(outcomes) == sorted(OUTCOMES)


def test_gauges_are_read_when_they_are_scraped() -> None:
    registry, running = CollectorRegistry(), [1]
    RequestMetrics(registry, num_running=lambda: running[0], num_waiting=lambda: 0)
    assert registry.get_sample_value("slipstream_num_requests_running") == 1
    running[0] = 5
    assert registry.get_sample_value("slipstream_num_requests_running") == 5


def test_tokens_that_arrive_together_share_their_time() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, num_running=lambda: 0, num_waiting=lambda: 0)
    metrics.went_on(4, 0.04)
    assert registry.get_sample_value("slipstream_inter_token_latency_seconds_count") == 4
    assert registry.get_sample_value("slipstream_inter_token_latency_seconds_sum") == pytest.approx(0.04)
    assert registry.get_sample_value("slipstream_inter_token_latency_seconds_bucket", {"le": "0.01"}) == 4
    assert registry.get_sample_value("slipstream_inter_token_latency_seconds_bucket", {"le": "0.008"}) == 0


@pytest.mark.parametrize(
    ("n", "stop", "max_new_tokens"),
    [
        pytest.param(2, ["never there"], 9, id="one sample of two"),
        pytest.param(1, [], 9, id="when it is read"),
        pytest.param(2, [], 9, id="one of two when it is read"),
        pytest.param(1, ["never there"], TOKENS_PER_STEP, id="with its last step"),
    ],
)
async def test_a_request_whose_output_cannot_become_text_ends_with_an_error(
    server: GenerationServer, client: AsyncClient, n: int, stop: list[str], max_new_tokens: int
) -> None:
    """Its call is over before the loop has let go of it, and nobody has gone away."""
    break_first_detokenizer(server.model)
    server.loop.pause_tokens = TOKENS_PER_STEP
    with pytest.raises(InternalError, match="could not be taken in"):
        await collect(client.generate([5, 6], job_id="mine", n=n, stop=stop, max_new_tokens=max_new_tokens))
    await server.manager.wait_idle()
    counts = {outcome: server.metric("requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert counts == dict.fromkeys(OUTCOMES, 0) | {"error": 1}
    job = await client.get_job("mine")
    assert (job.finish_reason, "could not be taken in" in job.error) == (None, True)


def test_it_says_what_it_serves_once_there_is_something() -> None:
    registry, served = CollectorRegistry(), []
    ServerInfo(registry, queue_capacity=7, state=lambda: served[-1] if served else None)
    assert registry.get_sample_value("slipstream_queue_capacity") == 7
    assert "slipstream_build_info{" not in generate_latest(registry).decode()
    served.append(STATE)
    labels = {"service": "gateway", "version": STATE.version, "model": STATE.model, "device": "", "mps": "off"}
    labels |= {"fence": STATE.fence, "algorithm": STATE.algorithm}
    assert registry.get_sample_value("slipstream_build_info", labels) == 1
