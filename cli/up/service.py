"""A service that a supervisor keeps: its command, the process that it has now, and what became of those before."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from slipstream.cli.cancellation import background
from slipstream.cli.status import CHANNEL_OPTIONS, WHOLE_SERVER, wait_until_serving
from slipstream.cli.up.process import ServiceProcess, ServiceReport
from slipstream.cli.up.smg import HTTP, smg_answers, wait_until_smg_serves
from slipstream.common.rpc.service_options import WRONG_SETTINGS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from slipstream.cli.up.process import ServiceCommand

    Answers = Callable[[float], Awaitable[bool]]
    """Checks the health of a service: whether it answers in so many seconds."""


class ServiceState(enum.Enum):
    """State of a service, as `on_change` gets it."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"


class Service:
    """Belongs to the supervisor, which starts and ends its processes."""

    def __init__(self, command: ServiceCommand, *, is_kept: bool = True) -> None:
        self.command = command
        """For the next start."""
        self.is_kept = is_kept
        """True if it is started again when it dies."""
        self.state = ServiceState.LOADING
        self.num_restarts = 0
        self.last_end = ""
        self.was_ever_ready = False
        self.num_failed_starts = 0
        """Processes in a row that ended before they were ready."""
        self.num_hung_starts = 0
        """Processes that were killed before they were ready, as they hung or took too long, since one was ready."""
        self.slowest_start_s = 0
        """The longest that a process took to its first answer to a health check, in whole seconds."""
        self.due: float | None = None
        """When it is started again, by `time.monotonic`; None while it is to have the process that it has."""
        self.is_leaving = False
        """True once its process is ended by plan."""
        self.process: ServiceProcess
        self.watching: asyncio.Task[str]
        """Ends with the process, whose fault is its result: "did not answer for 10 s"; empty if it ended by itself.
        A TimeoutError says that it was not ready in time, though it may answer."""

    @property
    def name(self) -> str:
        """The service's name."""
        return self.command.name

    @property
    def group(self) -> str:
        """Name of the group that it is started again with, as its process was placed."""
        return self.process.command.group or self.name

    @property
    def is_ready(self) -> bool:
        """True if its process was ready."""
        return self.process.ready.is_set()

    @property
    def is_running(self) -> bool:
        """True if its process has not ended."""
        return not self.process.ended.is_set()

    @property
    def ended_at_work(self) -> bool:
        """True if its process ended in the midst of its work, which breaks its group.

        One that hangs is let go of before it is killed, and one that ends by itself before it is ready has no work.
        """
        process = self.process
        is_orderly = process.exit_status == 0 or (process.exit_status is not None and not self.is_ready)
        return not process.fault and not is_orderly

    @property
    def has_wrong_settings(self) -> bool:
        """True if its process ended before it was ready because its settings or its model cannot be served."""
        return not self.is_ready and self.process.exit_status == WRONG_SETTINGS

    def report(self) -> ServiceReport:
        """What it is now."""
        return ServiceReport(
            name=self.name,
            pid=self.process.pid if self.is_running else 0,
            state=self.state.value,
            num_restarts=self.num_restarts,
            last_end=self.last_end,
            address=self.process.command.address,
        )

    def start(
        self, command: ServiceCommand, *, ready_timeout_s: float, hang_timeout_s: float, on_ready: Callable[[], None]
    ) -> None:
        """Starts a process by `command`, and watches it."""
        self.due = None
        self.process = ServiceProcess(command)
        self.watching = asyncio.create_task(self._watch(self.process, ready_timeout_s, hang_timeout_s, on_ready))

    def start_timeout_s(self, hang_timeout_s: float) -> float:
        """Time that a process has to its first answer to a health check: any until one was ready, then by the slowest.

        It doubles with each start that hangs: one may only be slower than those before, as from a cold disk.
        """
        if not self.was_ever_ready:
            return math.inf
        return _START_FACTOR * max(hang_timeout_s, self.slowest_start_s) * 2.0 ** min(self.num_hung_starts, 10)

    async def stop_watching(self) -> None:
        """From here on its process is ended by plan."""
        self.is_leaving, self.due = True, None
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)

    async def _watch(
        self, process: ServiceProcess, ready_timeout_s: float, hang_timeout_s: float, on_ready: Callable[[], None]
    ) -> str:
        address, begun = process.command.address, time.monotonic()

        async def become_ready() -> None:
            async with asyncio.timeout(ready_timeout_s):
                await _until_serving(address)
            process.ready.set()
            on_ready()

        async def find_hang() -> str:
            missed_s = self.start_timeout_s(hang_timeout_s)
            async with health_checks(address) as answers:
                if await _answers_within(answers, missed_s, hang_timeout_s / NUM_CHECKS):
                    self.slowest_start_s = max(self.slowest_start_s, math.ceil(time.monotonic() - begun))
                    missed_s = hang_timeout_s
                    await until_hung(answers, missed_s)
            return f"did not answer for {missed_s:g} s"

        async with background(become_ready(), find_hang(), process.ended.wait()) as (readying, hanging, ending):
            await asyncio.wait((readying, hanging, ending), return_when=asyncio.FIRST_COMPLETED)
            if readying.done() and not ending.done():
                await readying
                await asyncio.wait((hanging, ending), return_when=asyncio.FIRST_COMPLETED)
            return "" if ending.done() else await hanging


async def _until_serving(address: str) -> None:
    await (wait_until_smg_serves(address) if address.startswith(HTTP) else wait_until_serving(address))


NUM_CHECKS = 4
"""Health checks in a row that a service must leave without an answer. Several, for this process may have been stopped
itself: then the deadline of the check that was under way has passed, and that of the next one has not."""
_START_FACTOR = 3
"""A restart has so many times the slowest start, or the hang timeout if that is longer, to its first answer."""


@asynccontextmanager
async def health_checks(address: str) -> AsyncIterator[Answers]:
    """Yields what checks the health of the service at `address`. Any answer counts as one."""
    if address.startswith(HTTP):
        yield partial(smg_answers, address)
        return
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def answers(timeout_s: float) -> bool:
            with suppress(grpc.aio.AioRpcError):
                await stub.Check(WHOLE_SERVER, timeout=timeout_s, wait_for_ready=True)
                return True
            return False

        yield answers


async def until_hung(answers: Answers, timeout_s: float) -> None:
    """Returns when a service that has answered a health check just now answers none for so long."""
    part_s, is_alive = timeout_s / NUM_CHECKS, True
    while is_alive:
        await asyncio.sleep(part_s)
        is_alive = await _answers_within(answers, timeout_s, part_s)


async def _answers_within(answers: Answers, timeout_s: float, part_s: float) -> bool:
    """Returns whether one of the health checks of that time, which take `part_s` each, is answered."""
    num_missed = 0
    while num_missed * part_s < timeout_s:
        begun = time.monotonic()
        if await answers(part_s):
            return True
        num_missed += 1
        await asyncio.sleep(max(0.0, part_s - (time.monotonic() - begun)))
    return False
