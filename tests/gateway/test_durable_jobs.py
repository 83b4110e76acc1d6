"""Jobs come back from the journal of a gateway that was killed: they go on, or can be watched."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from slipstream.client import AsyncClient
from slipstream.common.errors import InternalError, NotFoundError, ResourceExhaustedError, UnavailableError
from slipstream.common.wire.job import FinishReason, JobState, OutputChunk
from slipstream.common.wire.sequence import StepOutput
from slipstream.gateway.job import Job
from slipstream.gateway.jobs import JobManager
from slipstream.gateway.journal import JobJournal, output_of, record_of, rows_of
from slipstream.gateway.journal_file import Accepted, JournalFile, JournalMode
from slipstream.gateway.metrics import RequestMetrics
from slipstream.gateway.sample import Sample
from slipstream.protos import generation_pb2, journal_pb2
from tests.harness.generation_server import (
    GenerationServer,
    collect,
    generation_server,
    killed,
    make_version_1,
    model_of,
    state_of,
    text_of,
    tokens_of,
)
from tests.harness.samples import request_of
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler
from tests.harness.waiting import until

PROMPT = list(range(65, 91))
"""An alphabet: the text repeats it."""
PAUSE = 30
DAY_S = 86_400.0
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 100},
    "two samples": {"max_new_tokens": 100, "temperature": 1.0, "n": 2},
    "logprobs": {"max_new_tokens": 100, "logprobs": True, "top_logprobs": 3},
    "stop string": {"max_new_tokens": 100, "stop": ["y`abcdefghijklmn"]},
    "stop string over the cut": {"max_new_tokens": 100, "stop": ["wxy`abcdef"]},
    "stop token": {"max_new_tokens": 100, "stop_token_ids": [88], "min_new_tokens": 1},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the journal."""
    return tmp_path / "journal.sqlite3"


def job_id(name: str) -> str:
    """The job of a request."""
    return name.replace(" ", "-")


async def create_all(client: AsyncClient) -> None:
    for name, request in REQUESTS.items():
        await client.create_job(PROMPT, job_id=job_id(name), seed=7, **request)


async def outputs(client: AsyncClient) -> dict[str, list[OutputChunk]]:
    """Everything of each job."""
    return {name: await collect(client.watch_job(job_id(name))) for name in REQUESTS}


def comparable(chunks: list[OutputChunk]) -> list[object]:
    """What must be the same whatever happened to a server, sample by sample."""
    samples = []
    for index in range(1 + max(chunk.sample_index for chunk in chunks)):
        own = [chunk for chunk in chunks if chunk.sample_index == index]
        usage = own[-1].usage
        assert usage is not None
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.seed
        if not isinstance(own[-1].matched_stop, str):
            # A few drafts behind a stop string may be counted or not.
            counts += usage.total_draft_tokens, *usage.accepted_per_position
        flags = [flag for chunk in own for flag in chunk.is_draft]
        logprobs = [one for chunk in own for one in chunk.logprobs]
        end = own[-1].finish_reason, own[-1].matched_stop
        samples.append((tokens_of(own), text_of(own), flags, logprobs, end, counts))
    return samples


async def paused_at(server: GenerationServer, client: AsyncClient, num_tokens: int) -> None:
    """Waits until no job has more to come before the scheduler's pause."""
    infos = [await client.get_job(job_id(name)) for name in REQUESTS]
    while not all(info.is_over or info.num_tokens >= num_tokens * len(info.samples) for info in infos):
        infos = [await client.get_job(job_id(name)) for name in REQUESTS]


