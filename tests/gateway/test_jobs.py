"""CreateJob, WatchJob, GetJob and ListJobs over a real connection; how long jobs are kept."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import JobState, OutputChunk
from slipstream.gateway.job import JobStore
from slipstream.gateway.keys import current_owner
from slipstream.gateway.request import parse_request
from slipstream.gateway.sample import MAX_CHUNK_TOKENS, Sample
from slipstream.gateway.server import log_load
from slipstream.protos import generation_pb2, generation_pb2_grpc
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import (
    TTL_S,
    GenerationServer,
    collect,
    generation_server,
    state_of,
    text_of,
    tokens_of,
)
from tests.harness.scripted_scheduler import EOS_ID
from tests.harness.tokenizers_by_kind import TEXT, break_first_detokenizer, text_after
from tests.harness.waiting import DEADLINES_S, until


async def test_a_job_goes_on_without_a_caller(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        created = await client.create_job([5, 6], job_id="mine", max_new_tokens=50)
        assert (created.job_id, created.state is JobState.ENDED, created.error) == ("mine", created.is_over, "")
    async with AsyncClient(server.address) as client:
        ended = await state_of(client, "mine", JobState.ENDED)
        assert (ended.num_tokens, ended.finish_reason, ended.created_at) == (50, "length", created.created_at)
        assert ended.usage is not None
        assert ended.usage.completion_tokens == 50
        chunks = await collect(client.watch_job("mine"))
        assert tokens_of(chunks) == [5, 6] * 25
        assert chunks[-1].usage == ended.usage


async def test_the_same_request_makes_one_job(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.may_step.clear()
    created = await client.create_job("Hello", job_id="mine", max_new_tokens=6)
    # A server that takes nobody in any more still knows its jobs.
    server.link.shut(UnavailableError("full"))
    again = await client.create_job("Hello", job_id="mine", max_new_tokens=6)
    assert again.created_at == created.created_at
    assert server.manager.num_jobs == 1
    server.loop.may_step.set()
    streams = [collect(client.generate("Hello", job_id="mine", max_new_tokens=6)), collect(client.watch_job("mine"))]
    generated, watched = await asyncio.gather(*streams)
    assert tokens_of(generated) == tokens_of(watched)
    # The seed was drawn once.
    assert generated[-1].usage == watched[-1].usage
    over = await client.create_job("Hello", job_id="mine", max_new_tokens=6)
    assert (over.state, over.created_at) == (JobState.ENDED, created.created_at)


@pytest.mark.parametrize(
    "other", [{"max_new_tokens": 7}, {"max_new_tokens": 6, "seed": 1}, {"max_new_tokens": 6, "stop_token_ids": [9]}]
)
async def test_another_request_cannot_have_the_name(client: AsyncClient, other: dict[str, Any]) -> None:
    await client.create_job([5], job_id="mine", max_new_tokens=6)
    for prompt, params in (([5], other), ([6], {"max_new_tokens": 6})):
        with pytest.raises(AlreadyExistsError, match="'mine'"):
            await client.create_job(prompt, job_id="mine", **params)
        with pytest.raises(AlreadyExistsError, match="'mine'"):
            await collect(client.generate(prompt, job_id="mine", **params))


async def test_a_job_that_was_left_or_failed_goes_on(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    async with aclosing(client.generate([5], job_id="mine", max_new_tokens=9)) as chunks:
        await anext(chunks)
    left = await state_of(client, "mine", JobState.ENDED)
    assert (left.finish_reason, left.num_tokens) == ("abort", TOKENS_PER_STEP)
    server.loop.error = UnavailableError("verify is gone")
    with pytest.raises(UnavailableError, match="verify is gone"):
        await collect(client.generate([5], job_id="mine", max_new_tokens=9))
    failed = await state_of(client, "mine", JobState.ENDED)
    assert (failed.finish_reason, failed.error) == (None, "verify is gone")
    with pytest.raises(UnavailableError, match="verify is gone"):
        await collect(client.watch_job("mine"))
    server.loop.error = server.loop.pause_tokens = None
    with pytest.raises(AlreadyExistsError, match="'mine'"):
        await client.create_job([5], job_id="mine", max_new_tokens=8)
    assert tokens_of(await collect(client.generate([5], job_id="mine", max_new_tokens=9))) == [5] * 9


async def test_the_log_says_which_job_ended_and_how(
    server: GenerationServer, client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="slipstream.gateway.jobs")
    await collect(client.generate([5], job_id="good", max_new_tokens=9))
    server.loop.error = UnavailableError("verify is gone")
    with pytest.raises(UnavailableError, match="verify is gone"):
        await collect(client.generate([5], job_id="bad", max_new_tokens=9))
    lines = [(line.levelname, vars(line)["job"], line.message) for line in caplog.records if "job" in vars(line)]
    assert lines == [("DEBUG", "good", lines[0][2]), ("WARNING", "bad", "failed: verify is gone")]
    assert lines[0][2].startswith("ended (length): 1 prompt tokens, 0 cached, 9 generated; ")


async def test_the_last_call_that_a_job_is_for_ends_it(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    calls = [client.generate([5], job_id="mine", max_new_tokens=9) for _ in range(2)]
    watcher = client.watch_job("mine")
    for call in calls:
        await anext(call)
    await anext(watcher)
    await calls[0].aclose()
    await client.get_job("mine")
    assert not server.loop.cancelled
    await calls[1].aclose()
    assert (await anext(watcher)).finish_reason == "abort"
    # Created, too: then it goes on.
    await client.create_job([5], job_id="other", max_new_tokens=9)
    call = client.generate([5], job_id="other", max_new_tokens=9)
    await anext(call)
    await call.aclose()
    server.loop.pause_tokens = None
    assert tokens_of(await collect(client.watch_job("other"))) == [5] * 9


async def test_a_created_job_is_cancelled_by_its_name(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([5, 6], job_id="mine", max_new_tokens=9)
    chunks = client.watch_job("mine")
    assert (await anext(chunks)).token_ids == (5, 6, 5)
    await client.cancel_job("mine")
    last = await anext(chunks)
    assert (last.finish_reason, last.abort_cause) == ("abort", "cancelled")
    await client.cancel_job("mine")
    again = await collect(client.watch_job("mine"))
    assert (tokens_of(again), again[-1].finish_reason) == ([5, 6, 5], "abort")


async def test_a_job_that_was_cancelled_does_not_go_on(
    server: GenerationServer, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller leaves before the scheduler has aborted it, and comes back."""
    server.loop.pause_tokens = TOKENS_PER_STEP
    with monkeypatch.context() as held_back:
        held_back.setattr(server.link, "cancel", lambda _: None)
        async with aclosing(client.generate([5], job_id="mine", max_new_tokens=9)) as chunks:
            await anext(chunks)
            await client.cancel_job("mine")
        job = server.store.get(current_owner(), "mine")
        assert job is not None
        await until(lambda: not job.num_callers)
    for sample in job.unfinished:
        server.link.cancel(sample)
    await state_of(client, "mine", JobState.ENDED)
    server.loop.pause_tokens = None
    again = await collect(client.generate([5], job_id="mine", max_new_tokens=9))
    assert (again[-1].finish_reason, tokens_of(again)) == ("abort", [5] * TOKENS_PER_STEP)


