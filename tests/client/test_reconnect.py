"""A client whose connection breaks, and one without an event loop, against the scheduler's clients' side."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import islice

import pytest

from slipstream.client import AsyncClient, Client
from slipstream.common.errors import (
    AlreadyExistsError,
    ConfigError,
    ConnectionLostError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from slipstream.common.wire.job import JobState, OutputChunk
from tests.harness.breaking_proxy import BreakingProxy, breaking_proxy
from tests.harness.example_states import STATE, TOKENS_PER_STEP
from tests.harness.generation_server import GenerationServer, generation_server
from tests.harness.grpc_server import unserved_address
from tests.harness.waiting import DEADLINES_S, until


@asynccontextmanager
async def behind_a_proxy() -> AsyncIterator[tuple[GenerationServer, BreakingProxy, AsyncClient]]:
    """A server, a way to it that breaks, and a client that goes that way."""
    async with (
        generation_server() as server,
        breaking_proxy(server.address) as (address, proxy),
        AsyncClient(address) as client,
    ):
        yield server, proxy, client


def tokens_of(chunks: list[OutputChunk]) -> list[int]:
    """The tokens of a job."""
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_a_watch_goes_on_where_the_connection_broke() -> None:
    async with behind_a_proxy() as (server, proxy, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        await client.create_job("Hello", job_id="mine", max_new_tokens=31)
        chunks: list[OutputChunk] = []
        async for chunk in client.watch_job("mine"):
            chunks.append(chunk)
            # Before, between and after tokens, wherever the stream is.
            proxy.cut()
            server.loop.pause_tokens += TOKENS_PER_STEP
        assert proxy.num_connections > 5
        prompt = server.model.tokenizer.encode("Hello")
        assert tokens_of(chunks) == [prompt[number % len(prompt)] for number in range(31)]
        text = server.model.tokenizer.decode(tokens_of(chunks), skip_special_tokens=True)
        assert "".join(chunk.text for chunk in chunks) == text
        assert chunks[-1].finish_reason == "length"
        assert not server.loop.cancelled


async def test_every_sample_goes_on_where_the_connection_broke() -> None:
    async with behind_a_proxy() as (server, proxy, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        # Two slots, so that some end before others begin.
        server.loop.slots = 2
        await client.create_job("Hello", job_id="mine", n=4, max_new_tokens=16)
        chunks: list[OutputChunk] = []
        async for chunk in client.watch_job("mine"):
            chunks.append(chunk)
            proxy.cut()
            server.loop.pause_tokens += TOKENS_PER_STEP
        assert proxy.num_connections > 2
        prompt = server.model.tokenizer.encode("Hello")
        for index in range(4):
            sample = [chunk for chunk in chunks if chunk.sample_index == index]
            assert tokens_of(sample) == [prompt[number % len(prompt)] for number in range(16)]
            text = server.model.tokenizer.decode(tokens_of(sample), skip_special_tokens=True)
            assert "".join(chunk.text for chunk in sample) == text
            assert [chunk.finish_reason for chunk in sample if chunk.finish_reason] == ["length"]
        assert [chunk.job_usage is not None for chunk in chunks] == [*(False for _ in chunks[:-1]), True]


async def test_a_create_whose_answer_was_lost_is_sent_again() -> None:
    async with behind_a_proxy() as (server, proxy, client):
        await client.server_info()
        server.loop.may_step.clear()
        proxy.lets_answers_through.clear()
        created = asyncio.ensure_future(client.create_job([5, 6], max_new_tokens=4))
        await until(lambda: server.manager.num_jobs == 1)
        proxy.cut()
        proxy.lets_answers_through.set()
        job = await created
        assert proxy.num_connections == 2
        assert server.manager.num_jobs == 1
        server.loop.may_step.set()
        assert tokens_of([chunk async for chunk in client.watch_job(job.job_id)]) == [5, 6, 5, 6]


async def test_a_create_is_sent_again_while_the_server_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slipstream.client")
    errors = [UnavailableError("no scheduler", retry_after_ms=1) for _ in range(4)]

    def check_room(_num_sequences: int = 1) -> None:
        if errors:
            raise errors.pop()

    async with generation_server() as server, AsyncClient(server.address) as client:
        monkeypatch.setattr(server.link, "check_room", check_room)
        with pytest.raises(UnavailableError, match="no scheduler"):
            await client.create_job([5], job_id="first", reconnect_s=0.0)
        assert (await client.create_job([5], job_id="first", max_new_tokens=2)).job_id == "first"
        errors.append(UnavailableError("no scheduler", retry_after_ms=1))
        with Client(server.address) as blocking:
            job = await asyncio.to_thread(blocking.create_job, [5], job_id="second", max_new_tokens=2)
        assert (job.job_id, errors) == ("second", [])
        errors.append(UnavailableError("the journal cannot be written"))
        with pytest.raises(UnavailableError, match="journal"):
            await client.create_job([5], job_id="third", max_new_tokens=2)
        assert f"no scheduler: trying {server.address} for 75 s" in caplog.text
        assert "lost the connection" not in caplog.text


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_noticed", [False, True])
async def test_a_generate_goes_on_where_the_connection_broke(n: int, is_noticed: bool) -> None:
    """Whether the server has cancelled the job by then or not. The seed is the server's, and drawn once."""
    async with behind_a_proxy() as (server, proxy, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        chunks: list[OutputChunk] = []
        async for chunk in client.generate("Hello", n=n, max_new_tokens=31, temperature=0.5):
            chunks.append(chunk)
            proxy.cut()
            if is_noticed:
                await server.manager.wait_idle()
            server.loop.pause_tokens += TOKENS_PER_STEP
        assert proxy.num_connections > 3
        prompt = server.model.tokenizer.encode("Hello")
        for index in range(n):
            sample = [chunk for chunk in chunks if chunk.sample_index == index]
            assert tokens_of(sample) == [prompt[number % len(prompt)] for number in range(31)]
            text = server.model.tokenizer.decode(tokens_of(sample), skip_special_tokens=True)
            assert "".join(chunk.text for chunk in sample) == text
        assert chunks[-1].job_usage is not None
        assert len({chunk.attempt for chunk in chunks}) == 1
        seeds = {sequence.spec.sampling.seed for sequence in server.loop.submitted}
        assert len(seeds) == n


async def test_tokens_of_another_attempt_are_not_joined() -> None:
    async with behind_a_proxy() as (server, proxy, client):
        server.loop.pause_tokens = TOKENS_PER_STEP
        chunks = client.generate([5], job_id="mine", max_new_tokens=9)
        first = await anext(chunks)
        proxy.cut()
        await server.manager.wait_idle()
        server.loop.serve(model="other")
        await until(lambda: server.link.model().identity == "other")
        server.model = server.link.model()
        again = await client.create_job([5], job_id="mine", max_new_tokens=9)
        assert again.attempt > first.attempt
        message = f"got {first.attempt}, but job 'mine' began anew, as attempt {again.attempt}"
        with pytest.raises(FailedPreconditionError, match=message):
            await anext(chunks)
        with pytest.raises(FailedPreconditionError, match=message):
            await anext(client.watch_job("mine", 3, attempt=first.attempt))


async def test_a_server_that_never_answers_is_an_error_with_its_address() -> None:
    """When the connect timeout has passed; the longer time is for a connection that was lost."""
    with unserved_address() as address:
        message = f"no answer from a server at {address}: .*refused"
        async with AsyncClient(address, connect_timeout_s=0.1) as client:
            with pytest.raises(ConnectionLostError, match=message):
                await client.create_job("a", reconnect_s=60.0)
            with pytest.raises(ConnectionLostError, match=message):
                await anext(client.watch_job("a", reconnect_s=60.0))
            with pytest.raises(ConnectionLostError, match=message):
                await anext(client.generate("a", reconnect_s=60.0))
        async with AsyncClient(address, connect_timeout_s=60.0) as client:
            with pytest.raises(DeadlineExceededError):
                await anext(client.watch_job("a", timeout_s=0.1))

        def use() -> None:
            with Client(address, connect_timeout_s=0.1) as client:
                with pytest.raises(ConnectionLostError, match=message):
                    client.create_job("a", reconnect_s=60.0)
                with pytest.raises(ConnectionLostError, match=message):
                    next(client.generate("a", reconnect_s=60.0))

        await asyncio.to_thread(use)


async def test_a_server_that_takes_connections_and_is_silent_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(address, connect_timeout_s=0.3) as client:
            with pytest.raises(ConnectionLostError, match=f"no answer from a server at {address}"):
                await client.create_job("a", reconnect_s=60.0)


async def test_a_client_waits_for_a_server_that_starts(tmp_path: object) -> None:
    address = f"unix:{tmp_path}/a.sock"
    async with AsyncClient(address) as client:
        creating = asyncio.ensure_future(client.create_job([5, 6], max_new_tokens=2))
        with Client(address) as blocking:
            listing = asyncio.ensure_future(asyncio.to_thread(lambda: list(blocking.generate([5], max_new_tokens=2))))
            await asyncio.sleep(0)
            async with generation_server(address=address):
                assert tokens_of([chunk async for chunk in client.watch_job((await creating).job_id)]) == [5, 6]
                assert tokens_of(await listing) == [5, 5]


async def test_a_server_that_was_reached_is_tried_for_longer(
    tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slipstream.client")
    address = f"unix:{tmp_path}/a.sock"
    async with AsyncClient(address, connect_timeout_s=5.0) as client:
        async with generation_server(address=address):
            await client.create_job("a", job_id="a")
        with pytest.raises(ConnectionLostError):
            await client.create_job("a", reconnect_s=0.1)
        with pytest.raises(ConnectionLostError):
            await anext(client.watch_job("a", reconnect_s=0.1))
        with pytest.raises(ConnectionLostError):
            await anext(client.generate("a", reconnect_s=0.1))
        assert caplog.text.count(f"lost the connection: trying {address} for 0.1 s") == 3
        watching = asyncio.ensure_future(anext(client.watch_job("b")))
        async with generation_server(address=address):
            with pytest.raises(NotFoundError):
                await watching


@pytest.mark.parametrize("address", ["", "here", "127.0.0.1", "127.0.0.1:x", "http://127.0.0.1:1", "dns:///host"])
def test_a_client_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^address: got "):
        Client(address)


async def test_the_plain_client_does_all_that(tmp_path: object) -> None:
    async with generation_server(address=f"unix:{tmp_path}/a.sock") as server:

        def use() -> None:
            with Client(server.address) as client:
                assert client.server_info() == STATE
                assert tokens_of(list(client.generate([5, 6], max_new_tokens=6))) == [5, 6] * 3
                job = client.create_job([5, 6], job_id="mine", max_new_tokens=6)
                assert client.create_job([5, 6], job_id="mine", max_new_tokens=6).created_at == job.created_at
                with closing(client.watch_job("mine")) as chunks:
                    next(chunks)  # a job has no token at first
                assert tokens_of(list(client.watch_job("mine", 1))) == [6, 5, 6, 5, 6]
                assert client.get_job("mine").state is JobState.ENDED
                assert client.list_jobs(page_size=1).jobs[0].job_id == "mine"
                with pytest.raises(AlreadyExistsError):
                    client.create_job([7], job_id="mine")
                client.cancel_job("mine")
                assert client.get_job("mine").finish_reason == "length"
                with pytest.raises(NotFoundError):
                    client.cancel_job("other")
                with pytest.raises(InvalidArgumentError, match="temperature"):
                    list(client.generate([5], temperature=-1.0))
                with pytest.raises(InvalidArgumentError, match="top_k"):
                    client.generate([5], top_k=-1)

        await asyncio.to_thread(use)


async def test_the_plain_client_cancels() -> None:
    async with generation_server() as server:
        server.loop.pause_tokens = TOKENS_PER_STEP

        def use() -> None:
            with Client(server.address) as client:
                # By leaving.
                with closing(client.generate([5], job_id="left", max_new_tokens=9)) as chunks:
                    assert next(chunks).token_ids == (5, 5, 5)
                # By a call, from another thread.
                chunks = client.generate([5], job_id="called", max_new_tokens=9)
                next(chunks)
                threading.Thread(target=client.cancel_job, args=("called",)).start()
                assert [chunk.finish_reason for chunk in chunks] == ["abort"]
                # By its deadline.
                for timeout_s in DEADLINES_S:
                    with pytest.raises(DeadlineExceededError):
                        list(client.generate([5], job_id="late", max_new_tokens=9, timeout_s=timeout_s))
                    if server.loop.submitted[-1].spec.job_id == "late":
                        break

        await asyncio.to_thread(use)
        await server.manager.wait_idle()
        assert [job.spec.job_id for job in server.loop.cancelled] == ["left", "called", "late"]


async def test_the_plain_client_goes_on_where_the_connection_broke() -> None:
    async with generation_server() as server, breaking_proxy(server.address) as (address, proxy):
        loop = asyncio.get_running_loop()
        server.loop.pause_tokens = TOKENS_PER_STEP

        def cut() -> None:
            proxy.cut()
            server.loop.pause_tokens = None

        def use() -> list[int]:
            with Client(address) as client:
                client.create_job([5, 6], job_id="mine", max_new_tokens=12)
                chunks = client.watch_job("mine")
                first = list(islice(chunks, 1))
                loop.call_soon_threadsafe(cut)
                return tokens_of([*first, *chunks])

        assert await asyncio.to_thread(use) == [5, 6] * 6
        assert proxy.num_connections >= 2
