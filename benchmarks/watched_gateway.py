"""A gateway that measures how long its event loop is held: `slipstream-gateway` with one more option, --stalls FILE."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from slipstream.common.rpc.service_options import ServiceOptions, run_command, serve
from slipstream.common.settings import with_options
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.main import GatewayOptions

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener

TICK_S = 0.001


def longest_stalls(path: Path) -> np.memmap[Any, np.dtype[np.float64]]:
    """Maps the file with the longest times between two ticks of the event loop, less the time between its timers.

    They are milliseconds of the loop's own thread, and by the clock: there other threads and processes count, too.
    """
    return np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=2)


def watch_loop(path: Path) -> None:
    """Measures the running event loop from now on."""
    loop, longest = asyncio.get_running_loop(), longest_stalls(path)
    wall, cpu = time.monotonic(), time.thread_time()

    def tick() -> None:
        nonlocal wall, cpu
        now, cpu_now = time.monotonic(), time.thread_time()
        longest[:] = np.maximum(longest, (1e3 * (cpu_now - cpu), 1e3 * (now - wall - TICK_S)))
        wall, cpu = now, cpu_now
        loop.call_later(TICK_S, tick)

    loop.call_later(TICK_S, tick)


def watched_gateway(stalls: Path) -> tuple[str, ...]:
    """Makes the file, and returns the command line without the gateway's own options."""
    longest_stalls(stalls)
    return (sys.executable, "-P", "-m", "slipstream.benchmarks.watched_gateway", "--stalls", str(stalls))


@with_options(GatewayConfig, GatewayOptions)
def main(stalls: Annotated[Path, typer.Option(help="Takes the longest stalls.")], **values: Any) -> None:
    """Serves clients."""

    def run(config: GatewayConfig, listener: Listener, options: ServiceOptions) -> int:
        import uvloop

        from slipstream.gateway.server import run_gateway

        async def watched() -> int:
            watch_loop(stalls)
            return await run_gateway(config, listener, options.metrics_port, options.metrics_host)

        return uvloop.run(watched())

    serve("gateway", GatewayConfig, values, run)


if __name__ == "__main__":
    run_command(main)
