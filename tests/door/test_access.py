"""Keys and TLS of a public door, and clients that mean no good."""

from __future__ import annotations

import asyncio
import resource
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from slipstream.client import AsyncClient
from slipstream.common.wire.job import JobState
from slipstream.door.call import LARGE_BODY_BYTES, MAX_COMMAS
from slipstream.door.fields import parse
from slipstream.door.server import MAX_HEAD_BYTES
from slipstream.gateway.keys import KeyFile, KeyInterceptor
from tests.harness.certificates import Certificates
from tests.harness.doors import RunningDoor, running_door
from tests.harness.example_states import CONTEXT_TOKENS, TOKENS_PER_STEP
from tests.harness.generation_server import GenerationServer, generation_server
from tests.harness.waiting import is_listening, until

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"


@asynccontextmanager
async def keyed_door(
    path: Path, *, quota: int | None = None, **settings: Any
) -> AsyncIterator[tuple[GenerationServer, RunningDoor]]:
    """A door at the private address of a gateway with two keys."""
    keys = path / "keys"
    keys.write_text(f"ann:{ANN}\nbob:{BOB}\n")
    interceptor = KeyInterceptor(KeyFile(keys)).optional()
    async with (
        generation_server(interceptors=(interceptor,), key_tokens=quota) as server,
        running_door(server.address, api_key=ANN, asks_for_keys=True, **settings) as door,
    ):
        yield server, door


async def test_a_caller_needs_a_key_that_the_gateway_knows(tmp_path: Path) -> None:
    async with keyed_door(tmp_path) as (_, door):
        await door.openai.completions.create(model="tiny", prompt="a", max_tokens=2)
        for headers in (
            {},
            {"authorization": "Bearer wrong-key"},
            {"authorization": ANN},
            {"authorization": "Bearer é"},
        ):
            sent = {name: value.encode() for name, value in headers.items()}
            async with httpx.AsyncClient(base_url=door.url, headers=sent, trust_env=False) as http:
                for path in ("/v1/completions", "/tokenize", "/v1/responses"):
                    fields = {"input" if "responses" in path else "prompt": "a", "model": "other"}
                    answer = await http.post(path, json=fields)
                    assert answer.status_code == 401, (path, headers, answer.text)
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"
                    # What is wrong with a request is not for who has no key.
                    assert (await http.post("/v1/completions", json={"prompt": [5] * 5000})).status_code == 401
                    assert (await http.post("/v1/completions", json={"prompt": "a", "n": -1})).status_code == 401
                    assert (await http.post(path, content=b"{")).status_code == 401
                    assert (await http.post(path, json={"mood": 1})).status_code == 401
                for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
                    # What is served is known now, and not asked for again for a while.
                    assert (await door.http.get("/v1/models")).status_code == 200
                    assert (await http.get(path)).status_code == 401
                assert (await http.get("/health")).status_code == 200
        assert (await door.http.get("/metrics")).status_code == 200


async def test_no_body_is_received_without_a_key(tmp_path: Path) -> None:
    async with keyed_door(tmp_path) as (_, door):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
            reader, writer = await connected(door)
            head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer wrong-key\r\ncontent-length: 8000000"
            writer.write(head.encode() + b"\r\n\r\n{")
            async with asyncio.timeout(20):
                assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            writer.close()


async def test_bodies_of_a_key_leave_room_for_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.door.call.MAX_ARRIVING_BYTES_OF_A_KEY", 100)
    begun = f"POST /tokenize HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {ANN}\r\ncontent-length: 100\r\n\r\n".encode()
    async with keyed_door(tmp_path) as (_, door), asyncio.timeout(30):
        both = [await connected(door) for _ in range(2)]
        for _, writer in both:
            writer.write(begun + b" " * 60)
        answers = [asyncio.ensure_future(reader.readline()) for reader, _ in both]
        (answered,), (waits,) = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert (await answered).startswith(b"HTTP/1.1 503 ")
        answer = await door.http.post("/tokenize", json={"prompt": "a"}, headers={"authorization": f"Bearer {BOB}"})
        assert answer.status_code == 200
        for _, writer in both:
            writer.close()
        await waits


