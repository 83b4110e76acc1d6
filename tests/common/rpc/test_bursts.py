"""Thousands of calls at once: each is served or refused with a reason, and health checks go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.errors import ConnectionLostError, ResourceExhaustedError
from slipstream.common.rpc.access import AccessSettings
from slipstream.common.rpc.status import error_from_rpc
from tests.harness.grpc_server import bytes_service, running_server
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Coroutine

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
        await asyncio.wait_for(channels[2].channel_ready(), 20)
        assert await outcome(one(channels[2])) == "OK"
        await asyncio.gather(*(channel.close() for channel in channels))
