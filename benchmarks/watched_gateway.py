"""A gateway that measures how long its event loop is held: `slipstream-gateway` with one more option, --stalls FILE."""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from slipstream.common.rpc.service_options import ServiceOptions, run_command, serve
from slipstream.common.settings import with_options
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.main import GatewayOptions

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener

TICK_S = 0.001
_FORMAT = struct.Struct("dd")


class Stalls(NamedTuple):
    """The longest time between two ticks of an event loop, less the time between its timers."""

    cpu_ms: float
    """Time of the loop's own thread."""
    wall_ms: float
    """By the clock: other threads and processes count, too."""


class StallFile:
    """The longest stalls so far, in a file that two processes share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_FORMAT.pack(0.0, 0.0))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _FORMAT.size)

    def add(self, stalls: Stalls) -> None:
        """Keeps the longer of each."""
        before = Stalls(*_FORMAT.unpack(self._shared))
        self._shared[:] = _FORMAT.pack(*map(max, before, stalls))

    def take(self) -> Stalls:
        """Returns the longest stalls since the last call."""
        stalls = Stalls(*_FORMAT.unpack(self._shared))
        self._shared[:] = _FORMAT.pack(0.0, 0.0)
        return stalls


def watch_loop(stalls: StallFile) -> None:
    """Measures the running event loop from now on."""
    loop = asyncio.get_running_loop()
    wall, cpu = time.monotonic(), time.thread_time()

    def tick() -> None:
        nonlocal wall, cpu
        now, cpu_now = time.monotonic(), time.thread_time()
        stalls.add(Stalls(1e3 * (cpu_now - cpu), 1e3 * (now - wall - TICK_S)))
        wall, cpu = now, cpu_now
        loop.call_later(TICK_S, tick)

    loop.call_later(TICK_S, tick)


def watched_gateway(stalls: Path) -> tuple[str, ...]:
    """The command line, without the gateway's own options."""
    return (sys.executable, "-P", "-m", "slipstream.benchmarks.watched_gateway", "--stalls", str(stalls))


@with_options(GatewayConfig, GatewayOptions)
def main(stalls: Annotated[Path, typer.Option(help="Takes the longest stalls.")], **values: Any) -> None:
    """Serves clients."""

    def run(config: GatewayConfig, listener: Listener, options: ServiceOptions) -> int:
        import uvloop

        from slipstream.gateway.server import run_gateway

        async def watched() -> int:
            watch_loop(StallFile(stalls))
            return await run_gateway(config, listener, options.metrics_port)

        return uvloop.run(watched())

    serve("gateway", GatewayConfig, values, run)


if __name__ == "__main__":
    run_command(main)
