"""Generate, CancelJob and GetServerInfo over a real connection, with a fake loop behind the manager."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.wire.job import JobInfo
from slipstream.gateway.model import ServedModel
from slipstream.protos import generation_pb2, generation_pb2_grpc
from tests.harness.example_states import CONTEXT_TOKENS, STATE, TOKENS_PER_STEP, VOCAB_SIZE
from tests.harness.generation_server import GenerationServer, collect, generation_server, tokens_of
from tests.harness.scripted_scheduler import EOS_ID
from tests.harness.tokenizers_by_kind import TEXT, make_tokenizer, text_after
from tests.harness.waiting import TIMEOUT_S, block_until, until


async def is_idle(server: GenerationServer) -> None:
    """Returns when the loop has let go of all jobs."""
    await server.manager.wait_idle()
    await until(lambda: not server.loop.running and not server.link.num_waiting)


@pytest.mark.parametrize("kind", ["byte level", "llama"])
async def test_a_text_is_continued(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        prompt = server.model.tokenizer.encode(TEXT)
        chunks = await collect(client.generate(TEXT, job_id="job", max_new_tokens=100, seed=5))
        expected = [prompt[number % len(prompt)] for number in range(100)]
        assert tokens_of(chunks) == expected
        text = text_after(server.model.tokenizer, prompt, expected)
        assert "".join(chunk.text for chunk in chunks) == text
        lengths = [length for chunk in chunks for length in chunk.text_lengths]
        assert len(lengths) == 100
        assert sum(lengths) == len(text)
        drafted = [is_draft for chunk in chunks for is_draft in chunk.is_draft]
        assert drafted == [number % TOKENS_PER_STEP != TOKENS_PER_STEP - 1 for number in range(100)]
        assert {chunk.job_id for chunk in chunks} == {"job"}
        assert [chunk.finish_reason for chunk in chunks] == [*(None for _ in chunks[:-1]), "length"]
        assert [chunk.usage for chunk in chunks[:-1]] == [None for _ in chunks[:-1]]
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.seed) == (len(prompt), 100, 5)
        assert usage.cached_tokens == len(prompt) // 2
        assert (usage.num_verify_steps, usage.total_draft_tokens, usage.total_accepted_tokens) == (34, 68, 68)
        assert usage.mean_accept_length == 3.0
        assert 0 <= usage.queue_seconds <= usage.time_to_first_token_seconds <= usage.end_to_end_seconds < 30


async def test_the_token_that_stops_is_sent_and_is_no_text(client: AsyncClient, server: GenerationServer) -> None:
    a, b, c = (server.model.tokenizer.encode(character)[0] for character in "abc")
    chunks = await collect(client.generate([a, b, c, a], stop_token_ids=[c]))
    assert tokens_of(chunks) == [a, b, c]
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert [length for chunk in chunks for length in chunk.text_lengths] == [1, 1, 0]
    assert chunks[-1].finish_reason == "stop"
    chunks = await collect(client.generate([a, EOS_ID]))
    assert (tokens_of(chunks), chunks[-1].finish_reason) == ([a, EOS_ID], "stop")
    chunks = await collect(client.generate([a, EOS_ID], ignore_eos=True, max_new_tokens=4))
    assert (tokens_of(chunks), chunks[-1].finish_reason) == ([a, EOS_ID] * 2, "length")


async def test_half_a_character_at_the_end_is_replaced(client: AsyncClient, server: GenerationServer) -> None:
    vocabulary = server.model.vocabulary
    half = next(token for token in range(VOCAB_SIZE) if vocabulary.bytes_of(token) == "你".encode()[:1])
    (chunk,) = await collect(client.generate([half], max_new_tokens=1))
    assert (chunk.text, chunk.text_lengths) == ("\ufffd", (1,))


async def test_output_that_has_piled_up_is_one_message(server: GenerationServer, client: AsyncClient) -> None:
    """Messages may be read late, but the manager hands out all that there is."""
    server.loop.may_step.clear()
    chunks = client.generate([5, 6, 7], max_new_tokens=3000)
    first = asyncio.ensure_future(anext(chunks))
    await until(lambda: len(server.loop.running) == 1)
    # The event loop, which is also the server's, is held up while the fake loop runs to the end.
    server.loop.may_step.set()
    block_until(lambda: not server.loop.running)
    received = [await first, *await collect(chunks)]
    # All but what was on its way.
    assert len(received) < 100
    assert tokens_of(received) == [5, 6, 7] * 1000


async def test_many_streams_at_once(server: GenerationServer, client: AsyncClient) -> None:
    prompts = [[2 + number, 5, 6, 7] for number in range(64)]
    results = await asyncio.gather(
        *(collect(client.generate(prompt, max_new_tokens=60, ignore_eos=True)) for prompt in prompts)
    )
    assert [tokens_of(chunks) for chunks in results] == [prompt * 15 for prompt in prompts]
    await is_idle(server)


async def test_malformed_requests_make_no_job(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.may_step.clear()
    for params, field in (
        ({"temperature": float("nan")}, "sampling_params.temperature"),
        ({"max_new_tokens": CONTEXT_TOKENS}, "sampling_params.max_new_tokens"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "sampling_params.stop_token_ids[0]"),
        ({"job_id": "a b"}, "job_id"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await collect(client.generate([5, 6], **params))
        assert caught.value.field == field
        assert server.manager.num_jobs == 0


class HeldTokenizer:
    """Comes to the end of a text when it may."""

    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `prompt.Tokenizer`."""
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT_S), "nobody lets go of the text"
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids


