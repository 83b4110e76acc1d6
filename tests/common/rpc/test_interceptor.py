"""How the four kinds of calls end over a real connection, calls that come in bursts, and fields that we do not know."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from slipstream.common.errors import (
    CancelledError,
    ConnectionLostError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OrderingError,
    ResourceExhaustedError,
    SlipstreamError,
    StaleEpochError,
)
from slipstream.common.rpc.access import AccessSettings
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.rpc.metrics import RpcMetrics
from slipstream.common.rpc.status import error_from_rpc
from slipstream.protos import generation_pb2, worker_pb2
from slipstream.protos.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from tests.harness.grpc_server import bytes_service, running_server
from tests.harness.waiting import until

NAME = "test.v1.Test"
SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Probe:
    """One method of each kind; what they do is `act`, which the test sets."""

    def __init__(self) -> None:
        self.act: Callable[[], Awaitable[None]] = self.nothing
        self.closed = asyncio.Event()

    async def nothing(self) -> None:
        """The default act."""

    async def unary(self, request: Any, context: Any) -> bytes:
        """Acts, then answers."""
        try:
            await self.act()
            return b"answer"
        finally:
            self.closed.set()

    async def stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        """Answers, acts, and answers again."""
        try:
            yield b"first"
            await self.act()
            yield b"second"
        finally:
            self.closed.set()


class Fixture:
    """A probe behind a server, and a client to call it."""

    def __init__(self, probe: Probe, channel: grpc.aio.Channel, registry: CollectorRegistry) -> None:
        self.probe = probe
        self.channel = channel
        self.registry = registry

    def start(self, kind: str) -> Any:
        """Calls the method of a kind."""
        call = getattr(self.channel, kind)(f"/{NAME}/{kind}")
        return call(iter([b"request"]) if kind.startswith("stream") else b"request")

    async def call(self, kind: str) -> list[bytes]:
        """Calls it and reads everything."""
        call = self.start(kind)
        try:
            return [message async for message in call] if kind.endswith("stream") else [await call]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    def count(self, kind: str, code: str) -> float | None:
        """Calls counted of a kind and a code."""
        return self.registry.get_sample_value("slipstream_rpcs_total", {"method": f"{NAME}/{kind}", "code": code})

    async def counted(self, kind: str, code: str) -> None:
        """Returns when one call is counted; a client may know of the end of its call before the server does."""
        await until(lambda: self.count(kind, code) == 1)


@pytest.fixture
async def fixture() -> AsyncIterator[Fixture]:
    async with make_fixture() as made:
        yield made


@asynccontextmanager
async def make_fixture() -> AsyncIterator[Fixture]:
    """Serves a probe."""
    probe, registry = Probe(), CollectorRegistry()
    service = bytes_service(
        NAME,
        **{
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(probe.stream if kind.endswith("stream") else probe.unary)
            for kind in KINDS
        },
    )
    async with calling(service, registry) as channel:
        yield Fixture(probe, channel, registry)


@asynccontextmanager
async def calling(service: Any, registry: CollectorRegistry) -> AsyncIterator[grpc.aio.Channel]:
    """Serves a service, counts its calls, and connects to it."""
    async with (
        running_server(service, metrics=RpcMetrics(registry)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield channel


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    """An act that raises."""

    async def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_passes(fixture: Fixture, kind: str) -> None:
    assert await fixture.call(kind) == ([b"first", b"second"] if kind.endswith("stream") else [b"answer"])
    await fixture.counted(kind, "OK")


@pytest.mark.parametrize("kind", KINDS)
async def test_our_error_arrives(fixture: Fixture, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    fixture.probe.act = raising(InvalidArgumentError("a.b[1]", 2, "1"))
    with pytest.raises(InvalidArgumentError, match="got 2, accepted: 1") as caught:
        await fixture.call(kind)
    assert caught.value.field == "a.b[1]"
    await fixture.counted(kind, "INVALID_ARGUMENT")
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unknown_error_is_logged_and_not_told(
    fixture: Fixture, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.probe.act = raising(ZeroDivisionError("a secret"))
    with pytest.raises(InternalError) as caught:
        await fixture.call(kind)
    assert "secret" not in str(caught.value)
    assert "ZeroDivisionError: a secret" in caplog.text
    assert "Traceback" in caplog.text
    await fixture.counted(kind, "INTERNAL")


async def test_a_panic_does_not_leave_the_client_waiting(fixture: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    class PanicError(BaseException):
        """As of a library in Rust."""

    fixture.probe.act = raising(PanicError("a secret"))
    with pytest.raises(InternalError):
        await fixture.call("unary_stream")
    assert "PanicError" in caplog.text


async def test_an_error_of_our_own_order_is_told_and_logged(fixture: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    fixture.probe.act = raising(OrderingError("a hole"))
    with pytest.raises(OrderingError, match="a hole"):
        await fixture.call("unary_unary")
    assert "Traceback" in caplog.text


async def test_a_method_that_is_not_implemented_is_unimplemented(fixture: Fixture) -> None:
    fixture.probe.act = raising(NotImplementedError())
    with pytest.raises(FailedPreconditionError, match="not implemented"):
        await fixture.call("unary_unary")
    await fixture.counted("unary_unary", "UNIMPLEMENTED")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancellation_from_within_ends_the_call(fixture: Fixture, kind: str) -> None:
    fixture.probe.act = raising(asyncio.CancelledError())
    with pytest.raises(CancelledError):
        await fixture.call(kind)
    await fixture.counted(kind, "CANCELLED")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_goes_away_ends_the_handler(
    fixture: Fixture, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    acting = asyncio.Event()

    async def act() -> None:
        acting.set()
        await asyncio.Event().wait()

    fixture.probe.act = act
    call = fixture.start(kind)
    reading = asyncio.ensure_future(call.read() if kind.endswith("stream") else _await(call))
    await acting.wait()
    call.cancel()
    await fixture.probe.closed.wait()
    await fixture.counted(kind, "CANCELLED")
    await asyncio.gather(reading, return_exceptions=True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def _await(call: Any) -> Any:
    return await call


async def test_a_client_that_goes_away_in_the_middle_of_a_write(caplog: pytest.LogCaptureFixture) -> None:
    """A write may then end with an error of gRPC's instead of a cancellation."""
    closed = asyncio.Event()
    registry = CollectorRegistry()

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(2**16)
        finally:
            closed.set()

    service = bytes_service(NAME, flood=grpc.unary_stream_rpc_method_handler(flood))
    async with calling(service, registry) as channel:
        for num_reads in range(1, 10):
            call: Any = channel.unary_stream(f"/{NAME}/flood", None, None)(b"")
            for _ in range(num_reads):
                await call.read()
            call.cancel()
            await closed.wait()
            closed.clear()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [FailedPreconditionError("no"), ZeroDivisionError(), asyncio.CancelledError()])