async def test_jobs_of_a_killed_gateway_go_on(path: Path) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        await create_all(client)
        expected = {name: comparable(chunks) for name, chunks in (await outputs(client)).items()}
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await create_all(client)
        await paused_at(server, client, PAUSE)
        before = {name: await client.get_job(job_id(name)) for name in REQUESTS}
        left = killed(path)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        watched = {name: await collect(client.watch_job(job_id(name))) for name in REQUESTS}
        for name, chunks in watched.items():
            assert comparable(chunks) == expected[name], name
            info = await client.get_job(job_id(name))
            assert (info.created_at, info.attempt) == (before[name].created_at, before[name].attempt)
        # It went on, rather than began again.
        unfinished = [info for info in before.values() if not info.is_over]
        assert sorted(len(sequence.spec.output) for sequence in server.loop.submitted) == sorted(
            sample.num_tokens for info in unfinished for sample in info.samples
        )
        assert all(sequence.spec.output for sequence in server.loop.submitted)
        again = killed(left)
    # All have ended: their text comes from the journal alone.
    async with generation_server(journal=again) as server, AsyncClient(server.address) as client:
        for name, chunks in (await outputs(client)).items():
            assert comparable(chunks) == expected[name], name
            assert chunks[-1].job_usage == watched[name][-1].job_usage
        assert server.loop.submitted == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("step_s", "afterwards_s"),
    [
        pytest.param(0.0, 10 * 365 * DAY_S, id="boot"),
        *((step_s, after_s) for step_s in (-60.0, 60.0, -DAY_S, DAY_S, DAY_S / 4) for after_s in (0.0, 5 * step_s)),
    ],
)
async def test_a_clock_that_steps_changes_no_order_and_no_outcome(
    path: Path, step_s: float, afterwards_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a boot, too: to CLOCK_MONOTONIC, which begins anew, a job of before is as one of ten years ago."""
    time_ns, stepped_s = time.time_ns, 0.0
    monkeypatch.setattr("time.time_ns", lambda: time_ns() + round(stepped_s * 1e9))
    names = [f"job-{number}" for number in range(4)]

    async def come_to(num_tokens: int, jobs: list[str]) -> None:
        server.loop.pause_tokens = num_tokens
        await until(lambda: all(server.manager.get(name).num_tokens == num_tokens for name in jobs))

    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        ended = ["ended-first", "ended-last"]
        server.loop.pause_tokens = PAUSE
        for name in reversed(ended):
            await client.create_job(PROMPT, job_id=name, max_new_tokens=80)
        await come_to(PAUSE, ended)
        for name in ended:
            await client.cancel_job(name)
            await state_of(client, name, JobState.ENDED)
            await server.manager.journal.flush()
            stepped_s += step_s
        server.loop.slots = 0
        for name in names[:3]:
            await client.create_job(PROMPT, job_id=name, max_new_tokens=80)
        stepped_s += step_s
        server.loop.slots = 3
        await come_to(PAUSE, names[:3])
        stepped_s += step_s
        await come_to(2 * PAUSE, names[:3])
        left = killed(path)
    stepped_s = afterwards_s
    async with generation_server(journal=left, slots=0) as server, AsyncClient(server.address) as client:
        assert [job.job_id for job in server.store._ended] == ended
        await client.create_job(PROMPT, job_id=names[3], max_new_tokens=80)
        first = await anext(client.watch_job(names[0]))
        assert (len(first.token_ids), first.published_ns) == (2 * PAUSE, 0)
        server.loop.slots = 1
        for name in names:
            chunks = await collect(client.watch_job(name))
            assert tokens_of(chunks) == (PROMPT * 4)[:80]
            usage = chunks[-1].usage
            assert usage is not None
            durations = usage.queue_seconds, usage.time_to_first_token_seconds, usage.mean_inter_token_latency_seconds
            assert 0 <= min(durations) <= usage.end_to_end_seconds
        assert [job.job_id for job in (await client.list_jobs()).jobs][:4] == names[::-1]
        # A busy machine may lose the scheduler, which is then given the same again.
        arrivals = {sequence.spec.job_id: sequence.spec.arrival for sequence in server.loop.submitted}
        assert list(arrivals) == names
        assert list(arrivals.values()) == sorted({*arrivals.values()})


@pytest.mark.parametrize(("is_of_version_1", "broken"), [(False, "broken"), (False, "b" * 128), (True, "broken")])
async def test_a_damaged_row_costs_its_job_and_no_other(
    path: Path, is_of_version_1: bool, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A journal of the first format had no checksums."""
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        for name in (broken, "whole"):
            await client.create_job(PROMPT, job_id=name, max_new_tokens=80)
        await until(lambda: all(server.manager.get(name).num_tokens == PAUSE for name in (broken, "whole")))
        attempt = server.manager.get("whole").attempt
        left = killed(path)
    with closing(sqlite3.connect(left)) as database:
        query = "UPDATE jobs SET record = record || x'00' WHERE instr(record, CAST(? AS BLOB))"
        assert database.execute(query, (broken,)).rowcount == 1
        database.commit()
    if is_of_version_1:
        make_version_1(left)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert tokens_of(await collect(client.watch_job("whole"))) == (PROMPT * 4)[:80]
        assert server.manager.get("whole").attempt == attempt
        assert [len(sequence.spec.output) for sequence in server.loop.submitted] == [PAUSE]
        with pytest.raises(NotFoundError):
            await client.get_job(broken)
        assert server.metric("journal_damage_total", lost="job") == 1
        assert server.metric("journal_damage_total", lost="output") == 0
    [lost] = [record for record in caplog.records if " is lost: " in record.message]
    assert lost.job == broken  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_of_version_1", [False, True])
async def test_damaged_output_is_made_again_as_another_attempt(path: Path, is_of_version_1: bool) -> None:
    """What a client had of it may be another text than what comes now, on a GPU."""
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        await client.create_job(PROMPT, job_id="over", max_new_tokens=80)
        await collect(client.watch_job("over"))
        server.loop.pause_tokens = PAUSE
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=80)
        await until(lambda: server.manager.get("mine").num_tokens == PAUSE)
        attempts = {name: server.manager.get(name).attempt for name in ("over", "mine")}
        left = killed(path)
    with closing(sqlite3.connect(left)) as database:
        database.execute("UPDATE steps SET rows = x'01000000ff' WHERE number = (SELECT max(number) FROM steps)")
        database.commit()
    if is_of_version_1:
        make_version_1(left)
    for num_damaged in (1, 0):  # the second time, the journal is whole
        async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
            assert server.metric("journal_damage_total", lost="output") == num_damaged
            stub = client._stub
            request = generation_pb2.WatchJobRequest(job_id="mine", from_token=PAUSE, attempt=attempts["mine"])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.WatchJob(request).read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert tokens_of(await collect(client.watch_job("mine"))) == (PROMPT * 4)[:80]
            now = {name: server.manager.get(name).attempt for name in ("over", "mine")}
            assert now == {"over": attempts["over"], "mine": attempts["mine"] + 1}
            await server.manager.journal.flush()
            left = killed(left)


