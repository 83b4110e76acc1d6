"""Tests of API keys, with real calls: who is let in, and how much each may use."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipstream.client import AsyncClient, Client
from slipstream.client.connection import API_KEY_VARIABLE
from slipstream.common.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from slipstream.common.rpc.interceptor import replaced
from slipstream.common.wire.job import JobState, OutputChunk
from slipstream.gateway.keys import KeyFile, KeyInterceptor, current_owner
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import GenerationServer, generation_server, state_of, tokens_of

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"


def write(path: Path, *keys: str) -> None:
    """Puts a new file in the place of the old one."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{key}\n" for key in keys))
    new.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two keys."""
    write(tmp_path / "keys", "# clients", f"ann:{ANN}", "", f"bob:{BOB}")
    return tmp_path / "keys"


@asynccontextmanager
async def keyed_server(path: Path, **options: Any) -> AsyncIterator[GenerationServer]:
    """A server that asks for a key."""
    async with generation_server(interceptors=(KeyInterceptor(KeyFile(path), **options),)) as server:
        yield server


async def test_nothing_but_health_is_served_without_a_key(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with keyed_server(path) as server:
        for key in (None, ANN[:-1], ANN + "x", "ann", f"ann:{ANN}"):
            async with AsyncClient(server.address, api_key=key) as client:
                with pytest.raises(UnauthenticatedError, match="authorization: Bearer TOKEN"):
                    await client.server_info()
                with pytest.raises(UnauthenticatedError):
                    await anext(client.generate([2, 3], max_new_tokens=4))
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ANN[:8] not in caplog.text


async def test_a_key_by_argument_and_by_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed_server(path) as server:
        async with AsyncClient(server.address, api_key=ANN) as client:
            chunks = [chunk async for chunk in client.generate([2, 3, 4], max_new_tokens=5)]
            assert tokens_of(chunks) == [2, 3, 4, 2, 3]
            assert (await client.server_info()).model == "tiny"
        monkeypatch.setenv(API_KEY_VARIABLE, BOB)

        def generate() -> list[int]:
            with Client(server.address) as blocking:
                return tokens_of(list(blocking.generate([2, 3, 4], max_new_tokens=5)))

        assert await asyncio.to_thread(generate) == [2, 3, 4, 2, 3]


@pytest.mark.parametrize("key", ["a b", "tab\tkey", "schlüssel"])
async def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^api_key: got '\d+ characters'"):
        AsyncClient("127.0.0.1:1", api_key=key)


async def test_the_metadata_must_name_one_bearer(path: Path) -> None:
    async with keyed_server(path) as server, grpc.aio.insecure_channel(server.address) as channel:

        async def code(*values: str) -> str:
            call = channel.unary_unary("/slipstream.v1.Generation/GetServerInfo")
            try:
                await call(b"", metadata=tuple(("authorization", value) for value in values))
            except grpc.aio.AioRpcError as error:
                name: str = error.code().name
                return name
            return "OK"

        assert await code(f"Bearer {ANN}") == await code(f"bearer  {ANN}") == "OK"
        for values in ([], [""], ["Bearer"], ["Bearer "], [ANN], [f"Basic {ANN}"], [f"Bearer {ANN}"] * 2):
            assert await code(*values) == "UNAUTHENTICATED", values


async def test_streams_of_a_key_are_bounded(path: Path) -> None:
    async with (
        keyed_server(path, max_streams=2) as server,
        AsyncClient(server.address, api_key=ANN) as ann,
        AsyncClient(server.address, api_key=BOB) as bob,
    ):
        server.loop.pause_tokens = 3
        running = [ann.generate([2, 3], max_new_tokens=50) for _ in range(2)]
        for stream in running:
            await anext(stream)
        with pytest.raises(ResourceExhaustedError, match="2 streams open, of at most 2") as caught:
            await anext(ann.generate([2, 3], max_new_tokens=50))
        assert caught.value.retry_after_ms > 0
        assert len((await ann.list_jobs()).jobs) == 2
        others = bob.generate([2, 3], max_new_tokens=50)
        await anext(others)
        await running.pop().aclose()
        async with asyncio.timeout(20):
            while len(running) == 1:
                again = ann.generate([2, 3], max_new_tokens=50)
                try:
                    await anext(again)
                    running.append(again)
                except ResourceExhaustedError:
                    continue
        for stream in (*running, others):
            await stream.aclose()


class Recording(KeyInterceptor):
    """Asks for the owner where a servicer would."""

    def __init__(self, keys: KeyFile) -> None:
        super().__init__(keys)
        self.owners: list[str] = []

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Puts the question between the interceptor and the servicer."""

        def make(handle: Any) -> Any:
            async def call(request: Any, context: Any) -> Any:
                self.owners.append(current_owner())
                return await handle(request, context)

            return call

        async def recording(details: Any) -> Any:
            return replaced(await continuation(details), make)

        return await super().intercept_service(recording, handler_call_details)


