"""Starts servers for a benchmark, which die with it: services as processes of their own, or `slipstream up`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from slipstream.benchmarks.dummy_worker import dummy_worker
from slipstream.benchmarks.models import NUM_DRAFT_TOKENS, draft_options
from slipstream.bundled import standalone_dir, target_dir
from slipstream.cli.cancellation import background
from slipstream.cli.health import wait_until_serving
from slipstream.cli.mps import MpsMode, mps_daemon, outside_mps
from slipstream.cli.process import bound
from slipstream.client import AsyncClient
from slipstream.common.errors import SlipstreamError
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import Scrape, scrape
from slipstream.common.wire.server import ServerState
from slipstream.gateway.config import GatewayConfig, gateway_name

SCRIPTS = Path(sys.executable).parent
LOG_DIR = Path("build/benchmarks")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
GATEWAY = (sys.executable, "-m", "slipstream.gateway.main")

_GATEWAY_OPTIONS = {member.name for member in fields(GatewayConfig)}

Option = str | int | float | Path | None
"""A value of the command line; True is a flag, None and False leave the option out."""


@dataclass(frozen=True, slots=True)
class Served:
    """A scheduler that serves, with the gateway in front of it."""

    address: str
    """The gateway's, for clients."""
    scheduler: str
    """The scheduler's own address."""
    metrics_port: int
    """The scheduler's."""


class Stack:
    """Services that live together in one temporary directory, on one device. An asynchronous context manager.

    They die with this process, if they are started on the main thread.

    Workers live as long as the stack; schedulers come and go. Under MPS the workers are clients of a daemon that the
    stack starts, and the schedulers stay outside.
    """

    def __init__(self, log_dir: Path | None = LOG_DIR, *, device: str = "cpu", mps: MpsMode | None = None) -> None:
        """`log_dir` takes the services' logs; None: this process's stderr. `mps`: AUTO on a GPU unless it is given."""
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._device = device
        self._mps = mps or (MpsMode.AUTO if device == "cuda" else MpsMode.OFF)
        self._held = AsyncExitStack()
        self._directory = Path()
        self._worker_environment: Mapping[str, str] = {}

    async def __aenter__(self) -> Stack:
        async with AsyncExitStack() as held:
            self._directory = Path(held.enter_context(TemporaryDirectory(prefix="slipstream-")))
            daemon = await held.enter_async_context(mps_daemon(self._mps, self._directory))
            self._worker_environment = outside_mps(self._directory) if daemon is None else daemon.environment
            self._held = held.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._held.aclose()

    def socket(self, name: str) -> str:
        """The address of the worker or scheduler with this name."""
        return f"unix:{self._directory / 'run' / f'{name}.sock'}"

    async def worker(
        self, role: str, *, name: str | None = None, program: tuple[str, ...] = (), **options: Option
    ) -> None:
        """Starts a draft or verify service; returns when it serves. `program`: another one with the same options."""
        name = name or role
        command = program or (str(SCRIPTS / f"slipstream-{role}"),)
        await self.process(name, *command, *words(listen=self.socket(name), device=self._device, **options))

    async def dummies(self, draft_ms: float, verify_ms: float, *, suffix: str = "", **options: Option) -> None:
        """Starts both workers of the bundled models, with kernels of these lengths in place of the models."""
        pair = (("draft", draft_ms, standalone_dir()), ("verify", verify_ms, target_dir()))
        await asyncio.gather(
            *(
                self.worker(role, name=role + suffix, program=dummy_worker(role, length_ms), model=model, **options)
                for role, length_ms, model in pair
            )
        )

    async def models(self, *names: str, target: Path | None = None, drafts: Mapping[str, Path] | None = None) -> None:
        """Starts verify, and the draft services of these names: with the bundled models unless others are given."""
        options = {name: draft_options(name, target=target, model=(drafts or {}).get(name)) for name in names}
        starts = [self.worker("draft", name=name, **options[name]) for name in names]
        await asyncio.gather(self.worker("verify", model=target or target_dir()), *starts)

    async def process(self, name: str, *command: str) -> None:
        """Starts any program that serves at the address of `name`; returns when it serves."""
        service = self._service(name, self.socket(name), *command, environment=self._worker_environment)
        await self._held.enter_async_context(service)

    @asynccontextmanager
    async def scheduler(
        self,
        draft: str | None = None,
        *,
        name: str = "scheduler",
        verify: str = "verify",
        metrics_port: int | None = None,
        gateway_metrics_port: int | None = None,
        gateway_program: tuple[str, ...] = GATEWAY,
        fixed_draft_tokens: int | None = NUM_DRAFT_TOKENS,
        **options: Option,
    ) -> AsyncIterator[Served]:
        """Runs a scheduler over the workers with these names, and a gateway; without a draft it decodes plainly.

        `name`: schedulers at the same time have different ones. `fixed_draft_tokens`: None drafts as many
        tokens as pay. `options` are those of either.
        """
        address, port = self.socket(name), metrics_port or free_ports(1)[0]
        of_gateway = {name: options.pop(name) for name in _GATEWAY_OPTIONS & options.keys()}
        workers = words(verify=self.socket(verify), draft=draft and self.socket(draft), device=self._device)
        given = words(listen=address, metrics_port=port, fixed_draft_tokens=fixed_draft_tokens, **options)
        async with (
            self._service(name, address, sys.executable, "-m", "slipstream.scheduler.main", *workers, *given),
            self.gateway(address, port, gateway_metrics_port, program=gateway_program, **of_gateway) as served,
        ):
            yield served

    @asynccontextmanager
    async def gateway(
        self,
        scheduler: str,
        metrics_port: int,
        gateway_metrics_port: int | None = None,
        *,
        program: tuple[str, ...] = GATEWAY,
        **options: Option,
    ) -> AsyncIterator[Served]:
        """Runs a gateway in front of the scheduler at this address, whose metrics are at `metrics_port`.

        It has a journal, as one of `slipstream up` has, which ends with it. With the option `gateways` there are
        several on one port; the metrics are then those of the first. `program`: another one with the same options.
        """
        count = int(str(options.get("gateways", 1)))
        ports = [gateway_metrics_port or free_ports(1)[0], *free_ports(count - 1)]
        async with AsyncExitStack() as held:
            address = f"127.0.0.1:{free_ports(1)[0]}"
            if count > 1:
                address = held.enter_context(Listener.claim("127.0.0.1:0", is_shared=True)).address
            shared = words(listen=address, scheduler=scheduler, **options)
            shared += words(state_dir=held.enter_context(TemporaryDirectory(dir=self._directory)))
            starts = []
            for index, port in enumerate(ports):
                name, health, own = "gateway", address, words(metrics_port=port)
                if count > 1:
                    name = gateway_name(index)
                    health = self.socket(name)
                    own += words(private_listen=health, gateway_index=index)
                starts.append(self._service(name, health, *program, *shared, *own))
            await asyncio.gather(*map(held.enter_async_context, starts))
            yield Served(address, scheduler, metrics_port)

    @asynccontextmanager
    async def _service(
        self, name: str, address: str, *command: str, environment: Mapping[str, str] | None = None
    ) -> AsyncIterator[None]:
        environment = outside_mps(self._directory) if environment is None else environment
        log = None if self._log_dir is None else self._log_dir / f"{name}.log"
        async with running(name, address, *command, log=log, environment=environment):
            yield