async def test_a_client_goes_on_at_its_offset(path: Path) -> None:
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=80)
        first = []
        async for chunk in client.watch_job("mine"):
            first.append(chunk)
            if len(tokens_of(first)) >= PAUSE:
                break
        left = killed(path)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        second = await collect(client.watch_job("mine", len(tokens_of(first))))
    assert tokens_of(first) + tokens_of(second) == (PROMPT * 4)[:80]
    assert text_of(first) + text_of(second) == ("`abcdefghijklmnopqrstuvwxy" * 4)[:80]
    assert {chunk.attempt for chunk in first} == {chunk.attempt for chunk in second}


async def test_no_token_is_readable_before_its_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_commit = threading.Event()
    may_commit.set()
    commit = JournalFile.commit

    def slow(file: JournalFile, *given: Any) -> int:
        assert may_commit.wait(30)
        return commit(file, *given)

    monkeypatch.setattr(JournalFile, "commit", slow)
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=100)
        await until(lambda: server.manager.get("mine").num_tokens == PAUSE)
        may_commit.clear()
        server.loop.pause_tokens = 2 * PAUSE
        await until(lambda: all(one.num_tokens == 2 * PAUSE for one in server.loop.running))
        # The scheduler's messages are here by now, before the answer to this.
        creating = asyncio.create_task(client.create_job(PROMPT, job_id="other", max_new_tokens=1))
        await until(lambda: "other" in {job.job_id for job in server.store.jobs()})
        assert (await client.get_job("mine")).num_tokens == PAUSE
        assert not creating.done(), "a job was answered for that is not in the journal"
        may_commit.set()
        await creating
        await until(lambda: server.manager.get("mine").num_tokens == 2 * PAUSE)


