"""WatchJob: from any token on, by any number, at any pace, and up to a deadline."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import DeadlineExceededError, ResourceExhaustedError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import JobState
from slipstream.gateway.request import parse_request
from slipstream.gateway.sample import MAX_CHUNK_TOKENS
from slipstream.protos import generation_pb2, generation_pb2_grpc
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import collect, generation_server, state_of, text_of, tokens_of
from tests.harness.tokenizers_by_kind import TEXT, text_after
from tests.harness.waiting import until

if TYPE_CHECKING:
    from slipstream.common.wire.job import OutputChunk
    from tests.harness.generation_server import GenerationServer


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
    async with generation_server(slots=1 + is_running) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        await client.create_job([5], job_id="other", max_new_tokens=9)
        await state_of(client, "other", JobState.RUNNING)
        timeout_s = 1.0 if is_running else 0.2  # where it runs, its first step is to come before
        with pytest.raises(DeadlineExceededError):
            await collect(client.generate([6], job_id="mine", max_new_tokens=9, timeout_s=timeout_s))
        ended = await state_of(client, "mine", JobState.ENDED)
        assert (ended.finish_reason, ended.num_tokens) == ("abort", TOKENS_PER_STEP * is_running)
        assert [job.spec.job_id for job in server.loop.cancelled] == ["mine"]
        assert not server.link.num_waiting
        assert server.metric("requests_total", outcome="deadline") == 1
        # The deadline of a watch is the watch's alone.
        with pytest.raises(DeadlineExceededError):
            await collect(client.watch_job("other", timeout_s=0.1))
        server.loop.pause_tokens = None
        assert tokens_of(await collect(client.watch_job("other"))) == [5] * 9


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
    async with generation_server(context_tokens=2 * num_tokens, read_timeout_s=1.0) as server:
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
            assert "read nothing for 1 s" in str(error)
            assert 0 < seen < num_tokens
            rest = await collect(client.watch_job("mine", seen))
            assert len(tokens_of(rest)) == num_tokens - seen