async def test_neither_of_two_keys_sees_or_cancels_the_other_s_jobs(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    secured = {"tls_cert": certificates.cert, "tls_key": certificates.key}
    async with keyed_door(tmp_path, **secured) as (server, door):
        server.loop.pause_tokens = 2
        trusted = ssl.create_default_context(cafile=str(certificates.ca))
        async with (
            httpx.AsyncClient(verify=trusted, trust_env=False) as http,
            AsyncClient(server.address, api_key=ANN) as ann,
            AsyncClient(server.address, api_key=BOB) as bob,
        ):
            streams = []
            for key in (ANN, BOB):
                caller = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=key, http_client=http, max_retries=0)
                stream = await caller.completions.create(model="tiny", prompt="abc", max_tokens=9, stream=True)
                await anext(aiter(stream))
                streams.append(stream)
            (job,), (other,) = (await ann.list_jobs()).jobs, (await bob.list_jobs()).jobs
            for own, mine, foreign in ((ann, job, other), (bob, other, job)):
                with pytest.raises(Exception, match="no job"):
                    await own.cancel_job(foreign.job_id)
                assert (await own.get_job(mine.job_id)).state is JobState.RUNNING
            server.loop.pause_tokens = None
            for stream in streams:
                await stream.close()


async def test_a_key_s_quota_is_the_caller_s(tmp_path: Path) -> None:
    async with keyed_door(tmp_path, quota=20) as (server, door):
        server.loop.pause_tokens = 1
        stream = await door.openai.completions.create(model="tiny", prompt=[5, 6], max_tokens=15, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await door.openai.completions.create(model="tiny", prompt=[5, 6], max_tokens=15)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "rate_limit_exceeded"
        server.loop.pause_tokens = None
        await stream.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_job(stream: bool) -> None:
    async with generation_server() as server, running_door(server.address) as door:
        server.loop.pause_tokens = 2
        request: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 9, "stream": stream, "n": 2}
        call = asyncio.ensure_future(door.openai.completions.create(**request))
        await until(lambda: len(server.loop.running) == 2)
        if stream:
            await (await call).close()
        else:
            call.cancel()
        await until(lambda: len(server.loop.cancelled) == 2)
        server.loop.pause_tokens = None


async def connected(door: RunningDoor) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the door."""
    host, _, port = door.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def health_s(door: RunningDoor) -> float:
    """Seconds that a health check takes."""
    begun = time.monotonic()
    assert (await door.http.get("/health")).status_code == 200
    return time.monotonic() - begun


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{"])
async def test_slow_connections_leave_room_for_others(sent: bytes) -> None:
    async with generation_server() as server, running_door(server.address, max_connections=64) as door:
        writers = []
        for _ in range(300):
            _, writer = await connected(door)
            writer.write(sent)
            writers.append(writer)
        await health_s(door)
        assert len(door.server.server_state.connections) <= 64
        for writer in writers:
            writer.close()


async def test_a_request_that_came_with_another_is_none_that_is_waited_for() -> None:
    """The answer before it is sent, and the connection that waits is another one."""
    async with generation_server() as server, running_door(server.address, max_connections=2) as door:
        server.loop.pause_tokens = TOKENS_PER_STEP
        reader, writer = await connected(door)
        body = b'{"prompt": [5, 6], "max_tokens": 9, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n" + head + body)
        await until(lambda: len(server.loop.submitted) == 1)
        others = [await connected(door) for _ in range(2)]
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                assert await others[0][0].read() == b""
            server.loop.pause_tokens = None
            assert await reader.readuntil(b"data: [DONE]")
        for one in (writer, *(other for _, other in others)):
            one.close()


async def test_health_is_served_beside_1500_slow_connections(tmp_path: Path) -> None:
    """By a door whose process begins with room for few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    path, sent = str(tmp_path / "door"), b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"
    transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_keepalive_connections=0))
    async with generation_server() as server, httpx.AsyncClient(base_url="http://a", transport=transport) as http:
        options = f"--listen unix:{path} --gateway {server.address}"
        command = f"ulimit -S -n 256 && exec {sys.executable} -m slipstream.door.main {options}"
        process = await asyncio.create_subprocess_shell(command, stderr=asyncio.subprocess.DEVNULL)
        try:
            await until(lambda: is_listening(path))
            writers = []
            for number in range(1500):
                _, writer = await asyncio.open_unix_connection(path)
                writer.write(sent[: number % len(sent)])
                writers.append(writer)
                if number % 100 == 0:
                    assert (await http.get("/health")).status_code == 200
            answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.status_code == 200
            for writer in writers:
                writer.close()
        finally:
            process.kill()
            await process.wait()


