"""Outputs of many jobs that arrive together, on one stream, over a real connection to a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions
from slipstream.common.errors import InternalError, InvalidArgumentError
from slipstream.common.rpc.status import error_from_status
from slipstream.common.wire.job import OutputChunk
from slipstream.gateway.delivery import MAX_OF_AN_OWNER, Delivery
from slipstream.gateway.keys import KeyFile, KeyInterceptor
from slipstream.protos import generation_pb2 as pb
from slipstream.protos import generation_pb2_grpc
from tests.harness.breaking_proxy import breaking_proxy
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import (
    GenerationServer,
    collect,
    generation_server,
    killed,
    logprobs_in,
    text_of,
    tokens_of,
)
from tests.harness.waiting import until

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
OPTIONS: tuple[RequestOptions, ...] = (
    {"max_new_tokens": 50},
    {"max_new_tokens": 40, "n": 3},
    {"max_new_tokens": 30, "logprobs": True, "top_logprobs": 2},
    {"max_new_tokens": 60, "stop": ["gcefgc"]},
)


@asynccontextmanager
async def together(**options: Any) -> AsyncIterator[tuple[GenerationServer, AsyncClient]]:
    """A server, and a client whose outputs all arrive together."""
    async with (
        generation_server(**options) as server,
        AsyncClient(server.address, together_from=0) as client,
    ):
        yield server, client


def prompt_of(number: int) -> list[int]:
    """A prompt that is different from the others, and the output that repeats it."""
    return [70 + number, 71, 73, 74]


def expected(number: int, num_tokens: int) -> list[int]:
    """The output of that prompt."""
    return (prompt_of(number) * num_tokens)[:num_tokens]


def comparable(chunks: list[OutputChunk]) -> object:
    """What each sample had, and how it ended."""
    samples = sorted({chunk.sample_index for chunk in chunks})
    own = [[chunk for chunk in chunks if chunk.sample_index == index] for index in samples]
    return [
        (tokens_of(one), text_of(one), logprobs_in(one), one[-1].finish_reason, one[-1].matched_stop) for one in own
    ]


def delivery_stub(channel: Any) -> Any:
    return generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]


async def test_outputs_that_arrive_together_are_those_that_each_stream_has() -> None:
    async with together() as (server, client), AsyncClient(server.address) as other:
        requests = [(prompt_of(number), OPTIONS[number % len(OPTIONS)]) for number in range(24)]
        alone = [comparable(await collect(other.generate(prompt, **options))) for prompt, options in requests]
        found = await asyncio.gather(*(collect(client.generate(prompt, **options)) for prompt, options in requests))
        assert [comparable(chunks) for chunks in found] == alone
        assert all(chunks[-1].job_usage is not None for chunks in found)


async def test_a_message_has_the_parts_of_several_outputs_in_their_order() -> None:
    async with generation_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        server.loop.pause_tokens = 0
        stub = delivery_stub(channel)
        delivery = stub.Deliver(pb.DeliverRequest())
        number = (await delivery.read()).delivery
        calls = [
            stub.Generate(
                pb.GenerateRequest(
                    input_ids=pb.TokenIds(ids=prompt_of(output)),
                    sampling_params=pb.SamplingParams(max_new_tokens=90),
                    delivery=pb.Delivery(id=number, output=output),
                )
            )
            for output in range(1, 21)
        ]
        await until(lambda: len(server.loop.running) == len(calls))
        server.loop.pause_tokens = None
        tokens: dict[int, list[int]] = {output: [] for output in range(1, 21)}
        num_messages, num_parts, num_over = 0, 0, 0
        while num_over < len(calls):
            message = await delivery.read()
            num_messages += 1
            for part in message.parts:
                num_parts += 1
                assert part.response.token_offset == len(tokens[part.output])
                tokens[part.output] += part.response.token_ids
                num_over += part.response.HasField("job_usage")
        assert tokens == {output: expected(output, 90) for output in tokens}
        assert num_messages < num_parts / 2
        # The calls themselves have nothing but their ends.
        for call in calls:
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK


async def test_a_refused_request_leaves_the_other_outputs_alone() -> None:
    async with together() as (server, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        others = [client.generate(prompt_of(number), max_new_tokens=20) for number in range(4)]
        begun = [await anext(other) for other in others]
        with pytest.raises(InvalidArgumentError, match=r"sampling_params\.temperature: got -3\.0"):
            await collect(client.generate(prompt_of(9), temperature=-3.0))
        server.loop.pause_tokens = None
        for number, (first, rest) in enumerate(zip(begun, others, strict=True)):
            assert tokens_of([first, *await collect(rest)]) == expected(number, 20)


async def test_the_error_of_a_job_comes_after_its_output() -> None:
    async with together() as (server, client):
        server.loop.pause_tokens = 3 * TOKENS_PER_STEP
        found: list[list[int]] = [[] for _ in range(3)]

        async def read(number: int) -> None:
            async for chunk in client.generate(prompt_of(number), max_new_tokens=20):
                found[number] += chunk.token_ids

        reading = [asyncio.create_task(read(number)) for number in range(3)]
        await until(lambda: server.manager.num_generated == 9 * TOKENS_PER_STEP)
        server.loop.error = InternalError("broken by the test")
        for number, task in enumerate(reading):
            with pytest.raises(InternalError, match="broken by the test"):
                await task
            assert found[number] == expected(number, 3 * TOKENS_PER_STEP)


async def test_the_error_of_a_job_is_in_the_delivery_and_not_the_end_of_its_call() -> None:
    async with generation_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        server.loop.pause_tokens = TOKENS_PER_STEP
        stub = delivery_stub(channel)
        delivery = stub.Deliver(pb.DeliverRequest())
        place = pb.Delivery(id=(await delivery.read()).delivery, output=1)
        call = stub.Generate(pb.GenerateRequest(input_ids=pb.TokenIds(ids=prompt_of(0)), delivery=place))
        (first,) = (await delivery.read()).parts
        server.loop.error = InternalError("broken by the test")
        (last,) = (await delivery.read()).parts
        assert list(first.response.token_ids) == expected(0, TOKENS_PER_STEP)
        assert "broken by the test" in str(error_from_status(last.status))
        assert await call.code() is grpc.StatusCode.OK


async def test_an_output_whose_delivery_the_gateway_does_not_know_arrives_by_itself() -> None:
    async with together() as (server, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        output = client.generate(prompt_of(0), max_new_tokens=20)
        first = await anext(output)
        delivery = client._servers[0].delivery
        assert delivery is not None
        delivery._id = asyncio.get_running_loop().create_future()
        delivery._id.set_result(5)
        server.loop.pause_tokens = None
        assert tokens_of(await collect(client.generate(prompt_of(1), max_new_tokens=20))) == expected(1, 20)
        assert tokens_of([first, *await collect(output)]) == expected(0, 20)


async def test_an_output_that_is_left_is_cancelled_and_no_other() -> None:
    async with together() as (server, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        outputs = [client.generate(prompt_of(number), max_new_tokens=20) for number in range(3)]
        begun = [await anext(output) for output in outputs]
        await outputs.pop().aclose()
        await until(lambda: len(server.loop.cancelled) == 1)
        assert server.loop.cancelled[0].spec.prompt == tuple(prompt_of(2))
        delivery = client._servers[0].delivery
        assert delivery is not None
        assert len(delivery._calls) == 2
        server.loop.pause_tokens = None
        for number, output in enumerate(outputs):
            assert tokens_of([begun[number], *await collect(output)]) == expected(number, 20)
        assert len(server.loop.cancelled) == 1


async def test_outputs_go_on_where_the_connection_broke() -> None:
    async with (
        generation_server() as server,
        breaking_proxy(server.address) as (address, proxy),
        AsyncClient(address, together_from=1) as client,
    ):
        server.loop.pause_tokens = TOKENS_PER_STEP
        outputs = [client.generate(prompt_of(number), max_new_tokens=20, n=2) for number in range(4)]
        chunks = [[await anext(output)] for output in outputs]
        while any(chunk[-1].job_usage is None for chunk in chunks):
            proxy.cut()
            server.loop.pause_tokens += TOKENS_PER_STEP
            for output, own in zip(outputs, chunks, strict=True):
                if (chunk := await anext(output, None)) is not None:
                    own.append(chunk)
        assert proxy.num_connections > 2
        for number, own in enumerate(chunks):
            for index in range(2):
                assert tokens_of([one for one in own if one.sample_index == index]) == expected(number, 20)


async def test_outputs_go_on_after_the_death_of_the_gateway(tmp_path: Path) -> None:
    address, journal = f"unix:{tmp_path}/gateway.sock", tmp_path / "journal.sqlite3"
    async with AsyncClient(address, together_from=2) as client:
        outputs = [client.generate(prompt_of(number), max_new_tokens=50) for number in range(6)]
        async with generation_server(address=address, journal=journal) as server:
            server.loop.pause_tokens = 2 * TOKENS_PER_STEP
            begun = await asyncio.gather(*(anext(output) for output in outputs))
            left = killed(journal)
        rest = asyncio.gather(*(collect(output) for output in outputs))
        async with generation_server(address=address, journal=left):
            for number, (first, more) in enumerate(zip(begun, await rest, strict=True)):
                assert tokens_of([first, *more]) == expected(number, 50)


async def test_a_reader_that_does_not_keep_up_holds_up_nothing_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.client.delivery.MAX_UNREAD", 8)
    num_tokens = 24 * TOKENS_PER_STEP
    async with together() as (server, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        slow, fast = (client.generate(prompt_of(number), max_new_tokens=num_tokens) for number in range(2))
        begun = [await anext(slow), await anext(fast)]
        delivery = client._servers[0].delivery
        assert delivery is not None
        held = next(iter(delivery._calls.values()))
        chunks = []
        while server.loop.pause_tokens < num_tokens:
            server.loop.pause_tokens += TOKENS_PER_STEP
            chunks.append(await anext(fast))
        await until(lambda: held._is_full)
        assert len(held._unread) == 8
        assert tokens_of([begun[1], *chunks, *await collect(fast)]) == expected(1, num_tokens)
        # It has the rest from a call of its own, and the job has not noticed.
        assert tokens_of([begun[0], *await collect(slow)]) == expected(0, num_tokens)
        assert not server.loop.cancelled
        assert len(server.loop.submitted) == 2


async def test_an_output_has_one_part_that_waits() -> None:
    delivery, written = Delivery("ann"), asyncio.Queue[Any](maxsize=1)
    running = asyncio.create_task(delivery.run(written.put))
    # The first message names the delivery; the second is not written before the first is read.
    await delivery.put(1, b"a")
    await until(lambda: written.full() and not delivery._parts)
    await delivery.put(1, b"b")
    waiting = [asyncio.create_task(delivery.put(output, b"c")) for output in (1, 2)]
    await waiting[1]
    await asyncio.sleep(0)
    assert not waiting[0].done()
    assert (await written.get()).delivery == delivery.id
    assert [await written.get(), await written.get()] == [b"a", b"bc"]
    await waiting[0]
    assert await written.get() == b"c"
    running.cancel()


async def test_a_delivery_that_is_closed_ends_after_its_outputs() -> None:
    delivery, written = Delivery("ann"), asyncio.Queue[Any]()
    running = asyncio.create_task(delivery.run(written.put))
    delivery.add(1)
    delivery.close()
    await delivery.put(1, b"a")
    await until(lambda: written.qsize() == 2)
    assert not running.done()
    delivery.remove(1)
    await running


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    """Two keys."""
    (tmp_path / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\n")
    return KeyFile(tmp_path / "keys")


async def test_a_delivery_of_another_caller_is_unknown(keys: KeyFile) -> None:
    async with (
        generation_server(interceptors=(KeyInterceptor(keys),)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = delivery_stub(channel)
        delivery = stub.Deliver(pb.DeliverRequest(), metadata=(("authorization", f"Bearer {ANN}"),))
        number = (await delivery.read()).delivery
        request = pb.GenerateRequest(input_ids=pb.TokenIds(ids=prompt_of(0)), delivery=pb.Delivery(id=number, output=1))
        for key, wrong in ((BOB, number), (ANN, number + 1)):
            request.delivery.id = wrong
            call = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
            assert await call.code() is grpc.StatusCode.NOT_FOUND
        assert not server.loop.submitted


async def test_callers_of_one_connection_get_their_own_outputs(keys: KeyFile) -> None:
    async with (
        generation_server(interceptors=(KeyInterceptor(keys, max_streams=4),)) as server,
        AsyncClient(server.address, together_from=0) as client,
    ):
        clients = [client.with_key(ANN), client.with_key(BOB)]
        # The deliveries are none of the streams that a key may have.
        found = await asyncio.gather(
            *(collect(clients[number % 2].generate(prompt_of(number), max_new_tokens=30)) for number in range(8))
        )
        assert [tokens_of(chunks) for chunks in found] == [expected(number, 30) for number in range(8)]
        assert [len((await one.list_jobs()).jobs) for one in clients] == [4, 4]


async def test_a_client_without_a_delivery_gets_each_output_by_itself(keys: KeyFile) -> None:
    async with generation_server(interceptors=(KeyInterceptor(keys),)) as server, AsyncExitStack() as held:
        channel = await held.enter_async_context(grpc.aio.insecure_channel(server.address))
        stub, key = delivery_stub(channel), (("authorization", f"Bearer {ANN}"),)
        taken = [stub.Deliver(pb.DeliverRequest(), metadata=key) for _ in range(MAX_OF_AN_OWNER)]
        for delivery in taken:
            await delivery.read()
        assert await stub.Deliver(pb.DeliverRequest(), metadata=key).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        client = await held.enter_async_context(AsyncClient(server.address, api_key=ANN, together_from=0))
        found = await asyncio.gather(*(collect(client.generate(prompt_of(n), max_new_tokens=9)) for n in range(3)))
        assert [tokens_of(chunks) for chunks in found] == [expected(number, 9) for number in range(3)]
        for delivery in taken:
            delivery.cancel()


async def test_calls_end_with_their_delivery_and_it_ends_without_calls() -> None:
    async with together() as (server, client), grpc.aio.insecure_channel(server.address) as channel:
        server.loop.pause_tokens = TOKENS_PER_STEP
        stub = delivery_stub(channel)
        delivery = stub.Deliver(pb.DeliverRequest())
        place = pb.Delivery(id=(await delivery.read()).delivery, output=1)
        ids = pb.TokenIds(ids=prompt_of(0))
        call = stub.Generate(pb.GenerateRequest(input_ids=ids, delivery=place))
        await delivery.read()
        again = stub.Generate(pb.GenerateRequest(input_ids=ids, delivery=place))
        assert await again.code() is grpc.StatusCode.INVALID_ARGUMENT
        delivery.cancel()
        server.loop.pause_tokens = None
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: len(server.loop.cancelled) == 1)
        # The client's own is over with its last output.
        outputs: list[AsyncGenerator[OutputChunk, None]] = [client.generate(prompt_of(1)) for _ in range(2)]
        for output in outputs:
            async with aclosing(output):
                await anext(output)
        mine = client._servers[0].delivery
        assert mine is not None
        assert mine.is_over