async def test_objects_of_a_failed_call_are_freed_without_the_collector(
    fixture: Fixture, kind: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    # What is logged, the tests themselves keep.
    caplog.set_level(logging.CRITICAL, "slipstream.common.rpc.interceptor")
    held: list[weakref.ref[set[int]]] = []

    async def act() -> None:
        mine = set[int]()
        held.append(weakref.ref(mine))
        raise type(error)(*error.args)

    fixture.probe.act = act
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(SlipstreamError):
            await fixture.call(kind)
        await until(lambda: held[0]() is None)
    finally:
        gc.enable()


async def test_the_handler_is_closed_before_its_call_is_over(fixture: Fixture) -> None:
    fixture.probe.act = raising(StaleEpochError("over"))
    with pytest.raises(StaleEpochError):
        await fixture.call("unary_stream")
    assert fixture.probe.closed.is_set()


async def test_a_handler_may_write_by_itself_and_abort_by_itself() -> None:
    async def stream(request: bytes, context: Any) -> None:
        await context.write(request + b"!")
        await context.abort(grpc.StatusCode.NOT_FOUND, "by hand")

    registry = CollectorRegistry()
    service = bytes_service(NAME, stream=grpc.unary_stream_rpc_method_handler(stream))
    async with calling(service, registry) as channel:
        call: Any = channel.unary_stream(f"/{NAME}/stream", None, None)(b"hello")
        assert await call.read() == b"hello!"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert str(error_from_rpc(caught.value)) == "by hand"
        assert isinstance(error_from_rpc(caught.value), NotFoundError)
        await Fixture(Probe(), channel, registry).counted("stream", "NOT_FOUND")


async def test_an_unknown_method(fixture: Fixture) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fixture.channel.unary_unary(f"/{NAME}/other", None, None)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(error_from_rpc(caught.value), FailedPreconditionError)


async def test_a_request_that_is_no_message_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    service = (SERVICE_NAME, add_GenerationServicer_to_server, GenerationServicer())
    async with running_server(service) as server, grpc.aio.insecure_channel(server.address) as channel:
        for _ in range(50):
            for kind, method in (("unary_unary", "GetJob"), ("unary_stream", "Generate")):
                call = getattr(channel, kind)(f"/{SERVICE_NAME}/{method}")(b"\xff\xff\xff\xff")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call if kind == "unary_unary" else call.read())
                error = error_from_rpc(caught.value)
                assert str(error) == "request: got 4 bytes that are no message of the method's type"
                assert isinstance(error, InvalidArgumentError)
    (line,) = caplog.messages
    assert line == f"/{SERVICE_NAME}/GetJob: a request of 4 bytes cannot be decoded"


UNKNOWN = b"\xf8\x07\x01"
"""Field 127 with the value 1."""
UNKNOWN_PARAMS = generation_pb2.SamplingParams.FromString(UNKNOWN)
UNKNOWN_UPDATE = worker_pb2.SlotUpdate(slot=1, sampling=worker_pb2.SlotSampling.FromString(UNKNOWN))


def test_a_known_message_passes() -> None:
    reject_unknown_fields(generation_pb2.GenerateRequest(text="a", sampling_params={"seed": 1}))
    reject_unknown_fields(Struct(fields={"a": Value(list_value=ListValue(values=[Value(number_value=1)]))}))


