"""One thread of control: a clock, a queue of events, processes that live and die, threads that take turns.

Everything that happens is an event at a time of the world's own clock. The world takes the earliest event and runs it
to its end; delays are drawn from the seed, so that the seed alone decides every order. Code that blocks runs on a
`SimulatedThread`, a greenlet: it gives its turn back where it waits, and goes on when it is notified or its time is
over.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.threads import SimulatedThread

START_S = 1000.0
UNIX_S = 1.8e9
UPTIME_S = 0.05
"""Of the host when its first process starts after a boot."""
MOST_NOTES = 100
MOST_EVENTS = 100_000
"""Of a schedule: a hundred times as many as one needs."""


class SimulationError(AssertionError):
    """The oracle's verdict: something that must not be happened."""


class Process:
    """A process that can be killed, and stopped for a while. What belongs to it does not run meanwhile."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        world.processes.append(self)
        self.pid = len(world.processes)
        self.is_alive = True
        self.is_stopped = False
        self.threads: list[SimulatedThread] = []
        self.on_lost: list[Callable[[], None]] = []
        """Called once, when its connections break: it was killed, or has been stopped for too long."""
        self.unwind: list[Callable[[], None]] = []
        """Called after that. What it still does has no effect outside: `is_alive` is False."""
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_on_its_way_out(self) -> bool:
        """True if what it does to shared memory is of no interest any more."""
        return False

    def at(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Has `call` called in this process after `delay_s`, if it lives then; later if it is stopped then."""
        self.world.schedule(delay_s, self, call, arguments)

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """As `at`, after the time that a process may take until it runs."""
        self.at(self.world.latency(), call, *arguments)

    def defer(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Keeps a call for the time when the process goes on."""
        self._deferred.append((call, arguments))

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.is_stopped = False
        deferred, self._deferred = self._deferred, []
        for call, arguments in deferred:
            self.at(0.0, call, *arguments)

    def lose_connections(self) -> None:
        """What was connected to it learns that it is gone."""
        lost, self.on_lost = self.on_lost, []
        for call in lost:
            call()

    def kill(self) -> None:
        """SIGKILL. Called by an event of the world, not from within the process."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.world.note("killed", self.name)
        self.lose_connections()
        before, self.world.process = self.world.process, self
        try:
            for thread in self.threads:
                thread.kill()
            for call in self.unwind:
                call()
        finally:
            self.world.process = before


class World:
    """The clock and the events."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = START_S
        self.has_grammars = False
        """True if some sequences have a grammar; see `is_constrained`."""
        self.keeps_clocks = False
        """True if the processes' clocks go on evenly, whatever sets them."""
        self._booted_at = 0.0
        self._stepped_s = 0.0
        self.num_events = 0
        self.digest = 0
        """Of everything that happened until now: two runs of a seed have the same."""
        self.process: Process | None = None
        """The one whose code runs."""
        self.thread: SimulatedThread | None = None
        """The one that runs; None in an event that must not block."""
        self.processes: list[Process] = []
        """All that ever were, by their ids, which begin at 1."""
        self.notes: list[str] = []
        """What happened, in words."""
        self.failures: list[str] = []
        """What the oracle found so far."""
        self.num_generated: dict[tuple[str, int], int] = {}
        """Output tokens that a scheduler has sent to a gateway, by the job's id and the sample's seed."""
        self._events: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self._faults: list[tuple[int, Callable[[], None]]] = []
        self.hub = getcurrent()
        """Runs the events."""

    def monotonic(self) -> float:
        """The processes' CLOCK_MONOTONIC, in seconds."""
        return self.now - self._booted_at

    def unix(self) -> float:
        """The processes' CLOCK_REALTIME, in seconds."""
        return UNIX_S + self.now + self._stepped_s

    def step_clock(self, seconds: float) -> None:
        """Sets CLOCK_REALTIME forward, or back."""
        self._stepped_s += 0.0 if self.keeps_clocks else seconds

    def boot(self) -> None:
        """Ends all processes; CLOCK_MONOTONIC begins anew."""
        for process in tuple(self.processes):
            process.kill()
        if not self.keeps_clocks:
            self._booted_at = self.now - UPTIME_S

    def latency(self) -> float:
        """A delay: mostly some microseconds, seldom a few milliseconds."""
        drawn = self.random.random()
        return drawn * 2e-4 if drawn < 0.95 else drawn * 5e-3

    def chance(self, probability: float) -> bool:
        """Draws yes or no."""
        return self.random.random() < probability

    def schedule(
        self, delay_s: float, process: Process | None, call: Callable[..., None], arguments: tuple[Any, ...] = ()
    ) -> None:
        """Has `call` called after `delay_s`, in the process."""
        self._num_scheduled += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_scheduled, process, call, arguments))

    def at(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Has `call` called after `delay_s`, outside of all processes."""
        self.schedule(delay_s, None, call, arguments)

    def at_event(self, number: int, call: Callable[[], None]) -> None:
        """Has `call` called before the event of this number, between two others."""
        heapq.heappush(self._faults, (number, self._num_scheduled, call))  # type: ignore[misc]
        self._num_scheduled += 1

    def note(self, *words: object) -> None:
        """Adds to the story that is printed when the oracle is not content."""
        if len(self.notes) < MOST_NOTES:
            self.notes.append(f"{self.now - START_S:10.6f} {' '.join(map(str, words))}")

    def fail(self, text: str) -> None:
        """The oracle's finding; the run ends after this event."""
        self.note("FAILED:", text)
        self.failures.append(text)

    def run(self, is_done: Callable[[], bool], *, until: float) -> None:
        """Runs events until it is done. Raises SimulationError for a finding, and if it is not done by `until`."""
        while not is_done():
            if not self._events:
                self.fail("deadlock: work remains and nothing will ever happen again")
            elif self._events[0][0] > until:
                self.fail(f"no end: work remains after {until - START_S:.0f} s")
            elif self.num_events > MOST_EVENTS:
                self.fail(f"no end: work remains after {MOST_EVENTS} events")
            if self.failures:
                raise SimulationError(self.failures[0])
            while self._faults and self._faults[0][0] <= self.num_events:
                self._call(None, heapq.heappop(self._faults)[-1], ())
            when, number, process, call, arguments = heapq.heappop(self._events)
            self.now = max(self.now, when)
            if process is not None and not process.is_alive:
                continue
            if process is not None and process.is_stopped:
                process.defer(call, arguments)
                continue
            self.num_events += 1
            self.digest = hash((self.digest, number, round(self.now * 1e6)))
            self._call(process, call, arguments)
        if self.failures:
            raise SimulationError(self.failures[0])

    def _call(self, process: Process | None, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.process = process
        try:
            call(*arguments)
        finally:
            self.process = None

    # What threads do.

    def switch_out(self) -> None:
        """Gives the turn back until the thread is resumed. Raises GreenletExit in a process that was killed."""
        thread = self.thread
        if thread is None:
            raise SimulationError(f"{self.process and self.process.name}: code that must not block waits")
        if not thread.process.is_alive:
            raise GreenletExit
        self.hub.switch()

    def sleep(self, delay_s: float) -> None:
        """Blocks the thread."""
        if self.thread is not None and self.thread.process.is_alive:
            self.thread.process.at(delay_s, self.thread.resume)
        self.switch_out()

    def may_be_interrupted(self) -> None:
        """Called by simulated surroundings where a thread may lose the processor: others may run, or it may die."""
        if self.thread is not None and (not self.thread.process.is_alive or self.chance(0.25)):
            self.sleep(self.latency())
