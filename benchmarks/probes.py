"""Probes of a gateway: large, hostile and many requests, while health must answer and the event loop go on."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, Self

import grpc.aio
import psutil
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from slipstream.benchmarks.runner import Names, Row, Table, benchmark, host, write_json
from slipstream.benchmarks.stack import LOG_DIR, SCRIPTS, Stack, words
from slipstream.benchmarks.watched_gateway import longest_stalls, watched_gateway
from slipstream.common.rpc.address import UnixAddress, parse_address, proxy_options
from slipstream.common.rpc.interceptor import HEALTH_SERVICE
from slipstream.common.settings import Settings, setting
from slipstream.common.wire.messages import LENGTH_DELIMITED, VARINT, tag, varint
from slipstream.protos import generation_pb2

MIB = 2**20
MOST_STALL_MS = 20.0
MOST_HEALTH_P99_MS = 100.0
MOST_MEMORY_MIB = 256.0
"""That unfinished messages may take: gRPC's buffers are up to twice as large as what has arrived."""
MOST_FIRST_TOKEN_MS = 500.0
"""Beside a probe: without one it takes a step of 65 ms, and the wait for the one before."""
HEALTH_TIMEOUT_S = 10.0
KERNELS_MS = (5.0, 60.0)
"""Lengths of the draft's and verify's kernels: a job with the whole context takes half a minute."""
SLOTS = 64
SIZES: dict[str, Any] = {"slots": SLOTS, "queue": 1024, "kept_jobs": 8192, "context_tokens": 1024}
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

KEY = "a-key-of-the-probes-0123456789"
AUTHORIZATION = (("authorization", f"Bearer {KEY}"),)

_JOB_IDS = (f"probe-{number}" for number in count())


def wire(number: int, payload: bytes) -> bytes:
    """A field of bytes, as it is on the wire."""
    return tag(number, LENGTH_DELIMITED) + varint(len(payload)) + payload


