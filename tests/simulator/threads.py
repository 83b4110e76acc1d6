"""Threads that take turns, and what they wait for: stand-ins for those of `threading`, on greenlets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, greenlet

from tests.simulator.world import Process, World


class SimulatedThread:
    """Stands in for `threading.Thread`; belongs to the process that starts it."""

    def __init__(
        self,
        world: World,
        target: Callable[..., None],
        name: str = "",
        daemon: bool = False,
        args: tuple[Any, ...] = (),
    ) -> None:
        self._world = world
        self.name = name
        self._target = target
        self._args = args
        self.is_over = False
        self.process = _process_of(world)
        self._greenlet = greenlet(self._run, parent=world.hub)
        self._joining: list[SimulatedThread] = []

    def start(self) -> None:
        """See `threading.Thread.start`."""
        self.process.threads.append(self)
        self.process.soon(self.resume)

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread.join`."""
        while not self.is_over:
            assert self._world.thread is not None, "an event loop does not join a thread"
            self._joining.append(self._world.thread)
            self._world.switch_out()

    def is_alive(self) -> bool:
        """See `threading.Thread.is_alive`."""
        return not self.is_over

    def resume(self) -> None:
        """Gives it the turn until it waits again. Called by an event."""
        if not self.is_over:
            self._world.thread = self
            try:
                self._greenlet.switch()
            finally:
                self._world.thread = None

    def kill(self) -> None:
        """Unwinds it."""
        self._world.thread = self
        try:
            while not self._greenlet.dead:
                self._greenlet.throw(GreenletExit)
        finally:
            self._world.thread = None
            self.is_over = True

    def _run(self) -> None:
        try:
            self._target(*self._args)
        except GreenletExit:
            pass
        except Exception as error:
            if self.process.is_alive:
                self._world.fail(f"thread {self.name} of {self.process.name} raised {error!r}")
        self.is_over = True
        for thread in self._joining:
            thread.process.soon(thread.resume)


class SimulatedCondition:
    """Stands in for `threading.Condition`. Nothing interrupts its holder, because only one thread runs.

    A waiter goes on when it is notified or its time is over, as with the real one, and not when what it waits for comes
    true. If that is true when the time is over, the notification was forgotten: the run fails.
    """

    def __init__(self, world: World, lock: object = None) -> None:
        self._world = world
        self._waiters: list[_Waiter] = []
        self._holder: object = None
        self._depth = 0

    def __enter__(self) -> bool:
        holder = self._world.thread or self._world
        process = self._world.process if self._world.thread is None else self._world.thread.process
        is_alive = process is None or process.is_alive
        if self._depth and self._holder is not holder and is_alive:
            self._world.fail("a lock is taken whose holder has given its turn away")
        self._holder = holder
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def acquire(self, *_: object) -> bool:
        """See `threading.Condition.acquire`."""
        return True

    def release(self) -> None:
        """See `threading.Condition.release`."""

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition.wait`."""
        waiter = _Waiter(self._world)
        self._waiters.append(waiter)
        depth, self._depth = self._depth, 0
        try:
            return waiter.wait(timeout)
        finally:
            self._depth, self._holder = depth, self._world.thread or self._world
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """See `threading.Condition.wait_for`."""
        # A loop around a wait that is over at once must not keep the turn.
        depth, self._depth = self._depth, 0
        self._world.may_be_interrupted()
        self._depth, self._holder = depth, self._world.thread or self._world
        until = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                return result
            is_signalled = self.wait(left)
            # A process that was stopped meanwhile wakes up late.
            is_late = until is not None and self._world.now > until + 0.001
            if not is_signalled and not is_late and self._was_true(predicate):
                self._world.fail(f"a wait of {self._world.thread and self._world.thread.name} ended without a signal")
        return result

    def _was_true(self, predicate: Callable[[], Any]) -> bool:
        """True if it was a while before the time was over: some come true with the time itself."""
        now, self._world.now = self._world.now, self._world.now - 0.02
        try:
            return bool(predicate())
        finally:
            self._world.now = now

    def notify(self, n: int = 1) -> None:
        """See `threading.Condition.notify`."""
        for waiter in self._waiters[:n]:
            self._waiters.remove(waiter)
            waiter.wake()

    def notify_all(self) -> None:
        """See `threading.Condition.notify_all`."""
        self.notify(len(self._waiters))


class SimulatedEvent:
    """Stands in for `threading.Event`."""

    def __init__(self, world: World) -> None:
        self._changed = SimulatedCondition(world)
        self._is_set = False

    def is_set(self) -> bool:
        """See `threading.Event.is_set`."""
        return self._is_set

    def set(self) -> None:
        """See `threading.Event.set`."""
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        """See `threading.Event.clear`."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event.wait`."""
        return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class SimulatedFuture:
    """Stands in for `concurrent.futures.Future`."""

    def __init__(self, world: World) -> None:
        self._changed = SimulatedCondition(world)
        self._outcome: tuple[Any, BaseException | None] | None = None

    def set_result(self, result: Any) -> None:
        """See `Future.set_result`."""
        self._outcome = result, None
        self._changed.notify_all()

    def set_exception(self, error: BaseException) -> None:
        """See `Future.set_exception`."""
        self._outcome = None, error
        self._changed.notify_all()

    def result(self) -> Any:
        """See `Future.result`."""
        self._changed.wait_for(lambda: self._outcome is not None)
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return result


class _Waiter:
    """One wait of the thread that runs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread = world.thread
        self._is_woken = False
        self._is_over = False

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until `wake`; False if the time is over first."""
        if self._thread is not None and timeout_s is not None:
            self._thread.process.at(timeout_s, self._time_is_over)
        self._world.switch_out()
        return self._is_woken

    def wake(self) -> None:
        """Lets the thread go on, soon."""
        if not self._is_woken and not self._is_over and self._thread is not None:
            self._is_woken = True
            self._thread.process.soon(self._thread.resume)

    def _time_is_over(self) -> None:
        if not self._is_woken and not self._is_over and self._thread is not None:
            self._is_over = True
            self._thread.resume()


class Signal:
    """What threads of one process wait for that another one brings about: a word of memory, an answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiters: list[_Waiter] = []
        self.watchers: list[Callable[[], None]] = []
        """Called once at the next change."""

    def changed(self) -> None:
        """Wakes all."""
        waiters, self._waiters = self._waiters, []
        watchers, self.watchers = self.watchers, []
        for waiter in waiters:
            waiter.wake()
        for watcher in watchers:
            watcher()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Blocks the thread until it is so; False after `timeout_s`."""
        until = None if timeout_s is None else self._world.now + timeout_s
        while not predicate():
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                return False
            waiter = _Waiter(self._world)
            self._waiters.append(waiter)
            waiter.wait(left)
        return True


def _process_of(world: World) -> Process:
    process = world.process if world.thread is None else world.thread.process
    assert process is not None, "a thread belongs to the process that starts it"
    return process