async def test_a_call_knows_its_owner(path: Path) -> None:
    interceptor = Recording(KeyFile(path))
    async with generation_server(interceptors=(interceptor,)) as server:
        for key in (ANN, BOB, ANN):
            async with AsyncClient(server.address, api_key=key) as client:
                await client.server_info()
                async for _ in client.generate([2, 3], max_new_tokens=3):
                    pass
    assert [name_of(owner) for owner in interceptor.owners] == ["ann", "ann", "bob", "bob", "ann", "ann"]
    assert len(set(interceptor.owners)) == 2
    assert current_owner() == ""


def name_of(key: str | None) -> str | None:
    """The name of a key that was found."""
    return None if key is None else key.partition(":")[0]


async def test_a_new_token_under_an_old_name_has_nothing_of_the_old_one(path: Path) -> None:
    now = 0.0
    keys, later = KeyFile(path, clock=lambda: now), "ann-later-0123456789abcdef"
    async with generation_server(interceptors=(KeyInterceptor(keys),)) as server:
        async with AsyncClient(server.address, api_key=ANN) as old:
            await old.create_job([2, 3], job_id="mine", max_new_tokens=3)
        write(path, f"ann:{later}")
        now = 2.0
        async with AsyncClient(server.address, api_key=later) as new:
            with pytest.raises(NotFoundError):
                await new.get_job("mine")
            assert (await new.list_jobs()).jobs == ()


def test_a_changed_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    keys = KeyFile(path, clock=lambda: now)
    assert (name_of(keys.find(ANN)), name_of(keys.find(BOB)), name_of(keys.find("x"))) == ("ann", "bob", None)
    write(path, f"bob:{BOB}", "carl:carl-0123456789abcdef")
    assert name_of(keys.find(ANN)) == "ann"
    now = 1.0
    assert [name_of(keys.find(key)) for key in (ANN, BOB, "carl-0123456789abcdef")] == [None, "bob", "carl"]
    write(path, "nonsense")
    now = 2.0
    assert [name_of(keys.find(BOB)), name_of(keys.find(ANN))] == ["bob", None]
    now = 3.0
    assert name_of(keys.find(BOB)) == "bob"
    path.unlink()
    now = 4.0
    assert name_of(keys.find(BOB)) == "bob"
    write(path, "# none")
    now = 6.0
    assert name_of(keys.find(BOB)) is None
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "ERROR", "INFO"]
    assert "carl-" not in caplog.text
    assert "nonsense" not in caplog.text


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (["ann"], 1),
        (["ann:short"], 1),
        (["# fine", "", f"an n:{ANN}"], 3),
        ([f"ann:{ANN}", f"ann:{BOB}"], 2),
        ([f"ann:{ANN}", f"bob:{ANN}"], 2),
        ([f"ann:{ANN} {BOB}"], 1),
    ],
)
def test_a_wrong_line_is_named_without_what_it_says(tmp_path: Path, lines: list[str], number: int) -> None:
    write(tmp_path / "keys", *lines)
    with pytest.raises(ConfigError, match=rf"^api_keys: .*line {number}'") as caught:
        KeyFile(tmp_path / "keys")
    assert not any(secret in str(caught.value) for secret in (ANN, BOB, "short"))


def test_a_file_without_keys_or_open_to_others_is_refused(tmp_path: Path, path: Path) -> None:
    write(tmp_path / "none", "# none")
    with pytest.raises(ConfigError, match=r"^api_keys: "):
        KeyFile(tmp_path / "none")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="no other user can write"):
        KeyFile(path)
    path.chmod(0o640)
    KeyFile(path)


def test_a_token_is_compared_with_all_keys_whatever_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(known: bytes, given: bytes) -> bool:
        compared.append((len(known), len(given)))
        return compare(known, given)

    keys = KeyFile(path)
    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token in (ANN, BOB, "x", ""):
        compared.clear()
        keys.find(token)
        assert compared == [(32, 32), (32, 32)]