async def test_a_job_without_its_caller_is_cancelled_after_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        streams = [
            asyncio.create_task(collect(client.generate(PROMPT, job_id=name, max_new_tokens=100, seed=3)))
            for name in ("comes-back", "stays-away")
        ]
        jobs = server.manager
        await until(lambda: sum(job.num_tokens for job in server.store.jobs()) == 2 * PAUSE)
        attempt = jobs.get("comes-back").attempt
        left = killed(path)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    scheduler = ScriptedScheduler()
    scheduler.pause_tokens = PAUSE
    cancel, has_called, times = JobManager._cancel_without_callers, asyncio.Event(), [time.monotonic()]

    def cancel_late(manager: JobManager, unfinished: list[Job]) -> None:
        async def cancel_after_the_call() -> None:
            await has_called.wait()
            cancel(manager, unfinished)

        times.append(time.monotonic())
        tasks.append(asyncio.create_task(cancel_after_the_call()))

    tasks = list[asyncio.Task[None]]()
    monkeypatch.setattr(JobManager, "_cancel_without_callers", cancel_late)
    opening = generation_server(journal=left, return_s=0.2, scheduler=scheduler)
    async with opening as server, AsyncClient(server.address) as client:
        assert (await client.get_job("stays-away")).state is not JobState.ENDED
        request = generation_pb2.GenerateRequest(job_id="comes-back", input_ids={"ids": PROMPT})
        request.sampling_params.max_new_tokens, request.sampling_params.seed = 100, 3
        request.resume.from_tokens.append(PAUSE)
        request.resume.attempt = attempt
        stub = client._stub
        call = stub.Generate(request)
        await until(lambda: server.manager.get("comes-back").num_callers == 1)
        has_called.set()
        cancelled = await state_of(client, "stays-away", JobState.ENDED)
        assert times[1] - times[0] >= 0.2
        assert (cancelled.finish_reason, cancelled.num_tokens) == ("abort", PAUSE)
        scheduler.pause_tokens = None
        tokens = [token async for message in call for token in message.token_ids]
        assert tokens == (PROMPT * 4)[PAUSE:100]


async def test_a_job_that_its_caller_left_goes_on_after_a_restart(path: Path) -> None:
    request: dict[str, Any] = {"job_id": "mine", "max_new_tokens": 100, "seed": 3}
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        chunks = client.generate(PROMPT, **request)
        tokens = [token async for chunk in until_tokens(chunks, PAUSE) for token in chunk.token_ids]
        await chunks.aclose()
        left_job = await state_of(client, "mine", JobState.ENDED)
        assert (left_job.finish_reason, left_job.num_tokens) == ("abort", len(tokens))
        left = killed(path)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert (await client.get_job("mine")).finish_reason == "abort"
        assert tokens_of(await collect(client.generate(PROMPT, **request))) == (PROMPT * 4)[:100]
        assert [len(sequence.spec.output) for sequence in server.loop.submitted] == [PAUSE]
        left = killed(left)
    # Under its new number it is in the journal once.
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert [job.num_tokens for job in (await client.list_jobs()).jobs] == [100]
        assert tokens_of(await collect(client.watch_job("mine"))) == (PROMPT * 4)[:100]


async def until_tokens(chunks: AsyncIterator[OutputChunk], num_tokens: int) -> AsyncIterator[OutputChunk]:
    """The chunks that bring so many tokens."""
    while num_tokens > 0:
        chunk = await anext(chunks)
        num_tokens -= len(chunk.token_ids)
        yield chunk


async def test_a_cancelled_job_stays_cancelled(path: Path) -> None:
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=100)
        await until(lambda: server.manager.get("mine").num_tokens == PAUSE)
        # The scheduler's answer does not come.
        server.manager.end = lambda *_, **__: None  # type: ignore[method-assign]
        server.manager.deliver = lambda _: None  # type: ignore[method-assign]
        await client.cancel_job("mine")
        left = killed(path)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        info = await client.get_job("mine")
        assert (info.state, info.finish_reason, info.num_tokens) == (JobState.ENDED, "abort", PAUSE)
        assert server.loop.submitted == []