def hostile_requests(num_bytes: int) -> dict[str, bytes]:
    """Requests of this size that cost a server time in one way or another, by what they are full of."""
    request = {name: one.number for name, one in generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name.items()}
    params = {name: one.number for name, one in generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()}
    unknown = tag(999, VARINT) + b"\1"
    message = wire(1, wire(1, b"user") + wire(2, b"a"))
    biases = (wire(params["logit_bias"], b"\x08" + varint(i) + b"\x15\0\0\x80?") for i in range(num_bytes // 13))
    return {
        "unknown fields": unknown * (num_bytes // len(unknown)),
        "unknown fields of messages": wire(
            request["messages"], (wire(1, wire(1, b"user") + wire(2, b"a") + unknown * 300)) * (num_bytes // 920)
        ),
        "input_ids": wire(request["input_ids"], wire(1, b"\1" * num_bytes)),
        "input_ids, one by one": wire(request["input_ids"], b"\x08\1" * (num_bytes // 2)),
        "messages": wire(request["messages"], message * (num_bytes // len(message))),
        "empty messages": wire(request["messages"], b"\x0a\0" * (num_bytes // 2)),
        "logit_bias": wire(request["sampling_params"], b"".join(biases)),
        "stop": wire(request["sampling_params"], wire(params["stop"], b"") * (num_bytes // 3)),
        "stop_token_ids": wire(request["sampling_params"], wire(params["stop_token_ids"], b"\1" * num_bytes)),
    }


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_DEFAULT_WINDOW = 2**16 - 1
_MAX_FRAME_BYTES = 2**14
_PIECE_BYTES = 2**18
"""Bytes of a call before the next one has its turn."""


class HalfMessages:
    """A connection whose calls each announce a message and leave out its end. A context manager."""

    def __init__(self, address: str, message_bytes: int) -> None:
        """Connects to a server without TLS. `message_bytes`: the length that each call announces."""
        parsed = parse_address(address)
        if isinstance(parsed, UnixAddress):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(parsed.path))
        else:
            self._socket = socket.create_connection((parsed.host, parsed.port))
        self._message = b"\0" + struct.pack(">I", message_bytes) + bytes(message_bytes - 1)
        self._received = b""
        self._windows = {0: _DEFAULT_WINDOW}
        self._initial_window = _DEFAULT_WINDOW
        self.num_sent: dict[int, int] = {}
        """Bytes of each call so far, by its stream."""
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> int:
        """Begins a call and returns its stream. `path`: as in /slipstream.v1.Generation/CreateJob."""
        stream = 2 * len(self.num_sent) + 1
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self.num_sent[stream] = 0
        self._windows.setdefault(stream, self._initial_window)
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, b"".join(map(_literal, headers))))
        return stream

    def send(self, seconds: float) -> None:
        """Sends as much as the server takes, within this time, or until it hangs up or has it all."""
        ends_at = time.monotonic() + seconds
        while (left_s := ends_at - time.monotonic()) > 0 and any(map(self._lacks, self.num_sent)):
            num_bytes = sum(self._send(stream) for stream in self.num_sent if self._lacks(stream))
            if not self._receive(0.0 if num_bytes else min(left_s, 0.05)):
                return

    def _lacks(self, stream: int) -> bool:
        return stream not in self.ended and self.num_sent[stream] < len(self._message)

    def _send(self, stream: int) -> int:
        """Sends a piece of a call's message; returns its bytes."""
        begin = self.num_sent[stream]
        end = min(len(self._message), begin + max(0, min(_PIECE_BYTES, self._windows[0], self._windows[stream])))
        for place in range(begin, end, _MAX_FRAME_BYTES):
            self._socket.sendall(_frame(_DATA, 0, stream, self._message[place : min(end, place + _MAX_FRAME_BYTES)]))
        self.num_sent[stream] = end
        self._windows[0] -= end - begin
        self._windows[stream] -= end - begin
        return end - begin

    def _receive(self, timeout_s: float) -> bool:
        """Takes what the server has sent. False if it has hung up."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            data = self._socket.recv(_PIECE_BYTES)
            if not data:
                return False
            self._received += data
            timeout_s = 0.0
        while len(self._received) >= 9:
            length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + self._received[:9])
            if len(self._received) < 9 + length:
                break
            payload, self._received = self._received[9 : 9 + length], self._received[9 + length :]
            self._take(kind, flags, stream, payload)
        return True

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW_SIZE:
                    for number in self.num_sent:
                        self._windows[number] += value - self._initial_window
                    self._initial_window = value
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, self._initial_window) + int.from_bytes(payload, "big")
        elif kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
            self.ended.add(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(header: tuple[str, str]) -> bytes:
    """A header as HPACK has it when neither side keeps it."""
    name, value = header
    assert len(name) < 127, "a longer one has its length in several bytes"
    assert len(value) < 127, "a longer one has its length in several bytes"
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class HealthChecks:
    """Checks the health of a server again and again, in a process of its own, which no load delays."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        """Begins to check."""
        self._pipe.send(True)

    def end(self) -> tuple[list[float], set[str]]:
        """Stops, and returns the milliseconds that each check took, and all answers; an RPC error by its code."""
        self._pipe.send(False)
        found: tuple[list[float], set[str]] = self._pipe.recv()
        return found


@contextmanager
def health_checks(address: str, *, interval_s: float = 0.01) -> Iterator[HealthChecks]:
    """Starts the process, and ends it. It waits `interval_s` between two checks."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_check_health, args=(address, interval_s, theirs), daemon=True)
    process.start()
    try:
        yield HealthChecks(ours)
    finally:
        ours.close()
        process.terminate()
        process.join()


def _check_health(address: str, interval_s: float, pipe: Connection) -> None:
    with grpc.insecure_channel(address, options=proxy_options(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while pipe.recv():
            took_ms: list[float] = []
            statuses: set[str] = set()
            while not pipe.poll(interval_s):
                begun = time.monotonic()
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
                    statuses.add(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
                except grpc.RpcError as error:
                    statuses.add(error.code().name)
                took_ms.append(1e3 * (time.monotonic() - begun))
            pipe.recv()
            pipe.send((took_ms, statuses))


@dataclass(slots=True)
class Target:
    """A gateway under probe, and the outcome of the calls to it."""

    address: str
    seconds: float
    """How long a probe goes on."""
    scale: float = 1.0
    """Times the number of calls of a probe."""
    codes: Counter[str] = field(default_factory=Counter)
    """Calls by their status; a RESOURCE_EXHAUSTED without RetryInfo has a name of its own."""
    memory_mib: float = 0.0
    """That the gateway's process gained at most, in a probe that looks at it."""
    first_token_ms: list[float] = field(default_factory=list)
    """Times to the first token of requests beside a probe that looks at them."""

    def number(self, most: int) -> int:
        """`most` in a whole run, fewer in a sampled one."""
        return max(2, round(most * self.scale))

    def connect(self) -> grpc.aio.Channel:
        """A connection of its own."""
        options = [*proxy_options(self.address), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(self.address, options=options)

    async def call(self, channel: grpc.aio.Channel, method: str, request: bytes | Message, kind: Any = None) -> Any:
        """Makes a call and counts its outcome. Returns its answer, decoded if `kind` says as what; None if refused."""
        raw = request.SerializeToString() if isinstance(request, Message) else request
        decode = None if kind is None else kind.FromString
        with self._counted():
            make = channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=decode)
            return await make(raw, metadata=AUTHORIZATION)

    async def stream(self, channel: grpc.aio.Channel, method: str, request: Message) -> None:
        """Reads a stream to its end, and counts its outcome."""
        with self._counted():
            make = channel.unary_stream(f"/{SERVICE}/{method}")
            async for _ in make(request.SerializeToString(), metadata=AUTHORIZATION):
                pass

    async def time_first_tokens(self, channel: grpc.aio.Channel) -> None:
        """Makes small requests one after the other, without end."""
        while True:
            begun = time.monotonic()
            request = generation_pb2.GenerateRequest(**job(max_new_tokens=1))
            await self.stream(channel, "Generate", request)
            self.first_token_ms.append(1e3 * (time.monotonic() - begun))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            self.codes[code_of(error)] += 1
        else:
            self.codes["OK"] += 1

    async def create(self, channel: grpc.aio.Channel, **sampling: Any) -> str:
        """Creates a job that runs on by itself, and returns its id."""
        job_id = next(_JOB_IDS)
        request = generation_pb2.CreateJobRequest(**job(job_id=job_id, **sampling))
        await self.call(channel, "CreateJob", request)
        return job_id

    async def cancel(self, channel: grpc.aio.Channel, *job_ids: str) -> None:
        """Cancels jobs."""
        for job_id in job_ids:
            await self.call(channel, "CancelJob", generation_pb2.CancelJobRequest(job_id=job_id))

    async def repeat(self, num_callers: int, method: str, *requests: bytes | Message) -> None:
        """Callers with a connection each send the requests in turn, until the time is over."""
        ends_at = time.monotonic() + self.seconds

        async def caller() -> None:
            async with self.connect() as channel:
                while time.monotonic() < ends_at:
                    for request in requests:
                        await self.call(channel, method, request)

        await asyncio.gather(*(caller() for _ in range(num_callers)))


def code_of(error: grpc.aio.AioRpcError) -> str:
    """The name of a refusal's code; a RESOURCE_EXHAUSTED that does not say when to try again has one of its own."""
    name: str = error.code().name
    status = rpc_status.from_call(error)
    details = [] if status is None else status.details
    if name == "RESOURCE_EXHAUSTED" and not any(one.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for one in details):
        return "RESOURCE_EXHAUSTED without RetryInfo"
    return name


def job(*, job_id: str = "", prompt_tokens: int = 8, **sampling: Any) -> dict[str, Any]:
    """The fields of a request whose output ends with the context, unless `sampling` says otherwise."""
    params = {"max_new_tokens": 1000 - prompt_tokens, "ignore_eos": True, **sampling}
    ids = generation_pb2.TokenIds(ids=range(10, 10 + prompt_tokens))
    return {"job_id": job_id, "input_ids": ids, "sampling_params": generation_pb2.SamplingParams(**params)}


async def unknown_fields(target: Target) -> None:
    """Eight callers with 3 MiB of unknown fields."""
    requests = hostile_requests(3 * MIB)
    await target.repeat(8, "CreateJob", requests["unknown fields"], requests["unknown fields of messages"])


async def input_ids(target: Target) -> None:
    """Four million token ids, for a context of a thousand."""
    requests = hostile_requests(4_000_000)
    await target.repeat(2, "CreateJob", requests["input_ids"], requests["input_ids, one by one"])


async def long_lists(target: Target) -> None:
    """Lists and maps of hundreds of thousands of entries, where a few are accepted."""
    requests = hostile_requests(4_000_000)
    names = ("messages", "empty messages", "logit_bias", "stop", "stop_token_ids")
    await target.repeat(4, "CreateJob", *(requests[name] for name in names))


async def long_texts(target: Target) -> None:
    """Forty texts of almost 4 MiB at once, for a context of a thousand."""
    text = generation_pb2.CreateJobRequest(text="word " * ((4 * MIB - 1024) // 5))
    await target.repeat(target.number(40), "CreateJob", text)


async def conversations(target: Target) -> None:
    """Eight callers with 4,096 messages each."""
    items = [generation_pb2.ChatMessage(role="user", content="Hello, who are you?")] * 4096
    request = generation_pb2.CreateJobRequest(messages=generation_pb2.ChatMessages(items=items))
    await target.repeat(8, "CreateJob", request)


async def burst(target: Target) -> None:
    """Two thousand calls at once, more than the queue takes."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(target.connect()) for _ in range(8)]
        request = generation_pb2.GenerateRequest(**job(max_new_tokens=16))
        calls = (target.stream(channels[n % 8], "Generate", request) for n in range(target.number(2000)))
        await asyncio.gather(*calls)


async def watchers(target: Target) -> None:
    """A thousand watchers of one job."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(target.connect()) for _ in range(4)]
        job_id = await target.create(channels[0])
        request = generation_pb2.WatchJobRequest(job_id=job_id)
        watching = (target.stream(channels[n % 4], "WatchJob", request) for n in range(target.number(1000)))
        streams = [*map(asyncio.create_task, watching)]
        await asyncio.sleep(2 * target.seconds)
        await target.cancel(channels[0], job_id)
        await asyncio.gather(*streams)


async def list_jobs(target: Target) -> None:
    """Four callers list thousands of jobs, a thousand at a time."""
    async with target.connect() as channel:
        ends = []
        for _ in range(target.number(3000)):
            request = generation_pb2.GenerateRequest(**job(job_id=next(_JOB_IDS), max_new_tokens=1))
            ends.append(target.stream(channel, "Generate", request))
        for start in range(0, len(ends), SLOTS):
            await asyncio.gather(*ends[start : start + SLOTS])
    await target.repeat(4, "ListJobs", generation_pb2.ListJobsRequest(page_size=1000))


async def samples_with_stops(target: Target) -> None:
    """A job with 16 samples and as many stop strings as there may be, and ten watchers."""
    async with target.connect() as channel:
        stops = [f"{letter}{'never' * 50}" for letter in "etaoinshrdlucmfw"]
        job_id = await target.create(channel, n=16, stop=stops, temperature=1.0)
        request = generation_pb2.WatchJobRequest(job_id=job_id)
        streams = [asyncio.create_task(target.stream(channel, "WatchJob", request)) for _ in range(10)]
        await asyncio.sleep(target.seconds)
        await target.cancel(channel, job_id)
        await asyncio.gather(*streams)


async def open_streams(target: Target) -> None:
    """Five hundred streams that watch or wait, on two connections, beside 64 busy ones."""
    busy_request = generation_pb2.GenerateRequest(**job())
    async with target.connect() as busy, target.connect() as channel:
        streams = [asyncio.create_task(target.stream(busy, "Generate", busy_request)) for _ in range(SLOTS)]
        await asyncio.sleep(1.0)
        number = target.number(250)
        job_ids = await asyncio.gather(*(target.create(channel) for _ in range(number)))
        for job_id in job_ids:
            request = generation_pb2.WatchJobRequest(job_id=job_id)
            streams.append(asyncio.create_task(target.stream(channel, "WatchJob", request)))
        waiting = [f"{job_id}-waits" for job_id in job_ids]
        for job_id in waiting:
            generate = generation_pb2.GenerateRequest(**job(job_id=job_id))
            streams.append(asyncio.create_task(target.stream(channel, "Generate", generate)))
        await asyncio.sleep(2 * target.seconds)
        await target.cancel(channel, *job_ids, *waiting)
        for stream in streams[:SLOTS]:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def half_messages(target: Target) -> None:
    """Three connections with 431 calls each, which send most of 4 MiB: without a key, with it, and health checks."""
    number = target.number(431)
    kinds = ((f"/{SERVICE}/CreateJob", ()), (f"/{SERVICE}/CreateJob", AUTHORIZATION), (f"/{HEALTH_SERVICE}/Check", ()))
    async with target.connect() as channel:
        request, kind = generation_pb2.GetServerInfoRequest(), generation_pb2.GetServerInfoResponse
        info = await target.call(channel, "GetServerInfo", request, kind)
        process = psutil.Process(next(one.pid for one in info.services if one.name == "gateway"))
        before = process.memory_info().rss
        with ExitStack() as stack:
            sending = []
            for path, metadata in kinds:
                connection = stack.enter_context(HalfMessages(target.address, 4 * MIB - 1024))
                for _ in range(number):
                    connection.call(path, metadata)
                sending.append(asyncio.create_task(asyncio.to_thread(connection.send, 2 * target.seconds)))
            while not all(task.done() for task in sending):
                target.memory_mib = max(target.memory_mib, (process.memory_info().rss - before) / MIB)
                await asyncio.wait(sending, timeout=0.02)
            await asyncio.gather(*sending)
        await target.call(channel, "GetServerInfo", request)


def hostile_constraints() -> dict[str, dict[str, Any]]:
    """Constraints that take a compiler long, or without end, by what they are full of."""
    letters = "abcdefghijklmn"
    texts = generation_pb2.Choices(items=[f"{number}{'a' * 400}" for number in range(10_000)])
    ring = (f'r{number}: "a" (r{(number + 1) % 6000} | "b")' for number in range(6000))
    return {
        "a schema of 4 MiB": {"json_schema": json.dumps({"description": "a" * (4 * MIB - 4096)})},
        "10,000 alternatives": {"choice": texts},
        "an exponential regex": {"grammar": "start: A\nA: " + " & ".join(f"/(.*{one}.{{9}})/" for one in letters)},
        "a product of alternatives": {
            "json_schema": json.dumps({"allOf": [{"anyOf": [{"minLength": n} for n in range(10)]} for _ in range(8)]})
        },
        "deep nesting": {"json_schema": '{"items": ' * 9000 + "true" + "}" * 9000},
        "nested groups": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
        "rules in a ring": {"grammar": "\n".join(("start: r0", *ring))},
        "numbers that never match": {"json_schema": json.dumps({"type": "integer", "multipleOf": 9_999_991})},
    }


async def hostile_schemas(target: Target) -> None:
    """Two callers with constraints that take long to compile, beside requests whose first tokens are timed."""
    requests = (generation_pb2.CreateJobRequest(text="a", **one) for one in hostile_constraints().values())
    async with target.connect() as channel:
        timing = asyncio.create_task(target.time_first_tokens(channel))
        await target.repeat(2, "CreateJob", *requests)
        timing.cancel()
        await asyncio.gather(timing, return_exceptions=True)


_INVALID, _OK, _FULL = "INVALID_ARGUMENT", "OK", "RESOURCE_EXHAUSTED"
PROBES: dict[Callable[[Target], Awaitable[None]], set[str]] = {
    unknown_fields: {_INVALID},
    input_ids: {_INVALID},
    long_lists: {_INVALID},
    long_texts: {_INVALID},
    conversations: {_INVALID, _FULL},
    burst: {_OK, _FULL},
    watchers: {_OK},
    list_jobs: {_OK},
    samples_with_stops: {_OK},
    open_streams: {_OK},
    half_messages: {_OK},
    hostile_schemas: {_INVALID, _OK},
}
"""The loads, and the statuses that the calls of each may have."""


def name_of(probe: Callable[[Target], Awaitable[None]]) -> str:
    """Returns a probe's name."""
    return getattr(probe, "__name__", "")


async def run_probe(
    probe: Callable[[Target], Awaitable[None]], target: Target, stalls: Path, health: HealthChecks
) -> Row:
    """Runs a probe to its end; `stalls` is the file of the watched gateway."""
    name, longest = name_of(probe), longest_stalls(stalls)
    target.codes.clear()
    target.memory_mib = 0.0
    target.first_token_ms.clear()
    longest[:] = 0.0
    health.begin()
    await probe(target)
    health_ms, statuses = await asyncio.to_thread(health.end)
    stall_ms, stall_wall_ms = longest.tolist()
    cuts = quantiles(health_ms, n=100)
    problems = [f"{name}: {n} x {code}" for code, n in target.codes.items() if code not in PROBES[probe]]
    return {
        "name": name,
        "codes": dict(target.codes),
        "stall_ms": round(stall_ms, 2),  # the longest time that the loop was held, of its thread's own time
        "stall_wall_ms": round(stall_wall_ms, 2),  # by the clock, which counts other processes, too
        "num_health_checks": len(health_ms),
        "health_p50_ms": round(cuts[49], 2),
        "health_p99_ms": round(cuts[98], 2),
        "first_token_ms": round(max(target.first_token_ms, default=0.0), 2),  # the longest; 0: not looked at
        "memory_mib": round(target.memory_mib, 1),  # that the gateway gained at most; 0: not looked at
        "problems": [*problems, *(f"{name}: health {status}" for status in sorted(statuses - {"SERVING"}))],
    }


def shortcomings(row: Row) -> list[str]:
    """Returns times and memory beyond their limits, which a busy machine may explain."""
    limits = (
        ("stall_ms", MOST_STALL_MS, "the loop was held for {:.1f} ms"),
        ("health_p99_ms", MOST_HEALTH_P99_MS, "health took {:.1f} ms at p99"),
        ("first_token_ms", MOST_FIRST_TOKEN_MS, "another request's first token took {:.0f} ms"),
        ("memory_mib", MOST_MEMORY_MIB, "the gateway took {:.0f} MiB"),
    )
    return [f"{row['name']}: {told.format(row[key])}" for key, most, told in limits if row[key] > most]


def write_key(directory: Path) -> Path:
    """Writes a file with the key of the probes' calls."""
    path = directory / "keys"
    path.write_text(f"probes:{KEY}\n")
    path.chmod(0o600)
    return path


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a run."""

    seconds: float = setting(5.0, help="How long each probe goes on.", low=1, high=3600)
    probe: Names = Names.of([*map(name_of, PROBES)])


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Probes a gateway."""
    table = Table(None)
    with TemporaryDirectory() as directory:
        stalls, key = Path(directory) / "stalls", write_key(Path(directory))
        async with Stack(LOG_DIR / "probes") as stack:
            await stack.dummies(*KERNELS_MS)
            grammar = words(listen=stack.socket("grammar"))
            await stack.process("grammar", str(SCRIPTS / "slipstream-grammar"), *grammar)
            gateway = watched_gateway(stalls)
            options = {"grammar": stack.socket("grammar"), "api_keys": key, **SIZES}
            async with stack.scheduler("draft", gateway_program=gateway, **options) as served:
                with health_checks(served.address) as health:
                    for probe in (probe for probe in PROBES if name_of(probe) in plan.probe):
                        table.add(await run_probe(probe, Target(served.address, plan.seconds), stalls, health))
    problems = [text for row in table.rows for text in (*row["problems"], *shortcomings(row))]
    write_json({"host": host(), "seconds": plan.seconds, "probes": table.rows, "problems": problems}, file)
    return problems
