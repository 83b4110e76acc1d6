"""Draft and verify as processes of their own, and a `WorkerSession` in this one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from prometheus_client import CollectorRegistry

from slipstream.benchmarks.dummy_worker import dummy_worker
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.wire.server import DraftSwap, SwapOutcome, SwapTerms
from slipstream.common.wire.step import Role
from slipstream.protos import trace_pb2_grpc
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.draft_session import DraftSession
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.results import Outgoing
from slipstream.scheduler.session import WorkerSession
from slipstream.scheduler.timeline import SERVICE_NAME, TimelineServicer
from slipstream.scheduler.waiting_queue import WaitingQueue
from tests.harness.counted_jobs import Job, JobBook
from tests.harness.grpc_server import running_server
from tests.harness.local_epoch import PATIENCE_MS
from tests.harness.waiting import until


class WorkerProcesses:
    """The processes, by role; each can be lost and started again. All are gone when the block ends."""

    def __init__(
        self,
        folder: Path,
        models: dict[Role, Path],
        *options: str,
        dummy_ms: float | None = None,
        programs: Mapping[Role, tuple[str, ...]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`options` go to both. `models`: a role may have none. `dummy_ms`: of kernels in place of them.

        `programs`: Python's arguments for another program than a role's service. `environment`: of both, this process's
        if it is not given.
        """
        self.programs, self.models = dict(programs or {}), dict(models)
        """Both as at the next start."""
        self._environment = {**(environment or os.environ), "OMP_NUM_THREADS": "1"}
        self._dummy_ms = dummy_ms
        self._folder = folder
        self._options = options
        self._running: dict[Role, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def address(self, role: Role) -> str:
        """Returns the address of the role's worker."""
        return f"unix:{self._folder}/{role.value}.sock"

    def start(self, *roles: Role) -> None:
        """Starts them and returns before they are ready."""
        for role in roles:
            address, model = ("--listen", self.address(role)), self.models.get(role)
            options = (
                *address,
                *(() if model is None else ("--model", str(model))),
                "--log-level",
                "WARNING",
                *self._options,
            )
            program = self.programs.get(role, ("-m", f"slipstream.services.{role.value}_main"))
            command = (sys.executable, *program, *options)
            if self._dummy_ms is not None:
                command = dummy_worker(role.value, self._dummy_ms, *options)
            self._running[role] = subprocess.Popen(command, env=self._environment)

    def pid(self, role: Role) -> int:
        """Process id of a worker."""
        return self._running[role].pid

    def send_signal(self, role: Role, number: int) -> None:
        """Sends a signal."""
        self._running[role].send_signal(number)

    def wait(self, role: Role) -> int:
        """Waits for the process to end; returns its status."""
        return self._running.pop(role).wait(timeout=20)

    def end(self) -> list[int]:
        """Tells both to end, and waits for it; returns their statuses."""
        for process in self._running.values():
            process.terminate()
        return [self.wait(role) for role in list(self._running)]

    def kill(self) -> None:
        """Kills what still runs."""
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()


class Attached(asyncio.Event):
    """Set while an epoch is open."""

    _error: SlipstreamError | None = None

    async def wait(self) -> Literal[True]:
        """Raises the error for which the session has ended: there will be no other epoch."""
        await super().wait()
        if self._error is not None:
            raise self._error
        return True

    def fail(self, error: SlipstreamError) -> None:
        """The session has ended."""
        self._error = error
        self.set()


class Client:
    """The clients' side: submits jobs and hears what becomes of them. Belongs to an event loop."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(64)
        self.attached = Attached()
        self.num_epochs = 0
        self.reasons: list[str] = []
        """Why epochs ended."""
        self.errors: list[SlipstreamError] = []
        """Why there will be no other."""
        self.epoch: Epoch | None = None
        self.drafts: DraftSession | None = None
        self.registry = CollectorRegistry()
        """Metrics of the session."""
        self.jobs = JobBook(self.queue)
        self._ends: dict[Job, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()

    def put(self, outgoing: Outgoing) -> None:
        """Called on the loop's thread."""
        self._loop.call_soon_threadsafe(self._take_in, outgoing)

    def listener(self) -> _Listener:
        """To be told what happens."""
        return _Listener(self, self._loop)

    async def run(self, *jobs: Job) -> list[list[int]]:
        """The tokens of each. Raises UnavailableError, with the reason, if their epoch ends first."""
        self.jobs.add(*jobs)
        ends = [self._ends.setdefault(job, self._loop.create_future()) for job in jobs]
        await asyncio.gather(*ends)
        return [self.jobs.outputs[job] for job in jobs]

    async def served(self, *, with_draft: bool = True) -> None:
        """Returns when sequences can run and, if it is expected, a draft takes part."""
        await self.attached.wait()
        if with_draft:
            await until(lambda: self.draft_state == "attached")

    @property
    def draft_state(self) -> str:
        """See `DraftStatus`."""
        assert self.drafts is not None, "the session has begun"
        return self.drafts.status.state

    async def swap(self, address: str, **terms: Any) -> SwapOutcome:
        """Swaps the draft for the one at an address; none for an empty one."""
        assert self.drafts is not None, "the session has begun"
        return await asyncio.to_thread(self.drafts.swap, DraftSwap(address=address, terms=SwapTerms(**terms)))

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric."""
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, f"there is no {name} with {labels}"
        return value

    def lose(self, reason: str) -> None:
        """The epoch is over, and so are its jobs."""
        for end in self._ends.values():
            if not end.done():
                end.set_exception(UnavailableError(reason))

    def fail(self, error: SlipstreamError) -> None:
        """There will be no other epoch, and nobody need wait for one."""
        self.errors.append(error)
        self.attached.fail(error)
        self.lose(str(error))

    def _take_in(self, outgoing: Outgoing) -> None:
        for job, row in self.jobs.take(outgoing):
            if row.finish_reason is not None:
                self._ends[job].set_result(None)


class _Listener:
    """Implements `SessionListener` by handing over to the event loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def attached(self, epoch: Epoch) -> None:
        """See `SessionListener.attached`."""
        self._loop.call_soon_threadsafe(self._attached, epoch)

    def detached(self, reason: str) -> None:
        """See `SessionListener.detached`."""
        self._loop.call_soon_threadsafe(self._detached, reason)

    def failed(self, error: SlipstreamError) -> None:
        """See `SessionListener.failed`."""
        self._loop.call_soon_threadsafe(self._client.fail, error)

    def _attached(self, epoch: Epoch) -> None:
        self._client.num_epochs += 1
        self._client.epoch = epoch
        self._client.attached.set()

    def _detached(self, reason: str) -> None:
        self._client.reasons.append(reason)
        self._client.lose(reason)
        self._client.epoch = None
        self._client.attached.clear()


@contextmanager
def running_session(
    processes: WorkerProcesses, *, device: Device | None = None, has_draft: bool = True, **settings: object
) -> Iterator[Client]:
    """Runs a `WorkerSession` and yields its clients' side. `device` is that of the workers; None is the CPU."""
    client = Client()
    config = SchedulerConfig(
        verify=processes.address(Role.VERIFY),
        draft=processes.address(Role.DRAFT) if has_draft else None,
        **{"draft_timeout_ms": PATIENCE_MS, "fixed_draft_tokens": 4, **settings},  # type: ignore[arg-type]
    )
    session = WorkerSession(
        config,
        device or HostDevice(),
        client.queue,
        registry=client.registry,
        listener=client.listener(),
        sink=client.put,
    )
    client.drafts = session.drafts
    session.start()
    try:
        yield client
    finally:
        client.queue.stop()
        session.join()


@asynccontextmanager
async def timeline_server(client: Client) -> AsyncIterator[str]:
    """Serves what the session's epoch records; yields the address."""
    service = (SERVICE_NAME, trace_pb2_grpc.add_TimelineServicer_to_server, TimelineServicer(lambda: client.epoch))
    async with running_server(service) as server:
        yield server.address
