"""The event loop of a simulated process: asyncio's order of callbacks, on the world's clock."""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulator.world import Process

_MOST_GHOST_CALLS = 10_000


class SimulatedLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as gateway and scheduler use.

    Callbacks run in the order in which they were given, a few of them in an event of the world: other processes run,
    and faults happen, between any two callbacks. Work for an executor is an event of its own.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._is_scheduled = False
        self._tasks: list[asyncio.Task[Any]] = []
        process.unwind.append(self._unwind)

    def run_call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Calls something as this loop's callback, now."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            return call(*arguments)
        finally:
            events._set_running_loop(before)

    def time(self) -> float:
        return self._world.monotonic()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self._process.is_alive

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self._world.monotonic() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._process.at(max(0.0, when - self._world.monotonic()), self._due, handle)
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        self._process.soon(self._work, future, func, args)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.is_alive:
            error = context.get("exception")
            self._world.fail(f"the event loop of {self._process.name}: {context['message']}: {error!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _make_ready(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._process.soon(self._turn)

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._make_ready(handle)

    def _work(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_set_exception, future, error)
        else:
            self.call_soon(_set_result, future, result)

    def _turn(self) -> None:
        self._is_scheduled = False
        count = len(self._ready)
        if count > 1 and self._world.chance(0.3):
            count = self._world.random.randrange(1, count)
        events._set_running_loop(self)
        try:
            for _ in range(count):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)
        if self._ready and not self._is_scheduled:
            self._is_scheduled = True
            self._process.soon(self._turn)

    def _unwind(self) -> None:
        """Ends all tasks of a process that was killed; what they still do reaches nobody."""
        events._set_running_loop(self)
        try:
            for _ in range(_MOST_GHOST_CALLS):
                if not self._ready:
                    if not self._tasks:
                        break
                    for task in tuple(self._tasks):
                        task.cancel()
                    if not self._ready:
                        break
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
