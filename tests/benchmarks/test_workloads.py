"""Workloads from fixed seeds, and the generator that makes their requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from array import array
from dataclasses import replace
from statistics import mean

import pytest
from tokenizers import Tokenizer

from slipstream.benchmarks.workloads import (
    CPU_SCALE,
    GPU_SCALE,
    NAMES,
    Scale,
    TextWorkload,
    poisson,
    warm_up,
    workloads,
)
from slipstream.bundled import target_dir
from slipstream.cli.load_generator import (
    COMPLETED,
    FAILED,
    LEAD_S,
    LEFT,
    REJECTED,
    Generator,
    GrpcServer,
    LoadRun,
    RequestRecord,
    closed_loop,
    open_loop,
    percentiles,
)
from slipstream.cli.load_requests import Arrival, Lengths, LogNormal, poisson_times, request
from slipstream.client import AsyncClient
from slipstream.common.errors import ConnectionLostError
from tests.harness.example_states import USAGE
from tests.harness.generation_server import generation_server
from tests.harness.grpc_server import unserved_address
from tests.harness.waiting import until

NUM_DRAWS = 50_000


@pytest.fixture(scope="module")
def workload() -> TextWorkload:
    return TextWorkload(Lengths(scale=0.25))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_lengths_have_the_mean_and_the_width_that_they_state(scale: float) -> None:
    rng = random.Random(1)
    draws = [LogNormal(mean_tokens=340.0, sigma=0.9).draw(rng, scale=scale, most=10**6) for _ in range(NUM_DRAWS)]
    # Standard errors are 0.5 % of the mean and 0.6 % of the quantile.
    assert mean(draws) == pytest.approx(scale * 340, rel=0.03)
    median, upper = sorted(draws)[NUM_DRAWS // 2], sorted(draws)[round(0.8413 * NUM_DRAWS)]
    assert upper / median == pytest.approx(2.71828**0.9, rel=0.05)


def test_lengths_fit_the_context() -> None:
    lengths, rng = Lengths(scale=50.0, context_tokens=256), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(1000)]
    assert max(prompt + output for prompt, output in drawn) < 256
    assert {output for _, output in drawn} >= {128}
    tiny = Lengths(scale=0.001)
    assert min(itertools.chain(*(tiny.draw(rng) for _ in range(1000)))) == 1


def test_arrivals_are_a_poisson_process() -> None:
    times = list(itertools.takewhile(lambda at: at < 1000.0, poisson_times(50.0, random.Random(1))))
    # 50,000 are expected, give or take 224; of exponential gaps 1 / e are longer than their mean.
    assert len(times) == pytest.approx(50_000, abs=1000)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_the_same_seed_gives_the_same_requests(workload: TextWorkload) -> None:
    first, again = (workload.arrivals(20.0, 10.0, "a") for _ in range(2))
    assert first == again
    assert first != workload.arrivals(20.0, 10.0, "b")
    assert len({arrival.request.prompt for arrival in first}) > len(first) * 0.9
    assert len({arrival.request.options["seed"] for arrival in first}) == len(first)


def test_prompts_have_about_as_many_tokens_as_were_drawn(workload: TextWorkload) -> None:
    tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
    rng = random.Random(1)
    for num_tokens in (1, 2, 17, 100, 496):
        for _ in range(50):
            text = workload.prompt(num_tokens, rng)
            assert text
            assert abs(len(tokenizer.encode(text, add_special_tokens=False).ids) - num_tokens) <= 4
    assert workload.prompt(10**6, rng)


def test_the_mean_of_the_outputs_is_that_of_the_requests(workload: TextWorkload) -> None:
    requests = list(itertools.islice(workload.requests("c"), 5000))
    assert mean(request.options["max_new_tokens"] for request in requests) == pytest.approx(
        workload.mean_output_tokens, rel=0.05
    )


@pytest.mark.parametrize(("scale", "divisor"), [(GPU_SCALE, 1), (CPU_SCALE, 8)])
def test_workloads_have_their_sizes(scale: Scale, divisor: int) -> None:
    made = {one.name: one for one in workloads(scale)}
    assert tuple(made) == NAMES
    expected = (256, 128, 64, 240, 384, 512, 192, 24, 480)
    assert [one.num_requests for one in made.values()] == [number // divisor for number in expected]
    clients = {name: one.num_clients for name, one in made.items() if not one.arrivals}
    assert clients == {
        name: number // divisor
        for name, number in {"chat": 64, "long": 64, "prefill": 16, "chat256": 256, "turns": 32, "ctx8k": 8}.items()
    }
    for one in (*made.values(), *(warm_up(scale, made[name].sizes) for name in ("chat", "ctx8k"))):
        requests = [r for session in one.sessions for r in session] + [arrival.request for arrival in one.arrivals]
        assert max(len(r.prompt) + r.options["max_new_tokens"] for r in requests) <= one.sizes.context_tokens
        assert min(r.options["max_new_tokens"] for r in requests) >= 2
        assert {r.options["temperature"] for r in requests} == {0.0}


def test_no_workload_finds_prompts_of_another_in_the_prefix_cache() -> None:
    made = workloads(CPU_SCALE)
    first = [{r.prompt[0] for session in one.sessions for r in session} for one in made]
    first += [{arrival.request.prompt[0] for arrival in one.arrivals} for one in made]
    assert sorted(tokens.pop() for tokens in first if tokens) == list(CPU_SCALE.token_ids[: len(NAMES)])
    assert not any(first)


def test_turns_of_a_conversation_continue_each_other_behind_a_common_prompt() -> None:
    (turns,) = (one for one in workloads(GPU_SCALE) if one.name == "turns")
    for session in turns.sessions:
        assert len(session) == 6
        assert session[0].prompt[:1000] == turns.sessions[0][0].prompt[:1000]
        for turn, following in itertools.pairwise(session):
            assert following.prompt[: len(turn.prompt)] == turn.prompt
            added = len(following.prompt) - len(turn.prompt) - turn.options["max_new_tokens"]
            assert 100 <= added < 200
    assert len({session[0].prompt for session in turns.sessions}) == 32


def test_rates_differ_in_times_and_in_no_length() -> None:
    slow, fast = poisson(CPU_SCALE, 1.0, 50, 3), poisson(CPU_SCALE, 4.0, 50, 4)
    assert [one.at_s for one in slow] == pytest.approx([4 * one.at_s for one in fast])
    assert [one.request.prompt[1:] for one in slow] == [one.request.prompt[1:] for one in fast]
    assert {one.request.prompt[0] for one in slow} != {one.request.prompt[0] for one in fast}
    assert [one.request.options["max_new_tokens"] for one in slow] == [
        one.request.options["max_new_tokens"] for one in fast
    ]


NUM_REQUESTS = 20


def arrivals() -> list[Arrival]:
    """All within a tenth of a second."""
    return [Arrival(number / 200, request("abc", 7, 0.8, number)) for number in range(NUM_REQUESTS)]


async def opened(address: str, seconds: float, drain_s: float) -> LoadRun:
    """A run of the arrivals as one of the generator's processes makes it, in this one."""
    async with GrpcServer(address).connect() as client:
        return await Generator(client, time.monotonic()).open_loop(arrivals(), seconds, drain_s)


