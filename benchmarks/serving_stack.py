"""The bundled model served by the real console scripts, for scripts that measure or check."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from slipstream.benchmarks.stack import Stack
from slipstream.bundled import eagle3_dir, standalone_dir, target_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class ServingStack:
    """Verify and drafts of the bundled model, which stay, and schedulers that come and go."""

    def __init__(self, stack: Stack) -> None:
        """Use `start`."""
        self._stack = stack

    @classmethod
    @asynccontextmanager
    async def start(cls, log_dir: Path) -> AsyncIterator[ServingStack]:
        """Loads all models."""
        async with Stack(log_dir) as stack:
            await stack.worker("verify", "--model", str(target_dir()))
            await stack.worker("draft", "--model", str(standalone_dir()))
            head = ("--model", str(eagle3_dir()), "--target", str(target_dir()), "--algorithm", "eagle3")
            await stack.worker("draft", *head, name="eagle3")
            yield cls(stack)

    @asynccontextmanager
    async def scheduler(
        self, algorithm: str, *, run_ahead: int = 1, metrics_port: int = 0, arguments: tuple[str, ...] = ()
    ) -> AsyncIterator[str]:
        """A scheduler with "standalone" or "eagle3" drafts or "none"; yields its address."""
        name = {"standalone": "draft", "eagle3": "eagle3"}.get(algorithm)
        draft = () if name is None else ("--draft", self._stack.socket(name))
        (port,) = free_ports(1)
        async with self._stack.scheduler(
            *("--verify", self._stack.socket("verify")),
            *draft,
            *("--run-ahead", str(run_ahead)),
            *arguments,
            port=port,
            metrics_port=metrics_port,
        ) as address:
            yield address


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