async def test_a_text_far_too_long_is_refused_by_its_characters(server: GenerationServer, client: AsyncClient) -> None:
    server.model.tokenizer = HeldTokenizer(server.model.tokenizer)
    with pytest.raises(InvalidArgumentError, match="got '1200000 characters', accepted: at most") as caught:
        await collect(client.generate("Hello world " * 100_000))
    assert caught.value.field == "text"


async def test_a_message_too_large_is_not_sent_again(client: AsyncClient) -> None:
    await client.server_info()  # reached, so that it is tried for long
    text = "a" * 2**22
    async with asyncio.timeout(30):
        with pytest.raises(ResourceExhaustedError, match="larger than max") as caught:
            await client.create_job(text)
        assert caught.value.retry_after_ms is None
        with pytest.raises(ResourceExhaustedError, match="larger than max"):
            await collect(client.generate(text))


async def test_a_long_text_is_tokenised_beside_the_event_loop(server: GenerationServer, client: AsyncClient) -> None:
    held = server.model.tokenizer = HeldTokenizer(server.model.tokenizer)
    refused = asyncio.ensure_future(collect(client.generate("Hello world " * 1_500)))
    await until(held.has_begun.is_set)
    for _ in range(20):
        await client.server_info()
    held.may_end.set()
    with pytest.raises(InvalidArgumentError, match="4500 tokens', accepted: at most 4095") as caught:
        await refused
    assert caught.value.field == "text"


async def create_while_workers_change(
    server: GenerationServer, client: AsyncClient, change: Callable[[], None]
) -> JobInfo:
    """Creates a job with a long text, whose tokens are there only when the workers are others."""
    held = server.model.tokenizer = HeldTokenizer(server.model.tokenizer)
    call = asyncio.create_task(client.create_job("Hello world " * 400, job_id="mine", max_new_tokens=300))
    await until(held.has_begun.is_set)
    change()
    held.may_end.set()
    return await call


@pytest.mark.parametrize("is_back", [False, True])
async def test_no_job_is_made_that_the_workers_of_now_cannot_run(
    server: GenerationServer, client: AsyncClient, is_back: bool
) -> None:
    def change() -> None:
        if is_back:
            limits = replace(server.model.limits, context_tokens=512)
            server.model = ServedModel(make_tokenizer("byte level"), limits)
        else:
            server.absence = UnavailableError("not attached")

    expected = InvalidArgumentError if is_back else UnavailableError
    with pytest.raises(expected, match="^text: .* accepted: at most 511" if is_back else "^not attached"):
        await create_while_workers_change(server, client, change)
    assert server.manager.num_jobs == 0
    assert server.metric("requests_total", outcome="refused") == (not is_back)