async def test_a_full_disk_fails_jobs_that_can_go_on_later(path: Path) -> None:
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=3000)
        await until(lambda: server.manager.get("mine").num_tokens == PAUSE)
        assert server.manager.journal._file is not None
        database = server.manager.journal._file._database
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        server.loop.pause_tokens = None
        with pytest.raises(ResourceExhaustedError, match=r"disk .* full"):
            await collect(client.watch_job("mine", reconnect_s=0))
        assert "full" in (await client.get_job("mine")).error
        database.execute("PRAGMA query_only = ON").fetchall()
        with pytest.raises(UnavailableError, match="journal of jobs cannot be written"):
            await client.create_job(PROMPT, job_id="other", max_new_tokens=100)
        # The commits that the failure brought on fail, too, and would end what is accepted meanwhile.
        for _ in range(2):
            await server.manager.settled()
        database.execute("PRAGMA query_only = OFF").fetchall()
        database.execute("PRAGMA max_page_count = 1000000").fetchall()
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=3000)
        chunks = await collect(client.watch_job("mine"))
        assert tokens_of(chunks) == (PROMPT * 120)[:3000]
        left = killed(path)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert tokens_of(await collect(client.watch_job("mine"))) == (PROMPT * 120)[:3000]


async def test_calls_for_jobs_wait_for_the_scheduler(path: Path) -> None:
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=5)
        left = killed(path)
    scheduler = ScriptedScheduler()
    scheduler.pause()
    opening = generation_server(journal=left, scheduler=scheduler, waits=False)
    async with opening as server, AsyncClient(server.address) as client:
        with pytest.raises(UnavailableError, match="are back when the scheduler is") as raised:
            await client.get_job("mine")
        assert raised.value.retry_after_ms
        with pytest.raises(UnavailableError, match="are back when the scheduler is"):
            await client.create_job(PROMPT, job_id="mine", max_new_tokens=5, reconnect_s=0.0)
        scheduler.serve()
        await until(lambda: server.manager._is_complete)
        assert tokens_of(await collect(client.watch_job("mine"))) == PROMPT[:5]


def scheduler_of(model: str) -> ScriptedScheduler:
    """A scheduler that serves a model of this name."""
    scheduler = ScriptedScheduler()
    scheduler.serve(model=model)
    return scheduler


async def test_jobs_of_another_model_are_dropped(path: Path) -> None:
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=5)
        left = killed(path)
    opening = generation_server(journal=left, scheduler=scheduler_of("another"))
    async with opening as server, AsyncClient(server.address) as client:
        with pytest.raises(NotFoundError):
            await client.get_job("mine")
        await client.create_job(PROMPT, job_id="mine", max_new_tokens=7)
        left = killed(left)
    opening = generation_server(journal=left, scheduler=scheduler_of("another"))
    async with opening as server, AsyncClient(server.address) as client:
        assert tokens_of(await collect(client.watch_job("mine"))) == PROMPT[:7]
        assert (await client.list_jobs()).jobs[1:] == ()


async def test_the_journal_forgets_with_the_store(path: Path) -> None:
    async with generation_server(journal=path, kept_jobs=3) as server, AsyncClient(server.address) as client:
        for number in range(8):
            await client.create_job(PROMPT, job_id=f"job-{number}", max_new_tokens=5)
            await collect(client.watch_job(f"job-{number}"))
        await server.manager.journal.flush()
        left = killed(path)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        page = await client.list_jobs()
        assert [job.job_id for job in page.jobs] == ["job-7", "job-6", "job-5"]


async def test_a_job_that_has_ended_is_not_written_again(path: Path) -> None:
    def records() -> list[tuple[bytes]]:
        with closing(sqlite3.connect(killed(path))) as database:
            return database.execute("SELECT record FROM jobs").fetchall()

    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        await collect(client.generate(PROMPT, job_id="mine", max_new_tokens=5))
        await server.manager.journal.flush()
        before = records()
        assert (await client.create_job(PROMPT, job_id="mine", max_new_tokens=5)).state is JobState.ENDED
        assert records() == before


