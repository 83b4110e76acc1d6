"""Tests of the parts that every server has: health, reflection, limits, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipstream.common.rpc.address import Keepalive
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.serving import GrpcServer
from slipstream.protos import generation_pb2_grpc
from tests.harness.grpc_server import FREE_PORT, bytes_service, running_server
from tests.harness.waiting import until

NAME = "slipstream.v1.Generation"
GENERATION = (NAME, generation_pb2_grpc.add_GenerationServicer_to_server, generation_pb2_grpc.GenerationServicer())
Status = health_pb2.HealthCheckResponse


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    """The health of a service."""
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


@pytest.mark.parametrize("service", ["", NAME])
async def test_health_follows(service: str) -> None:
    with Listener.claim(FREE_PORT) as listener:
        server = GrpcServer(listener)
        server.add_service(*GENERATION)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await check(channel, service) == Status.NOT_SERVING
            server.set_serving(True)
            assert await check(channel, service) == Status.SERVING
            server.set_serving(False)
            assert await check(channel, service) == Status.NOT_SERVING
        await server.stop(grace_s=0)


async def test_health_of_a_service_that_is_not_here() -> None:
    async with running_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await watch.read()).status == Status.SERVICE_UNKNOWN


async def test_watchers_hear_of_changes_also_when_another_has_left() -> None:
    async with running_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first, second = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        assert (await first.read()).status == Status.SERVING
        assert (await second.read()).status == Status.SERVING
        first.cancel()
        server.set_serving(False)
        assert (await second.read()).status == Status.NOT_SERVING
        server.set_serving(True)
        assert (await second.read()).status == Status.SERVING


async def test_a_watcher_does_not_keep_a_server_from_stopping() -> None:
    async with running_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        async with asyncio.timeout(10):
            await server.stop(grace_s=60)
        assert (await watch.read()).status == Status.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_reflection_lists_and_describes() -> None:
    async with running_server(GENERATION) as server, grpc.aio.insecure_channel(server.address) as channel:
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME),
        ]
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = [response async for response in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert names >= {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert b"GenerateRequest" in described.file_descriptor_response.file_descriptor_proto[0]


async def test_a_running_call_may_finish_within_the_grace() -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        started.set()
        await release.wait()
        return b"done"

    service = bytes_service("test.Slow", slow=grpc.unary_unary_rpc_method_handler(slow))
    async with running_server(service) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = asyncio.ensure_future(_unary(channel, "/test.Slow/slow", b""))
        await started.wait()
        stopping = asyncio.ensure_future(server.stop(grace_s=30))
        release.set()
        assert await call == b"done"
        await stopping


async def test_a_call_that_outlasts_the_grace_is_cancelled() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: bytes, context: Any) -> bytes:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    service = bytes_service("test.Slow", endless=grpc.unary_unary_rpc_method_handler(endless))
    async with running_server(service) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = asyncio.ensure_future(_unary(channel, "/test.Slow/endless", b""))
        await started.wait()
        await server.stop(grace_s=0.05)
        await cancelled.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_message_over_the_limit_is_refused() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    service = bytes_service("test.Echo", echo=grpc.unary_unary_rpc_method_handler(echo))
    async with (
        running_server(service, max_receive_bytes=1000) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        assert len(await _unary(channel, "/test.Echo/echo", bytes(1000))) == 1000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _unary(channel, "/test.Echo/echo", bytes(1001))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stopped_server_is_noticed(tmp_path: Path) -> None:
    """A stopped process answers no ping, and is not dead either."""
    source = f"""
        import asyncio
        from tests.harness.grpc_server import bytes_service, running_server
        import grpc
        async def hang(request, context):
            await asyncio.Event().wait()
        async def main():
            service = bytes_service("test.Hang", hang=grpc.unary_unary_rpc_method_handler(hang))
            async with running_server(service, address="unix:{tmp_path}/a.sock"):
                print("ready", flush=True)
                await asyncio.Event().wait()
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert await server.stdout.readline() == b"ready\n"
        options = Keepalive(interval_ms=200, timeout_ms=200).options()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/a.sock", options=options) as channel:
            await channel.channel_ready()
            call = asyncio.ensure_future(_unary(channel, "/test.Hang/hang", b""))
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(20):
                    await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.kill()
        await server.communicate()


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async def cycle() -> None:
        async with (
            running_server(GENERATION, address=f"unix:{tmp_path}/a.sock") as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            await check(channel)

    await cycle()  # gRPC starts its own threads once, for good.
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        await cycle()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors and threading.active_count() <= threads)
    assert os.listdir(tmp_path) == []


async def _unary(channel: grpc.aio.Channel, method: str, request: bytes) -> bytes:
    response: bytes = await channel.unary_unary(method, None, None)(request)
    return response
