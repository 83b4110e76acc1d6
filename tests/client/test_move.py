"""A stream that goes on at another server: the client's part, over real gateways."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from slipstream.client import AsyncClient, Client
from slipstream.common.errors import (
    ConfigError,
    ConnectionLostError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from slipstream.common.wire.job import OutputChunk
from tests.harness.breaking_proxy import breaking_proxy
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import collect, generation_server, text_of, tokens_of
from tests.harness.grpc_server import unserved_address
from tests.harness.waiting import until

LENGTH = 31


def expected(prompt: list[int]) -> list[int]:
    """The tokens that the scripted scheduler gives."""
    return [prompt[number % len(prompt)] for number in range(LENGTH)]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_goes_on_at_the_next_server_that_serves(n: int) -> None:
    """After each few tokens its server is gone, and the one before is back; a third address never answers."""
    async with AsyncExitStack() as held:
        servers = [await held.enter_async_context(generation_server()) for _ in range(2)]
        ways = [await held.enter_async_context(breaking_proxy(server.address)) for server in servers]
        dead = held.enter_context(unserved_address())
        client = await held.enter_async_context(AsyncClient([ways[0][0], dead, ways[1][0]]))
        chunks: list[OutputChunk] = []
        for server in servers:
            server.loop.pause_tokens = TOKENS_PER_STEP
        async for chunk in client.generate("Hello", n=n, max_new_tokens=LENGTH, temperature=0.5, job_id="mine"):
            chunks.append(chunk)
            if chunk.finish_reason is None:
                for server, (_, proxy) in zip(servers, ways, strict=True):
                    proxy.cut()
                    server.loop.pause_tokens = (server.loop.pause_tokens or 0) + TOKENS_PER_STEP
        prompt = servers[0].model.tokenizer.encode("Hello")
        for index in range(n):
            sample = [chunk for chunk in chunks if chunk.sample_index == index]
            assert tokens_of(sample) == expected(prompt)
            text = servers[0].model.tokenizer.decode(tokens_of(sample), skip_special_tokens=True)
            assert text_of(sample) == text
        seeds = {sequence.spec.sampling.seed for server in servers for sequence in server.loop.submitted}
        assert len(seeds) == n
        assert all(len(server.loop.submitted) > 2 for server in servers), "the stream has moved there and back"
        for server in servers:
            server.loop.pause_tokens = None
            await server.manager.wait_idle()


async def test_a_moved_stream_waits_for_a_full_queue_and_a_new_one_does_not() -> None:
    async with AsyncExitStack() as held:
        first, second = [await held.enter_async_context(generation_server(capacity=1, slots=1)) for _ in range(2)]
        address, proxy = await held.enter_async_context(breaking_proxy(first.address))
        client = await held.enter_async_context(AsyncClient([address, second.address]))
        for server in (first, second):
            server.loop.pause_tokens = TOKENS_PER_STEP
        async with AsyncClient(second.address) as other:
            for number in range(2):
                await other.create_job([7], job_id=str(number), max_new_tokens=LENGTH)
                await until(lambda: second.link.num_running == 1)
            assert second.link.num_waiting == 1
            with pytest.raises(ResourceExhaustedError):
                await collect(AsyncClient([second.address, address]).generate([5], reconnect_s=9))
            stream = client.generate([5, 6], max_new_tokens=LENGTH)
            chunks = [await anext(stream)]
            first.absence = UnavailableError("no scheduler", retry_after_ms=10)
            proxy.cut()
            reading = asyncio.create_task(collect(stream))
            await until(lambda: second.metric("requests_total", outcome="refused") >= 3)
            assert not reading.done()
            second.loop.pause_tokens = None
            assert tokens_of([*chunks, *await reading]) == expected([5, 6])


async def test_a_name_of_several_servers_may_lead_to_another_one(tmp_path: Path) -> None:
    """A list of one address: its next server does not know the job. A plain address is one server's, and fails."""
    address = f"unix:{tmp_path}/a.sock"
    async with AsyncClient([address]) as client, AsyncClient(address) as plain:
        async with generation_server(address=address) as server:
            server.loop.pause_tokens = TOKENS_PER_STEP
            streams = [one.generate([5, 6], max_new_tokens=LENGTH) for one in (client, plain)]
            first = [await anext(stream) for stream in streams]
        async with generation_server(address=address):
            assert tokens_of([first[0], *await collect(streams[0])]) == expected([5, 6])
            with pytest.raises(FailedPreconditionError, match="is not known any more"):
                await anext(streams[1])


async def test_jobs_stay_with_the_first_server() -> None:
    async with (
        generation_server() as first,
        generation_server() as second,
        breaking_proxy(first.address) as (address, proxy),
        AsyncClient([address, second.address]) as client,
    ):
        first.loop.pause_tokens = TOKENS_PER_STEP
        stream = client.generate([5, 6], max_new_tokens=LENGTH)
        chunks = [await anext(stream)]
        proxy.cut()
        chunks += await collect(stream)
        assert tokens_of(chunks) == expected([5, 6])
        await client.create_job([5], job_id="mine")
        assert first.manager.get("mine")
        with pytest.raises(NotFoundError):
            await client.get_job(chunks[-1].job_id)
        # The next stream begins where the last one went on.
        assert tokens_of(await collect(client.generate([7], max_new_tokens=2))) == [7, 7]
        assert second.loop.submitted[-1].spec.prompt == (7,)


async def test_the_plain_client_moves_as_well() -> None:
    async with (
        generation_server() as first,
        generation_server() as second,
        breaking_proxy(first.address) as (address, proxy),
    ):
        loop = asyncio.get_running_loop()
        first.loop.pause_tokens = TOKENS_PER_STEP

        def use() -> list[int]:
            with Client([address, second.address]).with_key("key") as client:
                stream = client.generate([5, 6], max_new_tokens=LENGTH)
                chunks = [next(stream)]
                loop.call_soon_threadsafe(proxy.cut)
                return tokens_of([*chunks, *stream])

        assert await asyncio.to_thread(use) == expected([5, 6])
        assert second.loop.submitted


async def test_no_server_that_serves_is_an_error_with_its_address() -> None:
    with unserved_address() as one, unserved_address() as other:
        async with AsyncClient([one, other], connect_timeout_s=0.1) as client:
            with pytest.raises(ConnectionLostError, match=f"no answer from a server at {one}"):
                await anext(client.generate("a"))
    with pytest.raises(ConfigError, match="address: got \\[\\], accepted: at least one address"):
        AsyncClient([])
