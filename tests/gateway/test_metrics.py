"""The metrics of requests as Prometheus reads them, and the times of the last requests."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.client import AsyncClient
from slipstream.common.errors import InternalError
from slipstream.common.rpc.metrics import RpcMetrics, make_registry
from slipstream.common.wire.events import Event, Site
from slipstream.common.wire.trace import HostRecords
from slipstream.gateway.keys import KeyFile, KeyInterceptor
from slipstream.gateway.metrics import (
    COMPAT_SPECS,
    OUTCOMES,
    CompatMetrics,
    RequestMetrics,
    RequestTimes,
    ServerInfo,
    TimesOfRequests,
)
from slipstream.protos import trace_pb2, trace_pb2_grpc
from tests.harness.example_states import STATE, TOKENS_PER_STEP
from tests.harness.generation_server import GenerationServer, collect, generation_server
from tests.harness.tokenizers_by_kind import break_first_detokenizer
from tests.harness.waiting import TIMEOUT_S, until


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


ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
PHASES = [Site.TOKENISE, Site.SUBMIT, Site.FIRST_TOKEN]


async def read(address: str, key: str | None = None, **request: int) -> tuple[Event, ...]:
    """Calls `ReadRecords`."""
    metadata = [("authorization", f"Bearer {key}")] if key else None
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = trace_pb2_grpc.RecorderStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.ReadRecords(trace_pb2.ReadRecordsRequest(**request), metadata=metadata)
    return HostRecords.from_pb(answer).records


def test_the_oldest_request_goes() -> None:
    times = TimesOfRequests(capacity=2)
    for number in (5, 6, 6, 7):
        times.add(number, "", RequestTimes(100, 200))
    assert list(times.records("")) == [Event(Site.TOKENISE, number, 100, 200) for number in (6, 7)]


async def test_the_phases_of_a_request_follow_each_other() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        begin_ns = time.monotonic_ns()
        chunks = client.generate([5, 6, 7], job_id="job", max_new_tokens=300)
        first = asyncio.ensure_future(anext(chunks))
        await until(lambda: len(server.loop.running) == 1)
        before_step_ns = time.monotonic_ns()
        waiting = await read(server.address)
        server.loop.pause_tokens = 10
        server.loop.may_step.set()
        await first
        async with asyncio.timeout(TIMEOUT_S):
            while len(early := await read(server.address)) < len(PHASES):
                pass
        sent_ns = time.monotonic_ns()
        server.loop.pause_tokens = None
        assert await collect(chunks), "there is a message after the first"
        done = await read(server.address)
        assert await read(server.address, from_step=done[0].step + 1) == ()
    assert [record.site for record in waiting] == PHASES[:2]
    assert [record.site for record in done] == PHASES
    assert done[:2] == waiting
    assert begin_ns <= done[0].begin_ns <= done[0].end_ns == done[1].begin_ns <= done[1].end_ns == done[2].begin_ns
    assert done[1].end_ns <= before_step_ns <= done[2].end_ns <= sent_ns
    # The messages after the first one are not noted.
    assert done == early


async def test_a_key_sees_its_own_requests(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\n")
    (tmp_path / "keys").chmod(0o600)
    async with generation_server(interceptors=(KeyInterceptor(KeyFile(tmp_path / "keys")),)) as server:
        async with AsyncClient(server.address, api_key=ANN) as client:
            await collect(client.generate([5, 6, 7], max_new_tokens=4))
        assert [record.site for record in await read(server.address, ANN)] == PHASES
        assert await read(server.address, BOB) == ()
        with pytest.raises(grpc.aio.AioRpcError, match="authorization: Bearer TOKEN"):
            await read(server.address)


async def test_routers_read_the_load_of_now_under_vllm_s_names() -> None:
    """The scheduler is asked at each scrape; before the first one there is nothing to read, and a page nevertheless."""
    registry = CollectorRegistry()
    async with generation_server(slots=2) as server:
        link = server.link
        CompatMetrics(
            registry,
            num_running=lambda: link.num_running,
            num_waiting=lambda: link.num_waiting,
            state=link.read_state,
        )
        server.loop.pause_tokens = TOKENS_PER_STEP
        async with AsyncClient(server.address) as client:
            for number in range(5):
                await client.create_job([5], job_id=str(number), max_new_tokens=9)
            await until(lambda: link.num_running == 2)
            page = (await asyncio.to_thread(generate_latest, registry)).decode()
            server.loop.pause_tokens = None
        samples = {
            sample.name: (sample.value, sample.labels)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        assert samples == {
            "vllm:num_requests_running": (2.0, {}),
            "vllm:num_requests_waiting": (3.0, {}),
            "vllm:kv_cache_usage_perc": (pytest.approx(1 / STATE.num_pages), {}),
            "vllm:cache_config_info": (
                1.0,
                {"block_size": str(STATE.page_tokens), "num_gpu_blocks": str(STATE.num_pages)},
            ),
        }
        assert set(samples) == {spec.name for spec in COMPAT_SPECS}
    absent = CollectorRegistry()
    CompatMetrics(absent, num_running=lambda: 0, num_waiting=lambda: 0, state=lambda: None)
    assert generate_latest(absent) == b""