async def test_a_job_that_cannot_go_on_is_over(
    server: GenerationServer, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output so far cannot become text when its caller comes back."""

    def fail(*_: object) -> None:
        raise OverflowError("no token has this number")

    async def call() -> list[OutputChunk]:
        return await collect(client.generate([5], n=2, stop=["#"], job_id="mine", max_new_tokens=90))

    server.loop.error = UnavailableError("verify is gone")
    with pytest.raises(UnavailableError):
        await call()
    server.loop.error = None
    with monkeypatch.context() as broken:
        broken.setattr(Sample, "detokenize", fail)
        for _ in range(2):
            with pytest.raises(InternalError, match="could not be taken in"):
                await call()
            assert (await client.get_job("mine")).is_over
            assert server.manager.num_jobs == 0
    assert len(tokens_of(await call())) == 180


async def test_unknown_jobs(server: GenerationServer, client: AsyncClient) -> None:
    with pytest.raises(NotFoundError, match="'mine'"):
        await client.get_job("mine")
    with pytest.raises(NotFoundError, match="'mine'"):
        await collect(client.watch_job("mine"))
    with pytest.raises(NotFoundError, match="'mine'"):
        await client.cancel_job("mine")
    with pytest.raises(InvalidArgumentError, match="job_id"):
        await client.get_job("a b")
    await client.create_job([5, EOS_ID], job_id="mine")
    await state_of(client, "mine", JobState.ENDED)
    with pytest.raises(InvalidArgumentError, match="0 to 2, the tokens") as caught:
        await collect(client.watch_job("mine", 3))
    assert caught.value.field == "from_token"


async def test_jobs_are_kept_for_a_while() -> None:
    now = [0.0]
    async with generation_server(clock=lambda: now[0]) as server, AsyncClient(server.address) as client:
        await client.create_job([5], job_id="old", max_new_tokens=3)
        await state_of(client, "old", JobState.ENDED)
        server.loop.may_step.clear()
        await client.create_job([5], job_id="runs", max_new_tokens=3)
        now[0] = TTL_S / 2
        await client.create_job([5], job_id="old", max_new_tokens=3)
        now[0] = TTL_S
        # What runs stays, however long; the time of the others runs from their end.
        assert [job.job_id for job in (await client.list_jobs()).jobs] == ["runs"]
        with pytest.raises(NotFoundError):
            await client.get_job("old")
        server.loop.may_step.set()
        await state_of(client, "runs", JobState.ENDED)
        created = await client.create_job([6], job_id="old", max_new_tokens=3)
        assert created.created_at > (await client.get_job("runs")).created_at


async def test_not_many_jobs_are_kept() -> None:
    async with generation_server(kept_jobs=3) as server, AsyncClient(server.address) as client:
        for number in range(6):
            await collect(client.generate([5], job_id=f"job-{number}", max_new_tokens=3))
        await server.manager.wait_idle()
        assert [job.job_id for job in (await client.list_jobs()).jobs] == ["job-5", "job-4", "job-3"]
        assert len(server.store) == 3


async def test_pages_hold_every_job_once(server: GenerationServer, client: AsyncClient) -> None:
    names = [f"job-{number}" for number in range(25)]
    for name in names[:20]:
        await client.create_job([5], job_id=name, max_new_tokens=3)
    for size in (1, 7, 20, 50):
        found, token, is_first = [], "", True
        while token or is_first:
            page = await client.list_jobs(page_size=size, page_token=token)
            assert 1 <= len(page.jobs) <= size
            found += [job.job_id for job in page.jobs]
            token, is_first = page.next_page_token, False
        assert found == names[19::-1]
    # What comes meanwhile moves nothing.
    page = await client.list_jobs(page_size=15)
    for name in names[20:]:
        await client.create_job([5], job_id=name, max_new_tokens=3)
    rest = await client.list_jobs(page_size=15, page_token=page.next_page_token)
    assert [job.job_id for job in (*page.jobs, *rest.jobs)] == names[19::-1]
    for field, params in (("page_size", {"page_size": 1001}), ("page_token", {"page_token": "x"})):
        with pytest.raises(InvalidArgumentError) as caught:
            await client.list_jobs(**params)
        assert caught.value.field == field


async def test_states_are_told(client: AsyncClient) -> None:
    async with generation_server(slots=1) as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        await client.create_job([5], job_id="runs", max_new_tokens=3)
        await state_of(client, "runs", JobState.RUNNING)
        assert (await client.create_job([5], job_id="waits", max_new_tokens=3)).state is JobState.WAITING
        states = {job.job_id: job.state for job in (await client.list_jobs()).jobs}
        assert states == {"waits": JobState.WAITING, "runs": JobState.RUNNING}


async def test_unknown_fields_are_refused(server: GenerationServer) -> None:
    unknown = b"\xf8\x07\x01"
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method in ("CreateJob", "GetJob", "ListJobs", "WatchJob"):
            call: Any = channel.unary_unary(f"/slipstream.v1.Generation/{method}", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(unknown)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_output_that_cannot_be_taken_in_fails_its_own_job_alone(
    server: GenerationServer, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Sample.add

    def break_one(sample: Sample, token_ids: list[int], *others: Any, **more: Any) -> bool:
        if sample.num_tokens and set(token_ids) <= {5, 6}:
            raise OverflowError("no token has this number")
        return add(sample, token_ids, *others, **more)

    monkeypatch.setattr(Sample, "add", break_one)
    server.loop.may_step.clear()
    await client.create_job([5, 6], job_id="broken", max_new_tokens=300)
    await client.create_job([7, 8], job_id="whole", max_new_tokens=30)
    server.loop.may_step.set()
    assert tokens_of(await collect(client.watch_job("whole"))) == [7, 8] * 15
    with pytest.raises(InternalError, match="could not be taken in"):
        await collect(client.watch_job("broken"))
    ended = await state_of(client, "broken", JobState.ENDED)
    assert (ended.num_tokens, "could not be taken in" in ended.error) == (TOKENS_PER_STEP, True)
    assert server.manager.num_jobs == 0


async def test_an_output_that_cannot_become_text_fails_when_it_is_read(
    server: GenerationServer, client: AsyncClient
) -> None:
    break_first_detokenizer(server.model)
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([5, 6], job_id="broken", max_new_tokens=300)
    await client.create_job([7, 8], job_id="whole", max_new_tokens=30)
    with pytest.raises(InternalError, match="could not be taken in"):
        await collect(client.watch_job("broken"))
    ended = await state_of(client, "broken", JobState.ENDED)
    assert (ended.num_tokens, "could not be taken in" in ended.error) == (TOKENS_PER_STEP, True)
    assert [job.spec.job_id for job in server.loop.cancelled] == ["broken"]
    server.loop.pause_tokens = None
    assert tokens_of(await collect(client.watch_job("whole"))) == [7, 8] * 15


@pytest.mark.parametrize("kind", ["byte level", "llama"])
async def test_a_client_that_comes_back_misses_and_repeats_nothing(kind: str) -> None:
    """At every offset, while the job runs and when it is over."""
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 60
        await client.create_job(TEXT, job_id="mine", max_new_tokens=90)
        first: list[OutputChunk] = []
        async with aclosing(client.watch_job("mine")) as chunks:
            async for chunk in chunks:
                first.append(chunk)
                if len(tokens_of(first)) == 60:
                    break
        running: list[tuple[int, list[OutputChunk]]] = []
        for offset in range(60):
            async with aclosing(client.watch_job("mine", offset)) as chunks:
                running.append((offset, [await anext(chunks)]))
        server.loop.pause_tokens = None
        whole = await collect(client.watch_job("mine"))
        tokenizer = server.model.tokenizer
        expected = text_after(tokenizer, tokenizer.encode(TEXT), tokens_of(whole))
        assert text_of(whole) == expected
        assert len(tokens_of(whole)) == 90
        lengths = [length for chunk in whole for length in chunk.text_lengths]
        for offset, before in (*running, (60, [])):
            seen = offset + len(tokens_of(before))
            rest = [*before, *await collect(client.watch_job("mine", seen))]
            assert tokens_of(rest) == tokens_of(whole)[offset:], offset
            assert text_of(rest) == expected[sum(lengths[:offset]) :], offset
        for offset in range(91):
            rest = await collect(client.watch_job("mine", offset))
            assert tokens_of(rest) == tokens_of(whole)[offset:]
            assert text_of(rest) == expected[sum(lengths[:offset]) :], offset
            assert (rest[0].token_offset, rest[-1].finish_reason) == (offset, "length")


async def test_many_watch_one_job(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.may_step.clear()
    await client.create_job([5, 6, 7], job_id="mine", max_new_tokens=300)
    watchers = [asyncio.ensure_future(collect(client.watch_job("mine"))) for _ in range(10)]
    leaver = asyncio.ensure_future(anext(client.watch_job("mine")))
    server.loop.may_step.set()
    await leaver
    for chunks in await asyncio.gather(*watchers):
        assert tokens_of(chunks) == [5, 6, 7] * 100


async def test_a_long_output_comes_in_parts() -> None:
    num_tokens = 2 * MAX_CHUNK_TOKENS + 5
    async with generation_server(context_tokens=num_tokens + 10) as server, AsyncClient(server.address) as client:
        await client.create_job([5, 6], job_id="mine", max_new_tokens=num_tokens)
        await state_of(client, "mine", JobState.ENDED)
        late = await collect(client.watch_job("mine", num_tokens - 1))
        assert [chunk.token_ids for chunk in late] == [(5,)]
        chunks = await collect(client.watch_job("mine"))
        assert [len(chunk.token_ids) for chunk in chunks] == [MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS, 5]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


async def test_half_a_character_at_a_cancelled_end(server: GenerationServer, client: AsyncClient) -> None:
    half = next(t for t in range(350) if server.model.vocabulary.bytes_of(t) == "你".encode()[:1])
    whole = server.model.tokenizer.encode("a")[0]
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([whole, whole, half], job_id="mine", max_new_tokens=9)
    chunks = client.watch_job("mine")
    first = await anext(chunks)
    assert (first.text, first.text_lengths) == ("aa", (1, 1, 0))
    await client.cancel_job("mine")
    last = await anext(chunks)
    assert (last.text, last.text_lengths, last.token_offset) == ("\ufffd", (), 3)
    for offset in range(4):
        assert text_of(await collect(client.watch_job("mine", offset))) == "aa\ufffd"[min(offset, 2) :]


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_deadline_ends_the_job(is_running: bool) -> None:
    """In the queue and while it runs; what others asked for goes on."""
    for timeout_s in DEADLINES_S:
        async with generation_server(slots=1 + is_running) as server, AsyncClient(server.address) as client:
            server.loop.pause_tokens = TOKENS_PER_STEP
            await client.create_job([5], job_id="other", max_new_tokens=9)
            await state_of(client, "other", JobState.RUNNING)
            with pytest.raises(DeadlineExceededError):
                await collect(client.generate([6], job_id="mine", max_new_tokens=9, timeout_s=timeout_s))
            job = server.store.get("", "mine")
            if job is None or (is_running and not job.num_tokens):
                continue
            ended = await state_of(client, "mine", JobState.ENDED)
            if server.metric("requests_total", outcome="disconnected"):
                continue  # the call took too long to arrive, and its end came well before the server's
            assert (ended.finish_reason, ended.num_tokens) == ("abort", TOKENS_PER_STEP * is_running)
            assert ended.abort_cause == (await collect(client.watch_job("mine")))[-1].abort_cause == "deadline"
            assert [job.spec.job_id for job in server.loop.cancelled] == ["mine"]
            assert not server.link.num_waiting
            assert server.metric("requests_total", outcome="deadline") == 1
            # The deadline of a watch is the watch's alone.
            with pytest.raises(DeadlineExceededError):
                await collect(client.watch_job("other", timeout_s=0.1))
            server.loop.pause_tokens = None
            assert tokens_of(await collect(client.watch_job("other"))) == [5] * 9
            return
    pytest.fail("no deadline is long enough")


async def test_the_server_keeps_time_itself(server: GenerationServer) -> None:
    server.loop.may_step.clear()
    spec = parse_request(
        generation_pb2.GenerateRequest(job_id="mine", text="a"), server.model.limits, server.model.tokenizer
    )
    job = server.manager.create(spec, server.model)
    server.manager.enter(job)
    with pytest.raises(DeadlineExceededError, match="'mine' had 0 tokens"):
        await server.manager.reader(job).send(pytest.fail, encode=pytest.fail, timeout_s=0.01)
    server.manager.leave(job, 0.0)
    await server.manager.wait_idle()
    assert server.metric("requests_total", outcome="deadline") == 1


async def test_a_client_that_does_not_read_is_cut_off_and_holds_up_no_other() -> None:
    num_tokens = 20_000
    async with generation_server(context_tokens=2 * num_tokens, read_timeout_s=3.0) as server:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
        async with (
            AsyncClient(server.address) as client,
            grpc.aio.insecure_channel(server.address, options=options) as channel,
        ):
            stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            await client.create_job([300, 301], job_id="mine", max_new_tokens=num_tokens)
            slow = aiter(stub.WatchJob(generation_pb2.WatchJobRequest(job_id="mine")))
            seen = len((await anext(slow)).token_ids)
            # The others have it all while it does not read.
            assert len(tokens_of(await collect(client.watch_job("mine")))) == num_tokens
            await until(lambda: server.metric("streams_cut_off_total") == 1)
            error = None
            while error is None:
                try:
                    seen += len((await anext(slow)).token_ids)
                except grpc.aio.AioRpcError as failure:
                    error = error_from_rpc(failure)
            assert isinstance(error, ResourceExhaustedError)
            assert "read nothing for 3 s" in str(error)
            assert 0 < seen < num_tokens
            rest = await collect(client.watch_job("mine", seen))
            assert len(tokens_of(rest)) == num_tokens - seen


BYTES = 1000
KEPT_S = 60.0


@dataclass(frozen=True, eq=False)
class Ended:
    """What the store looks at of a job."""

    job_id: str
    number: int
    num_bytes: int = BYTES
    owner: str = ""


class Kept:
    """A store on a clock of the test's own, with what it forgets."""

    def __init__(self, **bounds: Any) -> None:
        self.now = 0.0
        self.forgotten: list[int] = []
        self.store = JobStore(**{"capacity": 100, "ttl_s": KEPT_S, "clock": lambda: self.now, **bounds})
        self.store.on_forget = lambda job: self.forgotten.append(job.number)

    def add(self, number: int, name: str = "", *, is_over: bool = True) -> Any:
        """Adds a job, which ends now if it `is_over`."""
        job: Any = Ended(name or f"job-{number}", number)
        self.store.add(job)
        if is_over:
            self.store.end(job)
        return job

    @property
    def numbers(self) -> list[int]:
        """The jobs that are kept."""
        assert len(self.store) == len(list(self.store.jobs()))
        return [job.number for job in self.store.jobs()]


@pytest.mark.parametrize("bounds", [{"capacity": 3}, {"max_bytes": 3 * BYTES + 1}])
def test_the_job_that_ended_first_goes_first(bounds: dict[str, int]) -> None:
    kept = Kept(**bounds)
    running = kept.add(0, is_over=False)
    for number in range(1, 6):
        kept.add(number)
    assert (kept.numbers, kept.forgotten) == ([0, 3, 4, 5], [1, 2])
    kept.store.end(running)
    assert (kept.numbers, kept.forgotten) == ([0, 4, 5], [1, 2, 3])


def test_age_counts_from_the_end() -> None:
    kept = Kept()
    kept.add(1)
    kept.now = 40.0
    kept.add(2)
    kept.add(3, is_over=False)
    kept.now = 60.0
    assert kept.numbers == [2, 3]
    kept.now = 99.0
    assert kept.numbers == [2, 3]
    kept.now = 100.0
    assert (kept.numbers, kept.forgotten) == ([3], [1, 2])


def test_a_job_that_goes_on_or_is_replaced_no_longer_counts() -> None:
    kept = Kept(max_bytes=2 * BYTES)
    again = kept.add(1)
    kept.store.add(again)
    kept.add(2, "name")
    kept.add(3, "name")
    assert kept.forgotten == [2]
    kept.add(4)
    assert (kept.numbers, kept.forgotten) == ([1, 3, 4], [2])
    # The one before it has the name no more: its end is of no interest.
    kept.now = 2 * KEPT_S
    assert (kept.numbers, kept.forgotten) == ([1], [2, 3, 4])


async def test_ended_requests_and_the_load_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="slipstream.gateway")
    async with generation_server(logs_requests=True) as server, AsyncClient(server.address) as client:
        logging_load = asyncio.create_task(log_load(server.manager, server.link, 0.01))
        server.loop.pause_tokens = TOKENS_PER_STEP
        await client.create_job([5, 6], job_id="mine", max_new_tokens=9)
        await until(lambda: "0.0 tokens/s generated, 1 outputs running, 0 waiting" in caplog.text)
        server.loop.pause_tokens = None
        await collect(client.watch_job("mine"))
        logging_load.cancel()
    (line,) = (one for one in caplog.records if "ended (" in one.message)
    assert (line.levelname, line.job) == ("INFO", "mine")  # type: ignore[attr-defined]
    assert re.match(r"ended \(length\): 2 prompt tokens, 1 cached, 9 generated; \d+\.\d{3} s waiting", line.message)
    loads = [one.message for one in caplog.records if "tokens/s" in one.message]
    assert any(not message.startswith("0.0 ") for message in loads)