async def test_a_request_must_arrive_in_time() -> None:
    async with generation_server() as server, running_door(server.address, read_timeout_s=0.5) as door:
        for sent in (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{"):
            reader, writer = await connected(door)
            writer.write(sent)
            async with asyncio.timeout(10):
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        await until(lambda: len(door.server.server_state.tasks) == 0)


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async with generation_server() as server, running_door(server.address, read_timeout_s=0.5) as door:
        _, writer = await connected(door)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = b'{"prompt": [5, 6], "max_tokens": 4000, "logprobs": 20, "n": 8, "stream": true, "ignore_eos": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: len(server.loop.submitted) == 8)
        await until(lambda: len(door.server.server_state.tasks) == 0)
        await until(lambda: server.manager.num_jobs == 0)
        writer.close()


async def test_heads_are_bounded() -> None:
    async with generation_server() as server, running_door(server.address) as door:
        for flood in (b"x-a: %s\r\n" % (b"a" * 4 * MAX_HEAD_BYTES), b"x: y\r\n" * MAX_HEAD_BYTES):
            reader, writer = await connected(door)
            with suppress(ConnectionError):
                writer.write(b"GET /health HTTP/1.1\r\n" + flood)
                await writer.drain()
                assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
            writer.close()
        answer = await door.http.post("/v1/completions", content=b'{"prompt": "%s"}' % (b"a" * 2**20))
        assert answer.status_code == 400  # a body is no head


async def test_a_large_body_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def recorded(body: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(body, kind)

    monkeypatch.setattr("slipstream.door.call.parse", recorded)
    async with generation_server() as server, running_door(server.address) as door:
        for num_bytes, is_beside in ((10, False), (LARGE_BODY_BYTES, True)):
            answer = await door.post("/v1/completions", prompt="a" * num_bytes, max_tokens=2)
            assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded"
            assert (threads.pop() is not threading.main_thread()) == is_beside


async def test_a_body_with_more_values_than_fit_the_context_is_not_read() -> None:
    async with generation_server() as server, running_door(server.address) as door:
        most = MAX_COMMAS + CONTEXT_TOKENS
        for count, code in ((most, "context_length_exceeded"), (most + 1, "request_too_large")):
            answer = await door.http.post("/v1/completions", content=b'{"prompt": [5%s]}' % (count * b",5"))
            assert answer.json()["error"]["code"] == code


async def test_health_is_answered_beside_large_bodies() -> None:
    async with generation_server() as server, running_door(server.address) as door:
        text, ids = {"prompt": "a " * 2**20 + "b" * 2**21}, {"prompt": [5] * 10**6}
        done = asyncio.Event()

        async def load(fields: dict[str, Any]) -> None:
            while not done.is_set():
                assert (await door.post("/v1/completions", **fields)).status_code in (400, 413, 429)

        loads = [asyncio.create_task(load(fields)) for fields in (text, ids)]
        # The client of these bodies computes on this thread, too: only that all are answered counts here.
        for _ in range(10):
            await health_s(door)
        done.set()
        await asyncio.gather(*loads)
        assert (await door.http.post("/v1/completions", content=b"a" * (9 * 2**20))).status_code == 413
