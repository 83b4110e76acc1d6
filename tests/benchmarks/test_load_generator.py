"""The load generator over a real connection, and the report of what it records."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest

from slipstream.benchmarks.load_generator import (
    COMPLETED,
    FAILED,
    LEFT,
    REJECTED,
    LoadRun,
    RequestRecord,
    closed_loop,
    open_loop,
    percentiles,
)
from slipstream.benchmarks.workloads import Arrival, request
from slipstream.client import AsyncClient
from slipstream.common.errors import ConnectionLostError
from tests.harness.example_states import USAGE
from tests.harness.generation_server import generation_server
from tests.harness.grpc_server import unserved_address
from tests.harness.waiting import until

NUM_REQUESTS = 20


def arrivals() -> list[Arrival]:
    """All within a tenth of a second."""
    return [Arrival(number / 200, request("abc", 7, 0.8, number)) for number in range(NUM_REQUESTS)]


async def test_requests_do_not_wait_for_answers() -> None:
    async with generation_server() as server:
        server.loop.may_step.clear()
        run = asyncio.ensure_future(open_loop(server.address, arrivals(), 0.2, 60.0))
        # Nothing is answered, and yet all of them come.
        await until(lambda: server.manager.num_jobs == NUM_REQUESTS)
        server.loop.may_step.set()
        records = (await run).records
    assert [record.outcome for record in records] == [COMPLETED] * NUM_REQUESTS
    assert [record.intended_s for record in records] == [arrival.at_s for arrival in arrivals()]
    assert all(record.num_tokens == 7 for record in records)
    assert all(r.intended_s <= r.sent_s <= r.times_s[0] <= r.times_s[-1] <= r.ended_s for r in records)


async def test_rejections_say_when_to_come_again() -> None:
    async with generation_server(capacity=2, slots=1) as server:
        server.loop.may_step.clear()
        run = asyncio.ensure_future(open_loop(server.address, arrivals(), 0.2, 60.0))
        await until(lambda: server.metric("requests_total", outcome="refused") == NUM_REQUESTS - 3)
        server.loop.may_step.set()
        report, records = (await run).report(0.0), (await run).records
    assert (report["num_rejected"], report["num_completed"]) == (NUM_REQUESTS - 3, 3)
    assert all(record.retry_after_ms for record in records if record.outcome == REJECTED)
    assert report["rejection_ms"]["count"] == NUM_REQUESTS - 3


async def test_requests_that_do_not_end_are_left() -> None:
    async with generation_server() as server:
        server.loop.may_step.clear()
        run = await open_loop(server.address, arrivals(), 0.1, 0.1)
        assert [record.outcome for record in run.records] == [LEFT] * NUM_REQUESTS
        await server.manager.wait_idle()


async def test_clients_of_a_closed_loop_are_never_idle_and_leave() -> None:
    sessions = [(request("abc", 3000, 0.8, 1),), (request("def", 2, 0.8, 2),)]
    async with generation_server() as server:
        run = await closed_loop(server.address, sessions, 3, 0.5)
        await server.manager.wait_idle()
    report = run.report(0.0)
    assert report["num_left"] <= 3
    assert report["num_completed"] + report["num_left"] == report["num_requests"] > 3
    assert report["tokens_per_second"] > 0


async def test_processes_share_the_sessions_of_a_run_and_make_each_once() -> None:
    sessions = [tuple(request((7, number), 2 + number % 3, 0.0, turn) for turn in range(2)) for number in range(9)]
    async with generation_server() as server:
        run = await closed_loop(server.address, sessions, 5, num_processes=3)
    report = run.report(0.0)
    assert (report["num_requests"], report["num_completed"]) == (18, 18)
    assert sorted(record.wanted_tokens for record in run.records) == [2] * 6 + [3] * 6 + [4] * 6
    assert {record.usage.prompt_tokens for record in run.records if record.usage} == {2}
    assert 0 < report["tokens_per_second"] < report["all_tokens_per_second"]
    assert 0 < run.cpu_s < run.wall_s


async def test_processes_share_the_arrivals_of_a_run() -> None:
    async with generation_server() as server:
        run = await open_loop(server.address, arrivals(), 0.2, 60.0, num_processes=3)
    assert [record.outcome for record in run.records] == [COMPLETED] * NUM_REQUESTS
    assert sorted(record.intended_s for record in run.records) == [arrival.at_s for arrival in arrivals()]


async def test_an_output_that_ends_too_soon_is_a_failure() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 1
        run = asyncio.ensure_future(closed_loop(server.address, [(request((7,), 50, 0.0, 1),)], 1))
        await until(lambda: server.manager.num_jobs == 1)
        (job,) = (await client.list_jobs()).jobs
        async for chunk in client.watch_job(job.job_id):
            if chunk.token_ids:
                await client.cancel_job(job.job_id)
        records = (await run).records
    assert [record.outcome for record in records] == [FAILED]
    assert records[0].error == f"{records[0].num_tokens} of 50 tokens, ends: abort"


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with unserved_address() as address, pytest.raises(ConnectionLostError):
        await closed_loop(address, [(request("abc", 3, 0.8, 1),)], 1, 0.1)


def record(
    intended_s: float,
    times_s: list[float],
    counts: list[int],
    *,
    ended_s: float,
    outcome: str = COMPLETED,
    sent_s: float | None = None,
) -> RequestRecord:
    return RequestRecord(
        intended_s=intended_s,
        sent_s=intended_s if sent_s is None else sent_s,
        wanted_tokens=sum(counts),
        times_s=array("d", times_s),
        counts=array("I", counts),
        ended_s=ended_s,
        outcome=outcome,
    )


def test_latencies_count_from_when_a_request_was_to_be_made() -> None:
    late = record(1.0, [3.5], [1], ended_s=3.75, sent_s=3.0)
    refused = record(1.0, [], [], ended_s=3.25, sent_s=3.0, outcome=REJECTED)
    report = LoadRun([late, refused], 10.0, 1.0, 10.0).report(0.0)
    assert report["ttft_ms"]["p50"] == 2500
    assert report["end_to_end_ms"]["p50"] == 2750
    assert report["rejection_ms"]["most"] == 2250
    assert report["lateness_ms"]["most"] == 2000
    assert report["generator_cpu_share"] == pytest.approx(0.1)


def test_tokens_of_one_message_share_the_time_since_the_one_before() -> None:
    report = LoadRun([record(0.0, [1.0, 1.25, 1.75], [1, 1, 5], ended_s=1.75)], 10.0, 0.0, 10.0).report(0.0)
    assert report["inter_token_ms"]["count"] == 6
    assert report["inter_token_ms"]["p50"] == 100
    assert report["inter_token_ms"]["most"] == 250
    assert report["message_gap_ms"]["count"] == 2
    assert report["message_gap_ms"]["most"] == 500


def test_only_what_happens_in_the_window_is_throughput() -> None:
    records = [
        record(0.5, [0.75, 1.5], [3, 4], ended_s=1.5),
        record(2.0, [2.5, 11.5], [5, 6], ended_s=11.5),
        record(3.0, [3.5], [7], ended_s=0.0, outcome=LEFT),
    ]
    report = LoadRun(records, 11.0, 0.0, 12.0).report(1.0)
    assert report["seconds"] == 10
    assert report["tokens_per_second"] == pytest.approx((4 + 5 + 7) / 10)
    assert report["completed_tokens_per_second"] == pytest.approx((4 + 5) / 10)
    assert report["requests_per_second"] == pytest.approx(1 / 10)
    assert (report["num_requests"], report["num_completed"], report["num_left"]) == (2, 1, 1)
    assert report["ttft_ms"]["count"] == 1


def test_the_cache_and_the_drafts_are_those_of_all_requests() -> None:
    records = [record(0.0, [1.0], [2], ended_s=1.0) for _ in range(2)]
    for one, (prompt_tokens, cached_tokens, num_accepted) in zip(records, ((100, 30, 6), (300, 0, 2)), strict=True):
        one.usage = replace(
            USAGE,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            total_accepted_tokens=num_accepted,
            num_verify_steps=4,
        )
    report = LoadRun(records, 4.0, 0.0, 4.0).report(0.0)
    assert report["cached_share"] == pytest.approx(30 / 400)
    assert report["mean_accept_length"] == pytest.approx(1 + 8 / 8)
    assert report["all_tokens_per_second"] == pytest.approx((400 + 4) / 4)


def test_failures_are_told() -> None:
    short = record(0.0, [1.0], [3], ended_s=1.0, outcome=FAILED)
    short.error = "3 of 4 tokens"
    assert LoadRun([short], 1.0, 0.0, 1.0).failures == ["3 of 4 tokens"]
    assert LoadRun([short], 1.0, 0.0, 1.0).report(0.0)["num_failed"] == 1


def test_percentiles() -> None:
    found = percentiles(number / 1000 for number in range(101))
    assert found == {"count": 101, "p50": 50, "p90": 90, "p99": 99, "most": 100}
    assert percentiles([])["count"] == 0