async def test_a_sequence_whose_end_is_lost_with_a_commit_is_forgotten(path: Path) -> None:
    """It belongs to no job any more: its request came back, and has a new one."""
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        stream = asyncio.ensure_future(collect(client.generate(PROMPT, job_id="mine", max_new_tokens=60)))
        await until(lambda: bool(server.loop.running))
        await until(lambda: (job := server.store.get("", "mine")) is not None and job.num_tokens == PAUSE)
        job = server.store.get("", "mine")
        assert job is not None
        journal, is_writing, may_fail = server.manager.journal, threading.Event(), threading.Event()
        assert journal._file is not None

        def fail(changes: object, rows: object) -> int:
            is_writing.set()
            may_fail.wait(30)
            raise sqlite3.OperationalError("the disk has failed")

        journal._file.commit, commit = fail, journal._file.commit  # type: ignore[method-assign]
        # All that is said from here on waits for this commit, however late its thread is.
        journal.accept(job)
        await until(is_writing.is_set)
        server.manager.leave(job, None)
        server.manager.go_on(job, server.model)
        # Both sequences' news, the one's end and the other's admission, come in one message.
        await until(lambda: any(item.then is not None for item in journal._pending))
        may_fail.set()
        with pytest.raises(UnavailableError, match="the disk has failed"):
            await stream
        journal._file.commit = commit  # type: ignore[method-assign]
        await until(lambda: not server.link.samples)
        assert server.link.running == {}
        server.loop.pause_tokens = None
        assert len(tokens_of(await collect(client.generate(PROMPT, max_new_tokens=3)))) == 3


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_job_ends_as_cancelled_only_if_a_client_cancelled_it(tmp_path: Path, is_cancelled: bool) -> None:
    """The end of a job whose caller left is kept with a step, its cause later: it goes on when the caller is back."""
    model = model_of(DESCRIPTION)
    job = Job(request_of(), model, number=1, attempt=1)
    job.is_cancelled = is_cancelled
    last = StepOutput(
        sequences=[7],
        num_tokens=[1],
        num_accepted=[0],
        finish_reasons=[FinishReason.ABORT],
        tokens=[71],
        published_ns=1,
        is_beyond_draft=[True],
        admitted=[7],
        admitted_ns=[time.monotonic_ns()],
        cached_tokens={7: 1},
    )
    file = JournalFile.open(tmp_path / "journal", JournalMode.PROCESS)
    file.commit([Accepted(1, record_of(job))], [rows_of(last, {7: job.samples[0].key})])
    metrics = RequestMetrics(CollectorRegistry(), num_running=lambda: 0, num_waiting=lambda: 0)
    journal = JobJournal(file, jobs=tuple, metrics=metrics, on_failure=lambda error: pytest.fail(str(error)))
    ((restored, _),) = await journal.restore(model)
    await journal.close()
    assert (restored.is_over, restored.num_tokens) == (True, 1)
    assert restored.can_go_on != is_cancelled
    (sample,) = restored.samples
    assert (sample.tokens_beyond_draft, sample.cached_tokens) == (1, 1)
    assert sample.admitted_at == pytest.approx(time.monotonic(), abs=60)
    assert journal_pb2.JournaledOutput.FromString(output_of(restored)).samples[0].tokens_beyond_draft == 1


@pytest.mark.parametrize("is_over", [True, False])
async def test_output_that_cannot_become_text_fails_its_own_job_at_the_start(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.sqlite3"
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = None if is_over else 9
        for name in ("broken", "whole"):
            await client.create_job([70, 71], job_id=name, max_new_tokens=20, stop=["#"])
        while not all(job.is_over or (not is_over and job.num_tokens >= 9) for job in (await client.list_jobs()).jobs):
            pass
        await server.manager.journal.flush()
        left = killed(path)
    detokenize = Sample.detokenize

    def break_one(sample: Sample, end: int) -> None:
        if sample.spec.job_id == "broken":
            raise OverflowError("no token has this number")
        detokenize(sample, end)

    monkeypatch.setattr(Sample, "detokenize", break_one)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert tokens_of(await collect(client.watch_job("whole"))) == [70, 71] * 10
        with pytest.raises(InternalError, match="could not be taken in"):
            await collect(client.watch_job("broken"))
        broken = await client.get_job("broken")
        assert (broken.is_over, "could not be taken in" in broken.error) == (True, True)
        assert server.manager.num_jobs == 0