async def test_tokens_in_flight_are_bounded_by_key(path: Path) -> None:
    keys = (KeyInterceptor(KeyFile(path)),)
    async with (
        generation_server(interceptors=keys, key_tokens=100) as server,
        AsyncClient(server.address, api_key=ANN) as ann,
        AsyncClient(server.address, api_key=BOB) as bob,
    ):
        server.loop.pause_tokens = 3
        await ann.create_job([2, 3], max_new_tokens=28, n=2, job_id="a")
        with pytest.raises(ResourceExhaustedError, match="60 tokens in flight; 41 more exceed 100") as caught:
            await ann.create_job([2], max_new_tokens=40)
        assert caught.value.retry_after_ms > 0
        await bob.create_job([2], max_new_tokens=99, job_id="b")
        await ann.create_job([2], max_new_tokens=39, job_id="c")
        await ann.cancel_job("a")
        assert [chunk async for chunk in ann.watch_job("a")]
        await ann.create_job([2], max_new_tokens=59)
        with pytest.raises(InvalidArgumentError, match=r"^sampling_params\.max_new_tokens: got '101 tokens"):
            await bob.create_job([2], max_new_tokens=100)


async def test_a_job_that_goes_on_is_bounded_as_a_new_one(path: Path) -> None:
    keys = (KeyInterceptor(KeyFile(path)),)
    async with (
        generation_server(interceptors=keys, key_tokens=100) as server,
        AsyncClient(server.address, api_key=ANN) as ann,
    ):
        server.loop.pause_tokens = TOKENS_PER_STEP

        def call(job_id: str) -> AsyncGenerator[OutputChunk]:
            return ann.generate([2], max_new_tokens=59, job_id=job_id)

        async def leave(job_id: str) -> None:
            async with aclosing(call(job_id)) as chunks:
                await anext(chunks)
            await state_of(ann, job_id, JobState.ENDED)

        await leave("a")
        await leave("b")
        async with aclosing(call("a")) as chunks:
            await anext(chunks)
            with pytest.raises(ResourceExhaustedError, match="60 tokens in flight; 60 more exceed 100"):
                await anext(call("b"))
        await state_of(ann, "a", JobState.ENDED)
        await leave("b")
        # The queue had room.
        assert server.registry.get_sample_value("slipstream_requests_total", {"outcome": "refused"}) == 0


async def test_a_key_sees_its_own_jobs_alone(path: Path) -> None:
    async with (
        keyed_server(path) as server,
        AsyncClient(server.address, api_key=ANN) as ann,
        AsyncClient(server.address, api_key=BOB) as bob,
    ):
        server.loop.pause_tokens = 3
        await ann.create_job([2, 3], max_new_tokens=50, job_id="a")
        for call in (bob.get_job("a"), bob.cancel_job("a"), anext(bob.watch_job("a"))):
            with pytest.raises(NotFoundError):
                await call
        assert (await bob.list_jobs()).jobs == ()
        # The name is free for another key, with another request.
        await bob.create_job([4, 5], max_new_tokens=50, job_id="a")
        async for chunk in bob.watch_job("a"):
            assert set(chunk.token_ids) <= {4, 5}
            await bob.cancel_job("a")
        assert [job.state for job in (await ann.list_jobs()).jobs] == ["running"]
        assert [job.state for job in (await bob.list_jobs()).jobs] == ["ended"]
        await ann.cancel_job("a")


async def test_jobs_that_come_back_after_a_restart_have_their_owner(path: Path, tmp_path: Path) -> None:
    keys, journal = (KeyInterceptor(KeyFile(path)),), tmp_path / "journal"
    async with (
        generation_server(interceptors=keys, journal=journal) as server,
        AsyncClient(server.address, api_key=ANN) as ann,
    ):
        await ann.create_job([2, 3], max_new_tokens=4, job_id="a")
        assert tokens_of([chunk async for chunk in ann.watch_job("a")]) == [2, 3, 2, 3]
        await server.manager.journal.close()
    async with (
        generation_server(interceptors=keys, journal=journal) as server,
        AsyncClient(server.address, api_key=ANN) as ann,
        AsyncClient(server.address, api_key=BOB) as bob,
    ):
        assert (await ann.get_job("a")).num_tokens == 4
        with pytest.raises(NotFoundError):
            await bob.get_job("a")