async def test_a_text_has_the_tokens_of_the_model_that_continues_it(
    server: GenerationServer, client: AsyncClient
) -> None:
    def change() -> None:
        server.model = ServedModel(make_tokenizer("llama"), replace(server.model.limits, context_tokens=8192))

    await create_while_workers_change(server, client, change)
    prompt = server.model.tokenizer.encode("Hello world " * 400)
    chunks = await collect(client.watch_job("mine"))
    assert tokens_of(chunks) == prompt[:300]
    text = text_after(server.model.tokenizer, prompt, prompt[:300])
    assert "".join(chunk.text for chunk in chunks) == text


async def test_a_prompt_that_just_fits(client: AsyncClient) -> None:
    (chunk,) = await collect(client.generate([5] * (CONTEXT_TOKENS - 1)))
    assert (len(chunk.token_ids), chunk.finish_reason) == (1, "length")


async def test_a_job_is_cancelled_by_its_name(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.may_step.clear()
    chunks = asyncio.ensure_future(collect(client.generate([5, 6], job_id="mine")))
    await until(lambda: server.manager.num_jobs == 1)
    await client.cancel_job("mine")
    (last,) = await chunks
    assert (last.finish_reason, last.token_ids) == ("abort", ())
    assert last.usage is not None
    await is_idle(server)
    # Once more, since an answer may be lost.
    await client.cancel_job("mine")
    with pytest.raises(NotFoundError, match="'another'"):
        await client.cancel_job("another")
    with pytest.raises(InvalidArgumentError, match="job_id"):
        await client.cancel_job("")


async def test_a_running_name_cannot_be_taken(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.may_step.clear()
    first = asyncio.ensure_future(collect(client.generate([5, 6], job_id="mine", max_new_tokens=4)))
    await until(lambda: server.manager.num_jobs == 1)
    with pytest.raises(AlreadyExistsError, match="'mine'"):
        await collect(client.generate([7], job_id="mine"))
    server.loop.may_step.set()
    assert tokens_of(await first) == [5, 6, 5, 6]
    with pytest.raises(AlreadyExistsError, match="'mine'"):
        await collect(client.generate([7], job_id="mine", max_new_tokens=2))


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_goes_away_cancels_its_job(
    server: GenerationServer, client: AsyncClient, has_begun: bool
) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP if has_begun else 0
    async with aclosing(client.generate([5, 6], max_new_tokens=CONTEXT_TOKENS - 2)) as chunks:
        first = asyncio.ensure_future(anext(chunks))
        await until(lambda: server.manager.num_jobs == 1)
        if has_begun:
            assert (await first).token_ids == (5, 6, 5)
        else:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    await is_idle(server)
    assert len(server.loop.cancelled) == 1
    assert server.metric("requests_total", outcome="disconnected") == 1
    assert [job.abort_cause for job in (await client.list_jobs()).jobs] == ["disconnected"]


async def test_a_connection_that_breaks_cancels_its_jobs(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        streams = [asyncio.ensure_future(collect(client.generate([5, 6]))) for _ in range(5)]
        await until(lambda: server.manager.num_jobs == 5)
    await asyncio.gather(*streams, return_exceptions=True)
    await is_idle(server)
    assert len(server.loop.cancelled) == 5


async def test_a_client_that_does_not_read_is_cancelled_all_the_same(server: GenerationServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        for num_reads in range(5):
            request = generation_pb2.GenerateRequest(input_ids={"ids": [5, 6]}, sampling_params={"ignore_eos": True})
            request.sampling_params.max_new_tokens = CONTEXT_TOKENS - 2
            call = stub.Generate(request)
            for _ in range(num_reads):
                await call.read()
            call.cancel()
            await is_idle(server)


async def test_a_full_queue_says_when_to_come_again(client: AsyncClient) -> None:
    async with generation_server(capacity=1, slots=1) as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        running = asyncio.ensure_future(collect(client.generate([5], max_new_tokens=2)))
        await until(lambda: server.link.num_running == 1)
        waiting = asyncio.ensure_future(collect(client.generate([6], max_new_tokens=2)))
        await until(lambda: server.link.num_waiting == 1)
        with pytest.raises(ResourceExhaustedError, match="1 outputs are waiting") as caught:
            await collect(client.generate([7]))
        assert caught.value.retry_after_ms > 0
        # Too long a text for the context, and nobody has looked.
        with pytest.raises(ResourceExhaustedError, match="1 outputs are waiting"):
            await collect(client.generate("a b " * CONTEXT_TOKENS))
        assert server.manager.num_jobs == 2
        assert server.metric("num_requests_running") == 1
        assert server.metric("num_requests_waiting") == 1
        server.loop.may_step.set()
        assert [tokens_of(chunks) for chunks in (await running, await waiting)] == [[5, 5], [6, 6]]
        assert server.metric("requests_total", outcome="refused") == 2


async def test_a_closed_queue_refuses_requests(server: GenerationServer, client: AsyncClient) -> None:
    server.link.shut(UnavailableError("the server is shutting down"))
    with pytest.raises(UnavailableError, match="shutting down"):
        await collect(client.generate([5]))
    assert server.manager.num_jobs == 0


@pytest.mark.parametrize("absence", [UnavailableError("not attached"), FailedPreconditionError("never will be")])
async def test_a_request_is_refused_while_there_is_no_model(
    server: GenerationServer, client: AsyncClient, absence: SlipstreamError
) -> None:
    server.absence = absence
    server.link.shut(UnavailableError("epoch 1 is over"))
    with pytest.raises(type(absence), match=str(absence)):
        await collect(client.generate([5], timeout_s=1))
    with pytest.raises(type(absence), match=str(absence)):
        await client.create_job([5])
    assert server.metric("requests_total", outcome="refused") == 2


async def test_the_error_of_a_job_is_its_call_s(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.may_step.clear()
    chunks = asyncio.ensure_future(collect(client.generate([5, 6])))
    await until(lambda: len(server.loop.running) == 1)
    server.loop.error = UnavailableError("verify is gone")
    server.loop.may_step.set()
    with pytest.raises(UnavailableError, match="verify is gone"):
        await chunks
    await is_idle(server)
    assert server.metric("requests_total", outcome="error") == 1


async def test_the_server_says_what_it_runs(client: AsyncClient) -> None:
    assert await client.server_info() == STATE


async def test_unknown_fields_are_refused_everywhere(server: GenerationServer) -> None:
    unknown = b"\xf8\x07\x01"
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method in ("GetServerInfo", "CancelJob"):
            call: Any = channel.unary_unary(f"/slipstream.v1.Generation/{method}", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(unknown)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_metrics_of_requests(server: GenerationServer, client: AsyncClient) -> None:
    await collect(client.generate([5, 6], max_new_tokens=10))
    await collect(client.generate([5, EOS_ID, 7]))
    await is_idle(server)
    assert server.metric("requests_total", outcome="length") == 1
    assert server.metric("requests_total", outcome="stop") == 1
    assert server.metric("prompt_tokens_total") == 5
    assert server.metric("generation_tokens_total") == 12
    assert server.metric("time_to_first_token_seconds_count") == 2
    assert server.metric("inter_token_latency_seconds_count") == 10
    assert server.metric("e2e_request_latency_seconds_count") == 2
    assert server.metric("request_queue_time_seconds_count") == 2
    assert server.metric("inter_token_latency_seconds_sum") < 10


async def test_nothing_is_left_behind(tmp_path: object) -> None:
    async def cycle() -> None:
        async with (
            generation_server(address=f"unix:{tmp_path}/a.sock") as server,
            AsyncClient(server.address) as client,
        ):
            await collect(client.generate([5, 6], max_new_tokens=10))
            server.loop.may_step.clear()
            async with aclosing(client.generate([5, 6])) as chunks:
                task = asyncio.ensure_future(anext(chunks))
                await until(lambda: server.manager.num_jobs == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await is_idle(server)

    await cycle()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await cycle()
    await until(lambda: threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= descriptors)