@asynccontextmanager
async def running(
    name: str,
    address: str,
    *command: str,
    log: Path | None,
    environment: Mapping[str, str],
    timeout_s: float = START_TIMEOUT_S,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a command that serves at an address, with its output at the end of `log`. Begins when it serves.

    Raises RuntimeError if it ends first, or takes longer. Ends it by SIGTERM, or by SIGKILL if that takes too long.
    """
    output = None if log is None else log.open("ab")
    process = await asyncio.create_subprocess_exec(
        *bound(command), stdout=output, stderr=output, env={**os.environ, **environment}
    )
    try:
        async with background(process.wait(), wait_until_serving(address)) as (ended, serving):
            await asyncio.wait((ended, serving), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise RuntimeError(f"{name} ended with status {ended.result()} before it served")
            if not serving.done():
                raise RuntimeError(f"{name} does not serve after {timeout_s:.0f} s")
            serving.result()
        yield process
    finally:
        await end(process)
        if output is not None:
            output.close()


def words(**options: Option) -> tuple[str, ...]:
    """Options as a command line has them."""
    found: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            found.append(f"--{name.replace('_', '-')}")
            found += [] if value is True else [str(value)]
    return tuple(found)


def free_ports(count: int) -> list[int]:
    """Ports of this host that are free at the moment."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in sockets]


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends a process by SIGTERM, or by SIGKILL if that takes too long; returns when it has ended."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


SERVICES = ("gateway", "scheduler", "verify", "draft")
BESIDE = ("grammar",)
"""Services that `slipstream up` starts, too, where their packages are there."""
LOG_DIR_VARIABLE = "SLIPSTREAM_BENCHMARK_LOG_DIR"
"""The environment variable that names a folder in which the output of `slipstream up` and its services is kept."""
UP_TIMEOUT_S = 300.0
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
            for service in (*SERVICES, *BESIDE):
                if any(word.endswith((f".{service}.main", f".{service}_main")) for word in command):
                    found[service] = child
        return found

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

    async def fault(self, service: str, fault: str, *, pause_s: float = 0.0) -> psutil.Process:
        """Gives a service one of FAULTS, and returns the process that got it. Raises KeyError if there is none."""
        process = self.services()[service]
        process.send_signal(FAULTS[fault])
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
    return words(device=device, slots=slots, fixed_draft_tokens=NUM_DRAFT_TOKENS, **on_gpu)


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
        starting = running("slipstream up", address, *command, log=log, environment={}, timeout_s=UP_TIMEOUT_S)
        try:
            async with starting as process:
                yield UpServer(address, Path(directory), psutil.Process(process.pid))
        except BaseException:
            print(log.read_text(encoding="utf-8"), file=sys.stderr)
            raise
