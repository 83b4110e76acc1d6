"""How often a stream gets a message, and what is measured of it."""

from __future__ import annotations

import asyncio
import time

from slipstream.client import AsyncClient
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import collect, generation_server, tokens_of
from tests.harness.waiting import block_until, until

NUM_TOKENS = 600


async def test_each_step_is_a_message_without_an_interval() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        num_messages = 0
        async for chunk in client.generate([5, 6], max_new_tokens=30):
            num_messages += 1
            assert 0 < chunk.published_ns <= time.monotonic_ns()
            server.loop.pause_tokens += TOKENS_PER_STEP
        assert num_messages == 10
        assert server.metric("publish_to_send_seconds_count") == 10
        assert server.metric("coalesced_messages_total") == 0


async def test_first_tokens_and_ends_do_not_wait_for_the_interval() -> None:
    async with generation_server(stream_interval_s=1000.0) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        stream = client.generate([5, 6], max_new_tokens=3000)
        first = await anext(stream)
        server.loop.pause_tokens = None
        (rest,) = await asyncio.wait_for(collect(stream), 20)
        assert len(first.token_ids) == TOKENS_PER_STEP
        assert tokens_of([first, rest]) == [5, 6] * 1500


async def test_an_output_that_comes_at_once_ends_at_once() -> None:
    async with generation_server(stream_interval_s=1000.0) as server, AsyncClient(server.address) as client:
        chunks = await asyncio.wait_for(collect(client.generate([5, 6], max_new_tokens=1)), 20)
        assert tokens_of(chunks) == [5]
        assert server.metric("coalesced_messages_total") == 0


async def test_more_comes_when_the_interval_is_over() -> None:
    interval_s = 0.2
    async with generation_server(stream_interval_s=interval_s) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 300
        chunks = client.generate([5, 6], max_new_tokens=303)
        began_at, num_tokens = time.monotonic(), len((await anext(chunks)).token_ids)
        while num_tokens < 300:
            num_tokens += len((await anext(chunks)).token_ids)
            assert time.monotonic() - began_at > interval_s / 2
        server.loop.pause_tokens = None
        assert num_tokens + len(tokens_of(await collect(chunks))) == 303


async def test_a_gateway_that_is_behind_coalesces() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        chunks = client.generate([5, 6], max_new_tokens=NUM_TOKENS)
        assert len((await anext(chunks)).token_ids) == TOKENS_PER_STEP
        await until(lambda: server.metric("publish_to_send_seconds_count") == 1)
        server.loop.pause_tokens = None
        block_until(lambda: not server.loop.running)  # holding up the event loop is the point
        assert len(tokens_of(await collect(chunks))) == NUM_TOKENS - TOKENS_PER_STEP
        assert server.metric("coalesced_messages_total") >= 1
