"""A way to a server that breaks, delays or loses what passes when a test says so."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_RESETS_WHEN_CLOSED = struct.pack("ii", 1, 0)


class BreakingProxy:
    """Hands bytes on between its clients and one server."""

    def __init__(self, target: str) -> None:
        """`target`: HOST:PORT or unix:PATH."""
        self.num_connections = 0
        self.lets_answers_through = asyncio.Event()
        self.lets_answers_through.set()
        self.delay_s = 0.0
        """Everything passes so much later."""
        self.loses_everything = False
        """Connections seem to live, and nothing passes: what comes meanwhile is lost, and they are of no use again."""
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def cut(self) -> None:
        """Resets every connection, whatever is under way."""
        for writer in self._writers:
            own: socket.socket = writer.get_extra_info("socket")
            if own.family != socket.AF_UNIX and not writer.transport.is_closing():
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS_WHEN_CLOSED)
            writer.transport.abort()
        self._writers.clear()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one client."""
        self.num_connections += 1
        try:
            far_reader, far_writer = await self._reach()
        except OSError:
            writer.transport.abort()
            return
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

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix:"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix:"))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _hand_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: asyncio.Event | None
    ) -> None:
        try:
            while data := await reader.read(2**16):
                if may_pass is not None:
                    await may_pass.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.loses_everything:
                    # A stream with a gap would be another fault than one that stands still.
                    await self._swallow(reader)
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # cut, or the other end is gone
        finally:
            writer.transport.abort()

    @staticmethod
    async def _swallow(reader: asyncio.StreamReader) -> None:
        while await reader.read(2**16):
            pass


@asynccontextmanager
async def breaking_proxy(target: str, path: Path | None = None) -> AsyncIterator[tuple[str, BreakingProxy]]:
    """The address of a proxy, and the proxy. It listens at a Unix socket if there is a `path`, else at a free port."""
    proxy = BreakingProxy(target)
    if path is None:
        server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(proxy.connect, path)
        address = f"unix:{path}"
    async with server:
        try:
            yield address, proxy
        finally:
            await proxy.close()
