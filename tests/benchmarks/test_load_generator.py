"""The load generator, against the scheduler's clients' side over a real connection."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.benchmarks.load_generator import COMPLETED, FAILED, LEFT, REJECTED, closed_loop, open_loop
from slipstream.benchmarks.load_report import report_of
from slipstream.benchmarks.workload import Arrival, PlannedRequest
from slipstream.client import AsyncClient
from slipstream.common.errors import ConnectionLostError
from tests.harness.generation_server import generation_server
from tests.harness.grpc_server import unserved_address
from tests.harness.waiting import until

NUM_REQUESTS = 20


def arrivals() -> list[Arrival]:
    """All within a tenth of a second."""
    return [Arrival(number / 200, PlannedRequest("abc", 7, 0.8, number)) for number in range(NUM_REQUESTS)]


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
        report, records = report_of(await run, 0.0), (await run).records
    assert (report.num_rejected, report.num_completed) == (NUM_REQUESTS - 3, 3)
    assert all(record.retry_after_ms for record in records if record.outcome == REJECTED)
    assert report.rejection_ms.count == NUM_REQUESTS - 3


async def test_requests_that_do_not_end_are_left() -> None:
    async with generation_server() as server:
        server.loop.may_step.clear()
        run = await open_loop(server.address, arrivals(), 0.1, 0.1)
        assert [record.outcome for record in run.records] == [LEFT] * NUM_REQUESTS
        await server.manager.wait_idle()


async def test_clients_of_a_closed_loop_are_never_idle_and_leave() -> None:
    sessions = [(PlannedRequest("abc", 3000, 0.8, 1),), (PlannedRequest("def", 2, 0.8, 2),)]
    async with generation_server() as server:
        run = await closed_loop(server.address, sessions, 3, 0.5)
        await server.manager.wait_idle()
    report = report_of(run, 0.0)
    assert report.num_left <= 3
    assert report.num_completed + report.num_left == report.num_requests > 3
    assert report.tokens_per_second > 0


async def test_processes_share_the_sessions_of_a_run_and_make_each_once() -> None:
    sessions = [
        tuple(PlannedRequest((7, number), 2 + number % 3, 0.0, turn) for turn in range(2)) for number in range(9)
    ]
    async with generation_server() as server:
        run = await closed_loop(server.address, sessions, 5, num_processes=3)
    report = report_of(run, 0.0)
    assert (report.num_requests, report.num_completed) == (18, 18)
    assert sorted(record.wanted_tokens for record in run.records) == [2] * 6 + [3] * 6 + [4] * 6
    assert {record.usage.prompt_tokens for record in run.records if record.usage} == {2}
    assert 0 < report.tokens_per_second < report.all_tokens_per_second
    assert 0 < run.cpu_s < run.wall_s


async def test_processes_share_the_arrivals_of_a_run() -> None:
    async with generation_server() as server:
        run = await open_loop(server.address, arrivals(), 0.2, 60.0, num_processes=3)
    assert [record.outcome for record in run.records] == [COMPLETED] * NUM_REQUESTS
    assert sorted(record.intended_s for record in run.records) == [arrival.at_s for arrival in arrivals()]


async def test_an_output_that_ends_too_soon_is_a_failure() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 1
        run = asyncio.ensure_future(closed_loop(server.address, [(PlannedRequest((7,), 50, 0.0, 1),)], 1))
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
        await closed_loop(address, [(PlannedRequest("abc", 3, 0.8, 1),)], 1, 0.1)
