"""A way to a server that breaks when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class BreakingProxy:
    """Hands bytes on between its clients and one TCP server."""

    def __init__(self, target: str) -> None:
        self.num_connections = 0
        self.lets_answers_through = asyncio.Event()
        self.lets_answers_through.set()
        self._host, _, self._port = target.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def cut(self) -> None:
        """Breaks every connection, whatever is under way."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one client."""
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, far_writer]
        self._tasks += [
            asyncio.create_task(self._hand_on(reader, far_writer, None)),
            asyncio.create_task(self._hand_on(far_reader, writer, self.lets_answers_through)),
        ]

    async def close(self) -> None:
        """Breaks every connection for good."""
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @staticmethod
    async def _hand_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: asyncio.Event | None
    ) -> None:
        try:
            while data := await reader.read(2**16):
                if may_pass is not None:
                    await may_pass.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # cut, or the other end is gone
        finally:
            writer.transport.abort()


@asynccontextmanager
async def breaking_proxy(target: str) -> AsyncIterator[tuple[str, BreakingProxy]]:
    """The address of a proxy, and the proxy."""
    proxy = BreakingProxy(target)
    server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    async with server:
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", proxy
        finally:
            await proxy.close()