@pytest.mark.parametrize(
    ("message", "field", "owner"),
    [
        (generation_pb2.GenerateRequest.FromString(UNKNOWN), "127", "GenerateRequest"),
        (generation_pb2.GenerateRequest(sampling_params=UNKNOWN_PARAMS), "sampling_params.127", "SamplingParams"),
        (worker_pb2.StepCommand(updates=[{"slot": 2}, UNKNOWN_UPDATE]), "updates[1].sampling.127", "SlotSampling"),
        (Struct(fields={"a": Value.FromString(UNKNOWN)}), "fields[a].127", "Value"),
    ],
    ids=["itself", "message within", "repeated message", "map"],
)
def test_an_unknown_field_is_named(message: Message, field: str, owner: str) -> None:
    told = rf"^{re.escape(field)}: .*unknown field number 127.*\.{owner} "
    with pytest.raises(InvalidArgumentError, match=told) as caught:
        reject_unknown_fields(message)
    assert caught.value.field == field


def test_an_unknown_number_of_an_oneof_is_not_lost() -> None:
    # A later version's next kind of prompt.
    request = generation_pb2.GenerateRequest.FromString(b"\xa2\x06\x01a")
    with pytest.raises(InvalidArgumentError, match="unknown field number 100"):
        reject_unknown_fields(request)


def test_a_message_full_of_unknown_fields_is_refused_without_listing_them() -> None:
    request = generation_pb2.GenerateRequest.FromString(b"\xf8\x07\x01" * 100_000)
    with pytest.raises(InvalidArgumentError, match="300000 bytes of unknown fields") as caught:
        reject_unknown_fields(request)
    assert caught.value.field == "request"
    params = generation_pb2.SamplingParams.FromString(b"\xf8\x07\x01" * 100_000)
    with pytest.raises(InvalidArgumentError) as caught:
        reject_unknown_fields(generation_pb2.GenerateRequest(text="a", sampling_params=params))
    assert caught.value.field == "sampling_params"


NUM_CALLS = 2_000
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class Waiting:
    """A method whose calls wait for `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_calls = 0
        self.most_calls = 0

    async def wait(self, request: bytes, context: Any) -> bytes:
        """Answers with the request."""
        self.num_calls += 1
        self.most_calls = max(self.most_calls, self.num_calls)
        try:
            await self.release.wait()
        finally:
            self.num_calls -= 1
        return request

    def service(self) -> Any:
        """For `running_server`."""
        return bytes_service("test.Waiting", wait=grpc.unary_unary_rpc_method_handler(self.wait))


async def outcome(call: Coroutine[Any, Any, bytes]) -> str:
    """The end of a call: OK, or the name of the error's class; a refusal must say when to come again."""
    try:
        await call
    except grpc.aio.AioRpcError as failure:
        error = error_from_rpc(failure)
        assert not isinstance(error, ResourceExhaustedError) or error.retry_after_ms > 0
        return type(error).__name__
    return "OK"


async def one(channel: grpc.aio.Channel) -> bytes:
    """A call."""
    answer: bytes = await channel.unary_unary("/test.Waiting/wait")(b"x", timeout=60)
    return answer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_connections", [1, 8])
async def test_a_call_too_many_is_refused_with_a_time_to_retry(num_connections: int) -> None:
    waiting = Waiting()
    async with running_server(waiting.service(), access=AccessSettings(max_calls=100)) as server:
        channels = [grpc.aio.insecure_channel(server.address, options=OWN_CONNECTION) for _ in range(num_connections)]
        calls = [asyncio.ensure_future(outcome(one(channels[number % num_connections]))) for number in range(NUM_CALLS)]
        async with asyncio.timeout(60):
            await until(lambda: sum(call.done() for call in calls) == NUM_CALLS - 100)
            async with grpc.aio.insecure_channel(server.address, options=OWN_CONNECTION) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert health.status == health_pb2.HealthCheckResponse.SERVING
            waiting.release.set()
            found = Counter(await asyncio.gather(*calls))
        assert found == {"OK": 100, "ResourceExhaustedError": NUM_CALLS - 100}
        assert waiting.most_calls == 100
        assert await outcome(one(channels[0])) == "OK"
        await asyncio.gather(*(channel.close() for channel in channels))


async def test_a_connection_too_many_is_closed() -> None:
    waiting = Waiting()
    waiting.release.set()
    async with running_server(waiting.service(), access=AccessSettings(max_connections=2)) as server:
        channels = [grpc.aio.insecure_channel(server.address, options=OWN_CONNECTION) for _ in range(3)]
        assert [await outcome(one(channel)) for channel in channels] == ["OK", "OK", ConnectionLostError.__name__]
        await channels[0].close()
        async with asyncio.timeout(60):  # the server learns of the end at its own time
            while await outcome(one(channels[2])) != "OK":
                await asyncio.wait_for(channels[2].channel_ready(), 20)
        await asyncio.gather(*(channel.close() for channel in channels))
