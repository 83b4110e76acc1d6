"""A service that a supervisor keeps: its command, the process that it has now, and what became of those before."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from typing import TYPE_CHECKING

from slipstream.cli.cancellation import background
from slipstream.cli.health import NUM_CHECKS, answers_within, health_checks, until_hung, wait_until_serving
from slipstream.cli.process import ServiceProcess, ServiceReport
from slipstream.common.rpc.service_options import WRONG_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.cli.process import ServiceCommand

_START_FACTOR = 3
"""A restart has this many times the slowest start, or the hang timeout if longer, to its first answer."""


class ServiceState(enum.Enum):
    """State of a service, as `on_change` gets it."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"


class Service:
    """A service and its current process; belongs to the supervisor, which starts and ends the processes."""

    def __init__(self, command: ServiceCommand, *, is_kept: bool = True) -> None:
        """`command` is for its next start; if `is_kept`, it is started again when it dies."""
        self.command = command
        self.is_kept = is_kept
        self.state = ServiceState.LOADING
        self.num_restarts = 0
        self.last_end = ""
        self.was_ever_ready = False
        self.num_failed_starts = 0
        """Processes in a row that ended before they were ready."""
        self.num_hung_starts = 0
        """Processes since the last ready one that were killed before they were ready, as they hung or took too long."""
        self.slowest_start_s = 0
        """Longest time from a start to the first answer to a health check, in whole seconds."""
        self.due: float | None = None
        """Time of its next start, by `time.monotonic`. None: it keeps its process."""
        self.is_leaving = False
        """True once its process is ended by plan."""
        self.process: ServiceProcess
        self.watching: asyncio.Task[str]
        """Ends with the process. Its result is the fault, as "did not answer for 10 s"; empty if it ended by itself.
        A TimeoutError says that it was not ready in time, though it may answer."""

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def group(self) -> str:
        """Group that it is started again with, as its process was placed."""
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

        A process that hangs is released before it is killed; before it is ready it has no work.
        """
        status = self.process.exit_status
        return not self.process.fault and (status is None or (status != 0 and self.is_ready))

    @property
    def has_wrong_settings(self) -> bool:
        """True if its process ended before it was ready because its settings or its model cannot be served."""
        return not self.is_ready and self.process.exit_status == WRONG_SETTINGS

    def report(self) -> ServiceReport:
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
        """Time for a start's first answer to a health check: any until one was ready, then by the slowest.

        It doubles with each start that hangs: a start may only be slower than earlier ones, as from a cold disk.
        """
        if not self.was_ever_ready:
            return math.inf
        return _START_FACTOR * max(hang_timeout_s, self.slowest_start_s) * 2.0 ** min(self.num_hung_starts, 10)

    async def stop_watching(self) -> None:
        """Stops watching: from here on its process is ended by plan."""
        self.is_leaving, self.due = True, None
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)

    async def _watch(
        self, process: ServiceProcess, ready_timeout_s: float, hang_timeout_s: float, on_ready: Callable[[], None]
    ) -> str:
        address, begun = process.command.address, time.monotonic()

        async def become_ready() -> None:
            async with asyncio.timeout(ready_timeout_s):
                await wait_until_serving(address)
            process.ready.set()
            on_ready()

        async def find_hang() -> str:
            missed_s = self.start_timeout_s(hang_timeout_s)
            async with health_checks(address) as answers:
                if await answers_within(answers, missed_s, hang_timeout_s / NUM_CHECKS):
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