async def test_requests_do_not_wait_for_answers() -> None:
    async with generation_server() as server:
        server.loop.may_step.clear()
        run = asyncio.ensure_future(opened(server.address, 0.2, 60.0))
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
        run = asyncio.ensure_future(opened(server.address, 0.2, 60.0))
        await until(lambda: server.metric("requests_total", outcome="refused") == NUM_REQUESTS - 3)
        server.loop.may_step.set()
        report, records = (await run).report(0.0), (await run).records
    assert (report["num_rejected"], report["num_completed"]) == (NUM_REQUESTS - 3, 3)
    assert all(record.retry_after_ms for record in records if record.outcome == REJECTED)
    assert report["rejection_ms"]["count"] == NUM_REQUESTS - 3


async def test_requests_that_do_not_end_are_left() -> None:
    async with generation_server() as server:
        server.loop.may_step.clear()
        run = await opened(server.address, 0.1, 0.1)
        assert [record.outcome for record in run.records] == [LEFT] * NUM_REQUESTS
        await server.manager.wait_idle()


async def test_clients_of_a_closed_loop_are_never_idle_and_leave() -> None:
    sessions = [(request("abc", 3000, 0.8, 1),), (request("def", 2, 0.8, 2),)]
    async with generation_server() as server:
        run = await closed_loop(GrpcServer(server.address), sessions, 3, 1.0)
        await server.manager.wait_idle()
    report = run.report(0.0)
    assert report["num_left"] <= 3
    assert report["num_completed"] + report["num_left"] == report["num_requests"] > 3
    assert report["tokens_per_second"] > 0


async def test_processes_share_the_sessions_of_a_run_and_make_each_once() -> None:
    sessions = [tuple(request((7, number), 2 + number % 3, 0.0, turn) for turn in range(2)) for number in range(9)]
    async with generation_server() as server:
        run = await closed_loop(GrpcServer(server.address), sessions, 5, num_processes=3)
    report = run.report(0.0)
    assert (report["num_requests"], report["num_completed"]) == (18, 18)
    assert sorted(record.wanted_tokens for record in run.records) == [2] * 6 + [3] * 6 + [4] * 6
    assert {record.usage.prompt_tokens for record in run.records if record.usage} == {2}
    assert 0 < report["tokens_per_second"] < report["all_tokens_per_second"]
    assert 0 < run.cpu_s < 2 * (LEAD_S + run.wall_s)


async def test_processes_share_the_arrivals_of_a_run() -> None:
    async with generation_server() as server:
        run = await open_loop(GrpcServer(server.address), arrivals(), 0.2, 60.0, num_processes=3)
    assert [record.outcome for record in run.records] == [COMPLETED] * NUM_REQUESTS
    assert sorted(record.intended_s for record in run.records) == [arrival.at_s for arrival in arrivals()]


async def test_an_output_that_ends_too_soon_is_a_failure() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 1
        run = asyncio.ensure_future(closed_loop(GrpcServer(server.address), [(request((7,), 50, 0.0, 1),)], 1))
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
        await closed_loop(GrpcServer(address), [(request("abc", 3, 0.8, 1),)], 1, 0.1)


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
