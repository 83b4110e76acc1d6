"""Starts services on this machine, waits until they serve, restarts those that die, and ends all in order."""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NoReturn, TypeVar

from slipstream.cli.cancellation import background, shielded
from slipstream.cli.status import wait_until_serving
from slipstream.cli.up.process import ServiceProcess
from slipstream.cli.up.smg import HTTP, wait_until_smg_serves
from slipstream.common.errors import DeadlineExceededError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from slipstream.cli.up.process import ServiceCommand

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DEATH_NOTICED_S = 0.5
MAX_DEATHS, DEATHS_WITHIN_S = 5, 60.0
"""A service that dies so many times within this time is not started again."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0


class ServiceState(enum.Enum):
    """State of a service, as `on_change` gets it."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"


class Supervisor:
    """Starts, watches and stops the services of one machine, on the main thread's event loop.

    As a context manager it ends with every service stopped, whatever happened inside.
    """

    def __init__(
        self,
        *,
        ready_timeout_s: float,
        drain_timeout_s: float,
        exit_timeout_s: float = 2.0,
        on_change: Callable[[str, ServiceState], None] = lambda _name, _state: None,
        place: Callable[[ServiceCommand], ServiceCommand] = lambda command: command,
        before_kill: Callable[[int], Awaitable[None]] | None = None,
        hurry: asyncio.Event | None = None,
    ) -> None:
        """Bounds the time to become ready, to finish work, and to exit when work need not be finished any more.

        `on_change` is told each change of a service's state. `place` may change a command before it starts.
        `before_kill` is waited for, with the process's id, before a service that does not end is killed. `hurry`, when
        set, makes a stop wait for no work.
        """
        self._ready_timeout_s = ready_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._on_change = on_change
        self._place = place
        self._before_kill = before_kill
        self._batches: list[list[ServiceProcess]] = []
        self._ready: set[ServiceProcess] = set()
        self._restarts: defaultdict[str, list[float]] = defaultdict(list)
        """By group: when it was started again, since it last ran for `DEATHS_WITHIN_S`."""
        self._hurry = asyncio.Event() if hurry is None else hurry

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Stops every service that still runs; a cancellation meanwhile makes it hurry."""
        await shielded(self.stop(), during=error, on_cancel=self._hurry.set)

    def pid(self, name: str) -> int:
        """Process id of a service that was started and not stopped."""
        return next(process.pid for process in self._processes() if process.name == name)

    def start(self, *commands: ServiceCommand) -> None:
        """Starts services side by side. Later ones are stopped earlier."""
        batch: list[ServiceProcess] = []
        self._batches.append(batch)
        for command in commands:
            batch.append(ServiceProcess(self._place(command)))
            self._on_change(command.name, ServiceState.LOADING)

    async def wait_ready(self) -> None:
        """Returns when every service says SERVING.

        Raises UnavailableError as soon as one dies, DeadlineExceededError when the time is up; both name the service.
        """
        waiting = [process for process in self._processes() if process not in self._ready]
        await self.while_alive(self._wait_ready(waiting))

    async def watch(self) -> NoReturn:
        """Returns never: raises UnavailableError, with the end of its log, when a service dies for good.

        A service whose command says `restarts` is started again instead, with all services of its `group`, unless it
        dies before it was ever ready, or too often. Raises DeadlineExceededError when it then does not become ready in
        time.
        """
        async with background(*(self._keep(group) for group in self._groups())) as keeping:
            ended, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        await next(keeper for keeper in keeping if keeper in ended)
        raise AssertionError("a service is kept until an error")

    async def while_alive(self, work: Coroutine[object, object, T]) -> T:
        """Does the work; when a service dies, drops it and raises as `watch` does."""
        async with background(work, self.watch()) as (working, watching):
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            # A death explains an error of the work, not the other way round, and may be noticed a little later.
            if not watching.done() and not working.cancelled() and working.exception() is not None:
                await asyncio.wait((watching,), timeout=_DEATH_NOTICED_S)
            if watching.done():
                await watching
            result: T = await working
        return result

    async def stop(self, *names: str) -> None:
        """Stops the services of these names, or all: the last started first, each given time to finish its work.

        Raises, when all are stopped, the first error that came up.
        """
        errors: list[BaseException] = []
        for batch in reversed(self._batches):
            leaving = [process for process in batch if not names or process.name in names]
            ends = await asyncio.gather(*(self._end(process) for process in leaving), return_exceptions=True)
            errors += [end for end in ends if end is not None]
            batch[:] = [process for process in batch if process not in leaving]
        for error in errors[1:]:
            logger.error("while stopping: %r", error)
        if errors:
            raise errors[0]

    def _processes(self) -> list[ServiceProcess]:
        return [process for batch in self._batches for process in batch]

    def _groups(self) -> list[list[ServiceProcess]]:
        groups: defaultdict[str, list[ServiceProcess]] = defaultdict(list)
        for process in self._processes():
            groups[_group_of(process)].append(process)
        return list(groups.values())

    async def _keep(self, group: list[ServiceProcess]) -> NoReturn:
        while True:
            dead = await _first_ended(group)
            self._on_change(dead.name, ServiceState.DIED)
            end = f"{dead.name} {dead.describe_end()}{'' if dead in self._ready else ' before it was ready'}"
            backoff_s = self._backoff_after(dead, end)
            others = [process for process in group if process is not dead]
            together = "".join(f", together with {other.name}" for other in others)
            logger.warning("%s and is started again%s; its log is now %s.1", end, together, dead.command.log_path)
            await asyncio.gather(*(self._end_broken(other) for other in others))
            await asyncio.sleep(backoff_s)
            self._restarts[_group_of(dead)].append(time.monotonic())
            group = [self._start_again(process) for process in group]
            await self._ready_or_ended(group)

    def _backoff_after(self, dead: ServiceProcess, end: str) -> float:
        """Returns the seconds to wait before a service is started again. Raises UnavailableError if it must not be."""
        restarts, now = self._restarts[_group_of(dead)], time.monotonic()
        if restarts and now - restarts[-1] >= DEATHS_WITHIN_S:
            restarts.clear()
        num_deaths = 1 + sum(now - at < DEATHS_WITHIN_S for at in restarts)
        was_ever_ready = dead in self._ready or bool(restarts)
        if not (dead.command.restarts and was_ever_ready) or num_deaths >= MAX_DEATHS:
            often = f", the last of {num_deaths} ends within {DEATHS_WITHIN_S:g} s" if restarts else ""
            log = f"the end of its log ({dead.command.log_path}):\n{dead.last_log_lines()}"
            raise UnavailableError(f"{end}{often}; {log}")
        return min(_FIRST_BACKOFF_S * 2 ** (len(restarts) - 1), _MAX_BACKOFF_S) if restarts else 0.0

    async def _end_broken(self, process: ServiceProcess) -> None:
        """Ends a service that a death in its group has broken: it has no work to finish."""
        if process.ended.is_set():
            self._on_change(process.name, ServiceState.DIED)
            return
        self._on_change(process.name, ServiceState.STOPPING)
        await self._kill(process)
        self._on_change(process.name, ServiceState.STOPPED)

    def _start_again(self, ended: ServiceProcess) -> ServiceProcess:
        ended.remove_socket()
        process = ServiceProcess(self._place(ended.command))
        for batch in self._batches:
            batch[:] = [process if one is ended else one for one in batch]
        self._on_change(process.name, ServiceState.LOADING)
        return process

    async def _ready_or_ended(self, group: list[ServiceProcess]) -> None:
        async with background(self._wait_ready(group), _first_ended(group)) as (becoming, ending):
            await asyncio.wait((becoming, ending), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await becoming

    async def _wait_ready(self, waiting: list[ServiceProcess]) -> None:
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await asyncio.gather(*(self._wait_one_ready(process) for process in waiting))
        except TimeoutError:
            late = [process for process in waiting if process not in self._ready]
            logs = "\n".join(f"{process.command.log_path}:\n{process.last_log_lines()}" for process in late)
            raise DeadlineExceededError(
                f"{' and '.join(process.name for process in late)} not ready after {self._ready_timeout_s:g} s; "
                f"the end of the log:\n{logs}"
            ) from None

    async def _wait_one_ready(self, process: ServiceProcess) -> None:
        address = process.command.address
        await (wait_until_smg_serves(address) if address.startswith(HTTP) else wait_until_serving(address))
        self._ready.add(process)
        self._on_change(process.name, ServiceState.READY)

    async def _end(self, process: ServiceProcess) -> None:
        try:
            if not process.ended.is_set():
                await self._end_running(process)
        finally:
            if process.ended.is_set():
                process.remove_socket()

    async def _end_running(self, process: ServiceProcess) -> None:
        try:
            self._on_change(process.name, ServiceState.STOPPING)
        finally:
            process.send(signal.SIGTERM)
            if not await _ends_within(process, self._drain_timeout_s, self._hurry):
                process.send(signal.SIGTERM)
                if not await _ends_within(process, self._exit_timeout_s, asyncio.Event()):
                    await self._kill(process)
        self._on_change(process.name, ServiceState.STOPPED)

    async def _kill(self, process: ServiceProcess) -> None:
        try:
            if self._before_kill is not None:
                await self._before_kill(process.pid)
        finally:
            process.send(signal.SIGKILL)
            await process.ended.wait()


def _group_of(process: ServiceProcess) -> str:
    return process.command.group or process.name


async def _first_ended(group: list[ServiceProcess]) -> ServiceProcess:
    """Waits until a service of the group has ended, and returns it."""
    async with background(*(process.ended.wait() for process in group)) as ends:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    return next(process for process in group if process.ended.is_set())


async def _ends_within(process: ServiceProcess, timeout_s: float, hurry: asyncio.Event) -> bool:
    """Returns whether the process ends in that time, and before `hurry` is set."""
    async with background(process.ended.wait(), hurry.wait()) as waits:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return process.ended.is_set()
