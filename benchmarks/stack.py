"""Starts the real console scripts for a measurement, and ends them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.benchmarks.child_process import end
from slipstream.benchmarks.dummy_worker import dummy_worker
from slipstream.benchmarks.primed_scheduler import PRIMED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

SCRIPTS = Path(sys.executable).parent
SCHEDULER = (str(SCRIPTS / "slipstream-scheduler"),)
START_TIMEOUT_S = 120.0
RETRY_S = 0.05
CONNECT_OFTEN = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))
"""As it is, gRPC's pauses grow to seconds while a service starts."""


class Primed:
    """A process that has imported what a scheduler needs, and waits for its arguments. Serves once."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `Stack.primed`. Its standard input is a pipe."""
        self.process = process

    async def start(self, arguments: Sequence[str]) -> None:
        """Lets it run."""
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
        await self.process.stdin.drain()


class Stack:
    """Services that live together in one temporary directory. An asynchronous context manager."""

    def __init__(
        self,
        log_dir: Path | None = None,
        *,
        worker_environment: Mapping[str, str] | None = None,
        scheduler_environment: Mapping[str, str] | None = None,
    ) -> None:
        """`log_dir` takes the services' logs; without one they go to this process's stderr.

        The environments come on top of this process's own.
        """
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._worker_environment = worker_environment or {}
        self._scheduler_environment = scheduler_environment or {}
        self._held = AsyncExitStack()
        self._directory = Path()

    async def __aenter__(self) -> Stack:
        self._directory = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-")))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._held.aclose()

    def socket(self, name: str) -> str:
        """Address for a worker of this name."""
        return f"unix:{self._directory / 'run' / f'{name}.sock'}"

    async def worker(self, role: str, *arguments: str, name: str | None = None) -> str:
        """Starts a draft or verify service that lives as long as the stack; returns its address when it serves."""
        address = self.socket(name or role)
        script = str(SCRIPTS / f"slipstream-{role}")
        await self.process(name or role, script, "--listen", address, *arguments)
        return address

    async def dummy_worker(self, role: str, length_ms: float, *arguments: str, name: str | None = None) -> str:
        """As `worker`, with dummy kernels of this length in place of the model."""
        address = self.socket(name or role)
        await self.process(name or role, *dummy_worker(role, length_ms, "--listen", address, *arguments))
        return address

    async def process(self, name: str, *command: str) -> None:
        """Starts any program that serves at the address of `name`, and lives as long as the stack."""
        service = self._service(name, self.socket(name), *command, environment=self._worker_environment)
        await self._held.enter_async_context(service)

    async def primed(self, module: str) -> Primed:
        """Starts a process that lives as long as the stack, at most; returns it when it has imported everything.

        `module`: whose entry point is a scheduler's, with the same options. See `primed_scheduler`.
        """
        return await self._held.enter_async_context(self._primed(module))

    @asynccontextmanager
    async def scheduler(
        self, *arguments: str, port: int, metrics_port: int, program: tuple[str, ...] | Primed = SCHEDULER
    ) -> AsyncIterator[str]:
        """A scheduler for as long as the context; yields its address when it serves.

        `program`: another one that takes the same options.
        """
        address = f"127.0.0.1:{port}"
        options = ("--listen", address, "--metrics-port", str(metrics_port), *arguments)
        if isinstance(program, Primed):
            service = _started(program, address, options)
        else:
            service = self._service("scheduler", address, *program, *options, environment=self._scheduler_environment)
        async with service:
            yield address

    @asynccontextmanager
    async def _primed(self, module: str) -> AsyncIterator[Primed]:
        command = (sys.executable, "-P", "-m", "slipstream.benchmarks.primed_scheduler", module)
        process = self._process("scheduler", *command, environment=self._scheduler_environment, is_primed=True)
        async with process as primed:
            await _until_primed(primed)
            yield Primed(primed)

    @asynccontextmanager
    async def _service(
        self, name: str, address: str, *command: str, environment: Mapping[str, str]
    ) -> AsyncIterator[None]:
        async with self._process(name, *command, environment=environment) as process:
            await _until_serving(name, process, address)
            yield

    @asynccontextmanager
    async def _process(
        self, name: str, *command: str, environment: Mapping[str, str], is_primed: bool = False
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """`is_primed`: its standard input and output are pipes."""
        log = None if self._log_dir is None else (self._log_dir / f"{name}.log").open("ab")
        pipes = (PIPE, PIPE) if is_primed else (None, log)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipes[0], stdout=pipes[1], stderr=log, env={**os.environ, **environment}
        )
        try:
            yield process
        finally:
            await end(process)
            if log is not None:
                log.close()


@asynccontextmanager
async def _started(primed: Primed, address: str, arguments: Sequence[str]) -> AsyncIterator[None]:
    try:
        await primed.start(arguments)
        await _until_serving("scheduler", primed.process, address)
        yield
    finally:
        await end(primed.process)


async def _until_primed(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None, "a pipe"
    async with asyncio.timeout(START_TIMEOUT_S):
        while line := await process.stdout.readline():
            if line.decode().strip() == PRIMED:
                return
        raise RuntimeError(f"a scheduler ended with status {await process.wait()} before it was primed")


async def _until_serving(name: str, process: asyncio.subprocess.Process, address: str) -> None:
    ended = asyncio.create_task(process.wait())
    serving = asyncio.create_task(_watch(address))
    try:
        await asyncio.wait((ended, serving), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise RuntimeError(f"{name} ended with status {ended.result()} before it served")
        if not serving.done():
            raise RuntimeError(f"{name} does not serve after {START_TIMEOUT_S:.0f} s")
        serving.result()
    finally:
        serving.cancel()
        ended.cancel()
        await asyncio.gather(ended, serving, return_exceptions=True)


async def _watch(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=CONNECT_OFTEN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(RETRY_S)
