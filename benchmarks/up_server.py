"""`slipstream up` as a process of a benchmark, whose services can be killed, stopped and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil

from slipstream.benchmarks.models import NUM_DRAFT_TOKENS
from slipstream.benchmarks.stack import free_ports, running, words
from slipstream.client import AsyncClient
from slipstream.common.errors import SlipstreamError
from slipstream.common.rpc.metrics import scrape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from slipstream.common.rpc.metrics import Scrape
    from slipstream.common.wire.server import ServerState

SERVICES = ("gateway", "scheduler", "verify", "draft")
LOG_DIR_VARIABLE = "SLIPSTREAM_BENCHMARK_LOG_DIR"
"""The environment variable that names a folder in which the output of `slipstream up` and its services is kept."""
START_TIMEOUT_S = 300.0
RESTORE_TIMEOUT_S = 120.0
POLL_S = 0.05
FAULTS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
"""The signals of a service's faults, by name; a pause ends with SIGCONT."""
ANY_DEATHS = ("--restart-window-s", "0.001")
"""A benchmark kills more often than a server's bound on restarts allows."""


class UpServer:
    """A running `slipstream up`."""

    def __init__(self, address: str, state_dir: Path, process: psutil.Process) -> None:
        """`process`: that of `up` itself, whose children are the services."""
        self.address = address
        self.state_dir = state_dir
        self.process = process

    def services(self) -> dict[str, psutil.Process]:
        """The processes that run now, by service. Those of a draft that is on its way in or out are left out."""
        found: dict[str, psutil.Process] = {}
        for child in sorted(self.process.children(), key=lambda child: child.create_time(), reverse=True):
            try:
                command = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            for service in SERVICES:
                if any(word.endswith(f".{service}.main") for word in command):
                    found[service] = child
        return found

    def send(self, service: str, number: signal.Signals) -> psutil.Process:
        """Sends a signal to a service, and returns the process that got it. Raises KeyError if there is none."""
        process = self.services()[service]
        process.send_signal(number)
        return process

    async def metrics(self) -> Scrape:
        """Reads the scheduler's metrics."""
        async with AsyncClient(self.address) as client:
            state = await client.server_info()
        return await scrape(next(service.metrics_port for service in state.services if service.name == "scheduler"))

    async def until(self, is_so: Callable[[Scrape], bool], timeout_s: float = RESTORE_TIMEOUT_S) -> Scrape:
        """Waits until the scheduler's metrics are so; returns them. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                metrics = await self.metrics()
                if is_so(metrics):
                    return metrics
                await asyncio.sleep(POLL_S)

    async def fault(self, service: str, fault: str, *, pause_s: float) -> psutil.Process:
        """Gives a service one of FAULTS, and returns the process that got it. Raises KeyError if there is none."""
        process = self.send(service, FAULTS[fault])
        if fault == "pause":
            await asyncio.sleep(pause_s)
            with suppress(psutil.NoSuchProcess):  # found to hang, and replaced
                process.send_signal(signal.SIGCONT)
        return process

    async def until_state(self, is_so: Callable[[ServerState], bool], *, poll_s: float = POLL_S) -> None:
        """Waits until the server's state is so; meanwhile it may be away. Raises TimeoutError."""
        async with asyncio.timeout(RESTORE_TIMEOUT_S), AsyncClient(self.address) as client:
            while True:
                with suppress(SlipstreamError):
                    if is_so(await client.server_info()):
                        return
                await asyncio.sleep(poll_s)

    async def restored(self, algorithm: str, *, without: psutil.Process | None = None) -> None:
        """Waits until every service is there, drafts are made by `algorithm`, and `without` runs no more.

        Raises TimeoutError.
        """

        def is_restored(state: ServerState) -> bool:
            pids = {service.pid for service in state.services}
            known = {process.pid for process in self.services().values()}
            is_new = without is None or without.pid not in pids | known
            return is_new and state.algorithm == algorithm and pids == known

        await self.until_state(is_restored)


def bundled_options(device: str, slots: int, mps: str = "off") -> tuple[str, ...]:
    """Options of `slipstream up` for the bundled models, with drafts in each step.

    In bfloat16, a GPU's default, tokens depend on the batch.
    """
    on_gpu = {"dtype": "float32", "mps": mps} if device == "cuda" else {}
    return words(device=device, slots=slots, num_draft_tokens=NUM_DRAFT_TOKENS, **on_gpu)


@asynccontextmanager
async def up_server(*options: str) -> AsyncIterator[UpServer]:
    """Runs `slipstream up` with these options until the context ends. Prints its log when the context fails.

    With LOG_DIR_VARIABLE the log is a new file in the folder that it names, and has the services' logs, too.
    """
    with TemporaryDirectory(prefix="slipstream-") as directory:
        (port,) = free_ports(1)
        address, log, verbose = f"127.0.0.1:{port}", Path(directory) / "up.log", []
        if kept := os.environ.get(LOG_DIR_VARIABLE):
            log, verbose = Path(kept) / f"up-{time.strftime('%H%M%S')}-{port}.log", ["--verbose"]
            log.parent.mkdir(parents=True, exist_ok=True)
            print(f"log of slipstream up: {log}", flush=True)
        private = ("--listen", address, "--state-dir", directory, "--metrics-port", "0", *verbose)
        command = (sys.executable, "-m", "slipstream.cli.main", "up", *private, *ANY_DEATHS, *options)
        starting = running("slipstream up", address, *command, log=log, environment={}, timeout_s=START_TIMEOUT_S)
        try:
            async with starting as process:
                yield UpServer(address, Path(directory), psutil.Process(process.pid))
        except BaseException:
            print(log.read_text(encoding="utf-8"), file=sys.stderr)
            raise
