"""A server of our own for a test, at an address that is free; and an address without a server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio

from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import RpcMetrics
from slipstream.common.rpc.serving import GrpcServer

FREE_PORT = "127.0.0.1:0"


@contextmanager
def unserved_address() -> Iterator[str]:
    """An address that refuses connections: its port is taken as long as the context is open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@asynccontextmanager
async def running_server(
    *services: tuple[str, Callable[[Any, Any], None], object],
    address: str = FREE_PORT,
    metrics: RpcMetrics | None = None,
    **options: Any,
) -> AsyncIterator[GrpcServer]:
    """Serves (name, add_..._to_server, servicer) and says that it is ready; stops when the context ends."""
    with Listener.claim(address) as listener:
        server = GrpcServer(listener, metrics=metrics, **options)
        for service in services:
            server.add_service(*service)
        await server.start()
        server.set_serving(True)
        try:
            yield server
        finally:
            await server.stop(grace_s=0)


def bytes_service(name: str, **handlers: Any) -> tuple[str, Callable[[Any, Any], None], object]:
    """A service whose messages are bytes, from one `grpc.…_rpc_method_handler(…)` a method."""

    def add(_: object, server: Any) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    return name, add, None
