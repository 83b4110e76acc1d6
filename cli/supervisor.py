"""Starts services on this machine, waits until they serve, restarts those that die or hang, and ends all in order."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

from slipstream.cli.cancellation import background, shielded
from slipstream.cli.service import Service, ServiceState
from slipstream.cli.up_config import RestartSettings
from slipstream.common.errors import DeadlineExceededError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from slipstream.cli.process import ServiceCommand, ServiceProcess

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DEATH_NOTICED_S = 0.5
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0


@dataclass(slots=True)
class RestartRecord:
    """The moments at which a service was started again."""

    settings: RestartSettings
    times: list[float] = field(default_factory=list)
    """Moments of the restarts, on time.monotonic's clock."""

    def recent(self, now: float) -> list[float]:
        """The restarts within the window."""
        return [at for at in self.times if now - at < self.settings.restart_window_s]

    def is_used_up(self, now: float) -> bool:
        """True if no further restart is allowed now."""
        return len(self.recent(now)) >= self.settings.max_restarts

    def due(self, now: float) -> float:
        """Returns when the next restart may be: at once, after growing pauses, then when the window has room."""
        recent, most = self.recent(now), self.settings.max_restarts
        if len(recent) >= most:
            return (recent[-most] if most else now) + self.settings.restart_window_s
        return now + min(_FIRST_PAUSE_S * 2 ** min(len(recent) - 1, 10), _MAX_PAUSE_S) if recent else now

    def add(self, now: float) -> None:
        """Counts a restart."""
        self.times = [*self.recent(now), now]


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
        restarts: RestartSettings | None = None,
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
        self._settings = restarts or RestartSettings()
        self._on_change = on_change
        self._place = place
        self._before_kill = before_kill
        self._batches: list[list[Service]] = []
        self._records: defaultdict[str, RestartRecord] = defaultdict(lambda: RestartRecord(self._settings))
        """By group, and by name for a death that broke no other service."""
        self._changed = asyncio.Event()
        """Set, and replaced, when the services or a state have changed."""
        self._hurry = asyncio.Event() if hurry is None else hurry
        self._is_starting = True

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Stops every service that still runs; a cancellation meanwhile makes it hurry."""
        await shielded(self.stop(), during=error, on_cancel=self._hurry.set)

    def services(self) -> list[Service]:
        """The services that were started and not stopped, in that order. They stay the supervisor's."""
        return [service for batch in self._batches for service in batch]

    def service(self, name: str) -> Service:
        """Returns the service of this name, which must exist."""
        return next(service for service in self.services() if service.name == name)

    def start(self, *commands: ServiceCommand) -> None:
        """Starts services side by side. Later ones are stopped earlier."""
        self._batches.append([])
        for command in commands:
            self._add(Service(command), self._batches[-1])

    def start_beside(self, command: ServiceCommand) -> Service:
        """Starts a service beside those that were started first. It is not started again until it is kept."""
        service = Service(command, is_kept=False)
        self._add(service, self._batches[0])
        return service

    def keep(self, service: Service, command: ServiceCommand) -> None:
        """Keeps a service that was started beside the others, and starts it by `command` from now on.

        If it has ended meanwhile, it is started again.
        """
        service.command, service.is_kept = command, True
        if service.due == math.inf:
            service.due = None
        self._announce()

    async def wait_ready(self) -> None:
        """Returns when every service that is not optional says SERVING.

        Raises UnavailableError as soon as one dies, DeadlineExceededError when the time is up; both name the service.
        """
        await self.while_alive(self._until_ready())

    def end_start(self) -> None:
        """Ends the start: from here on no fault of an optional service ends the others."""
        self._is_starting = False

    async def watch(self) -> NoReturn:
        """Returns never: raises UnavailableError, with the end of its log, when a service dies for good.

        A service that dies or hangs, and whose command says `restarts`, is started again instead, with all services of
        its `group` if its death breaks them; unless it dies before it was ever ready, or too often. A service that is
        not ready in time hangs; if it was never ready, this raises DeadlineExceededError. An optional service is always
        started again, unless its settings are wrong: then it is left out, or until `end_start` dies for good, too.
        """
        while True:
            changed = self._changed
            for service in self._watched():
                if service.watching.done() and service.due is None:
                    self._take_loss(service)
            for service in self._watched():
                if service.due is not None and service.is_running:
                    await self._end_broken(service)
            now = time.monotonic()
            for service in self._watched():
                if service.due is not None and service.due <= now:
                    self._start_again(service)
            dues = [service.due for service in self._watched() if service.due is not None]
            watching = [service.watching for service in self._watched() if service.due is None]
            async with background(changed.wait()) as (waking,):
                timeout_s = max(0.0, min(dues) - now) if dues and min(dues) < math.inf else None
                await asyncio.wait((waking, *watching), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

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

    async def stop(self) -> None:
        """Stops all services: the last started first, each given time to finish its work.

        Raises, when all are stopped, the first error.
        """
        errors: list[BaseException] = []
        for batch in reversed(self._batches):
            ends = await asyncio.gather(*map(self.retire, tuple(batch)), return_exceptions=True)
            errors += [end for end in ends if end is not None]
        for error in errors[1:]:
            logger.error("while stopping: %r", error)
        if errors:
            raise errors[0]

    async def retire(self, service: Service) -> None:
        """Stops a service, which is given time to finish its work, and forgets it."""
        await service.stop_watching()
        process = service.process
        try:
            if process.fault:
                await self._kill(process)
            elif service.is_running:
                await self._end_running(service)
        finally:
            if process.ended.is_set():
                process.remove_socket()
                for batch in self._batches:
                    batch[:] = [kept for kept in batch if kept is not service]

    def _watched(self) -> list[Service]:
        return [service for service in self.services() if not service.is_leaving]

    def _add(self, service: Service, batch: list[Service]) -> None:
        self._begin(service)
        batch.append(service)
        self._announce()

    def _begin(self, service: Service) -> None:
        def on_ready() -> None:
            service.was_ever_ready, service.num_failed_starts, service.num_hung_starts = True, 0, 0
            self._set(service, ServiceState.READY)

        service.start(
            self._place(service.command),
            ready_timeout_s=self._ready_timeout_s,
            hang_timeout_s=self._settings.hang_timeout_s,
            on_ready=on_ready,
        )
        self._set(service, ServiceState.LOADING)

    def _set(self, service: Service, state: ServiceState) -> None:
        service.state = state
        self._announce()
        self._on_change(service.name, state)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_ready(self) -> None:
        while not all(service.is_ready or service.command.is_optional for service in self.services()):
            await self._changed.wait()

    def _take_loss(self, lost: Service) -> None:
        """Decides when a service is started again that has ended or hangs, and with it others that its end breaks.

        Raises as `watch` does.
        """
        lost.process.fault = self._fault_of(lost)
        if lost.process.fault and not lost.is_ready:
            lost.num_hung_starts += 1
        lost.last_end = lost.process.describe_end()
        self._set(lost, ServiceState.DIED)
        record = self._records[lost.group if lost.ended_at_work else lost.name]
        if lost.is_kept and lost.command.is_optional and lost.has_wrong_settings:
            self._consider_doing_without(lost, record)
        affected = [lost] if lost.is_kept else []
        if lost.ended_at_work:
            affected += [one for one in self._watched() if one is not lost and one.is_kept and one.group == lost.group]
        if not lost.is_kept:
            lost.due = math.inf
        if affected:
            self._schedule(lost, affected, record)

    def _fault_of(self, lost: Service) -> str:
        try:
            return lost.watching.result()
        except TimeoutError:
            late = f"not ready after {self._ready_timeout_s:g} s"
            if lost.command.is_optional or not lost.is_kept or lost.was_ever_ready:
                return f"was {late}"
            names = [one for one in self.services() if not (one.is_ready or one.command.is_optional)]
            logs = "\n".join(one.process.end_of_log() for one in names)
            raise DeadlineExceededError(f"{' and '.join(one.name for one in names)} {late}; {logs}") from None

    def _consider_doing_without(self, lost: Service, record: RestartRecord) -> None:
        """Gives up an optional service that no restart mends. Raises UnavailableError during the start."""
        end, log = _end_of(lost), lost.process.end_of_log()
        if not lost.was_ever_ready and self._is_starting:
            raise UnavailableError(f"{end}; {log}")
        # What could be served before may be in its place again soon, such as the model's directory.
        if not lost.was_ever_ready or record.is_used_up(time.monotonic()):
            lost.is_kept = False
            logger.warning("%s and is not tried again: the others serve without it; %s", end, log)

    def _schedule(self, lost: Service, affected: list[Service], record: RestartRecord) -> None:
        now = time.monotonic()
        end = _end_of(lost)
        optional = [one for one in affected if one.command.is_optional]
        needed = [one for one in affected if not one.command.is_optional]
        is_wrong = lost in needed and not lost.was_ever_ready
        # Starts that hang may take longer than the window.
        hangs_always = lost in needed and lost.num_hung_starts > self._settings.max_restarts
        is_used_up = record.is_used_up(now) or hangs_always
        if is_wrong or not all(one.command.restarts for one in affected) or (is_used_up and not optional):
            before, window_s = len(record.recent(now)), self._settings.restart_window_s
            often = f", the last of {before + 1} ends within {window_s:g} s" if before else ""
            if hangs_always and lost.num_hung_starts > 1:
                often = f", the last of {lost.num_hung_starts} such starts"
            raise UnavailableError(f"{end}{often}; {lost.process.end_of_log()}")
        for service in optional:
            service.due = record.due(now)
        if is_used_up and needed:
            # The optional ones stay away for a while. The others get a record of their own.
            record.times.clear()
        for service in needed:
            service.due = record.due(now)
        record.add(now)
        self._log_restart(lost, end, affected)

    def _log_restart(self, lost: Service, end: str, affected: list[Service]) -> None:
        """Logs the restart; of a service that ends before it is ready again and again, only the first."""
        if not lost.is_ready:
            lost.num_failed_starts += 1
            if lost.num_failed_starts == 1:
                missing = ", and the others serve without it" if lost.command.is_optional else ""
                logger.warning("%s and is tried again%s; %s", end, missing, lost.process.end_of_log())
            return
        others = [one for one in affected if one is not lost]
        together = "".join(f", together with {one.name}" for one in others)
        logger.warning("%s and is started again%s; its log is now %s.1", end, together, lost.process.command.log_path)

    def _start_again(self, service: Service) -> None:
        service.process.remove_socket()
        service.num_restarts += 1
        self._begin(service)

    async def _end_broken(self, service: Service) -> None:
        """Ends a service that hangs, or that a death in its group has broken: it has no work to finish."""
        if service.state is ServiceState.DIED:
            await self._kill(service.process)
            return
        self._set(service, ServiceState.STOPPING)
        service.last_end = "was ended with its group"
        await self._kill(service.process)
        self._set(service, ServiceState.STOPPED)

    async def _end_running(self, service: Service) -> None:
        process = service.process
        try:
            self._set(service, ServiceState.STOPPING)
        finally:
            process.send(signal.SIGTERM)
            if not await _ends_within(process, self._drain_timeout_s, self._hurry):
                process.send(signal.SIGTERM)
                if not await _ends_within(process, self._exit_timeout_s, asyncio.Event()):
                    await self._kill(process)
        self._set(service, ServiceState.STOPPED)

    async def _kill(self, process: ServiceProcess) -> None:
        try:
            if self._before_kill is not None:
                await self._before_kill(process.pid)
        finally:
            process.send(signal.SIGKILL)
            await process.ended.wait()


def _end_of(lost: Service) -> str:
    return f"{lost.name} {lost.last_end}{'' if lost.is_ready else ' before it was ready'}"


async def _ends_within(process: ServiceProcess, timeout_s: float, hurry: asyncio.Event) -> bool:
    """Returns whether the process ends in that time, and before `hurry` is set."""
    async with background(process.ended.wait(), hurry.wait()) as waits:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return process.ended.is_set()
