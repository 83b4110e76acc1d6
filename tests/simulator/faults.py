"""The faults of a schedule: which process dies, stops, or becomes slow, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.simulator.processes import Machine

PROCESSES = ("gateway", "scheduler", "verify", "draft", "draft")
DRAFTS = ("draft", "other-draft", "other-draft", "none")
CLOCK_KINDS = ("step", "boot")
STEPS_S = (-86_400.0, -60.0, 60.0, 21_600.0, 86_400.0)
KINDS = ("kill", "kill", "kill", "stop", "cut", "slow", "hang", "stumble", "stumble")
TYPICAL_EVENTS = 1200
HANG_S = 3.0
"""A grammar worker that hangs is killed then."""
KEEPALIVE_S = 2.0
"""A process that is stopped for longer loses its connections."""


@dataclass(frozen=True)
class Fault:
    """One fault, before the event of a number."""

    event: int
    kind: str
    """kill: SIGKILL. stop: SIGSTOP for `seconds`. cut: the stream between gateway and scheduler breaks.
    slow, hang: the stream of the worker rests for `seconds`, or for ever. stumble: first one, then the other, and
    verify's rests as long, so that a draft that was given up on writes late, and for the last time.
    lie: the grammar worker signals without masks for `seconds`.
    full: the disk of the gateway's journal is full for `seconds`.
    swap: the scheduler is asked to put this draft in the place of the one that drafts; "none" takes it away.
    step: the wall clock is set forward by `seconds`, or back. boot: all processes end, and the host starts anew."""
    process: str
    seconds: float


@dataclass
class Faults:
    """All faults of a schedule."""

    faults: list[Fault]
    num_done: int = 0
    done: set[str] = field(default_factory=set)
    """The processes that something was done to."""

    @classmethod
    def draw(cls, random: Random, count: int, *, num_swaps: int) -> Faults:
        """Draws them; some follow closely on the one before, some come at the same time."""
        faults: list[Fault] = []
        for _ in range(count):
            event = int(random.random() ** 1.5 * TYPICAL_EVENTS)
            if faults and random.random() < 0.5:
                event = faults[-1].event + random.choice((0, 1, 10, 100, 300))
            kind, process = random.choice(KINDS), random.choice(PROCESSES)
            if kind in ("slow", "hang", "stumble") and process not in ("verify", "draft"):
                kind = "kill"
            seconds = random.choice((0.001, 0.02, 0.3, 3.0))
            if kind == "stumble":
                # About as long as a step waits for a draft.
                seconds = random.choice((0.05, 0.25)) * (1 + random.random() / 2)
            faults.append(Fault(event, kind, process, seconds))
        faults += [
            Fault(random.randrange(TYPICAL_EVENTS), "swap", random.choice(DRAFTS), 0.0) for _ in range(num_swaps)
        ]
        return cls(faults)

    def lose_grammars(self, random: Random) -> None:
        """Has a grammar worker die, stop, be slow, hang or lie."""
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            kind, seconds = (
                random.choice(("kill", "stop", "slow", "hang", "lie")),
                random.choice((0.001, 0.02, 0.3, 3.0)),
            )
            self.faults.append(Fault(random.randrange(TYPICAL_EVENTS), kind, "grammar", seconds))

    def set_clocks(self, random: Random) -> None:
        """Adds boots and steps of the clock to half of the schedules, beside what else goes wrong."""
        for _ in range(random.choice((0, 0, 1, 3))):
            event = random.randrange(TYPICAL_EVENTS)
            is_boot = random.random() < 0.3
            self.faults.append(
                Fault(event, "boot", "all", 0.0) if is_boot else Fault(event, "step", "none", random.choice(STEPS_S))
            )

    @property
    def may_end_an_epoch(self) -> bool:
        """True once something happened to a process whose loss ends an epoch."""
        return bool(self.done & {"verify", "scheduler"})

    def plant(self, machine: Machine) -> None:
        """Lets them happen when it is time."""
        for fault in self.faults:
            machine.world.at_event(fault.event, lambda fault=fault: self._happen(machine, fault))

    def _happen(self, machine: Machine, fault: Fault) -> None:
        world = machine.world
        process = machine.find("scheduler" if fault.kind == "swap" else fault.process)
        if process is None and fault.kind not in CLOCK_KINDS:
            return
        self.num_done += 1
        if fault.kind != "swap":
            self.done.add("scheduler" if fault.kind == "boot" else fault.process)
        world.note(f"event {world.num_events}:", fault.kind, fault.process, fault.seconds)
        match fault.kind:
            case "kill":
                process.kill()
            case "stop":
                process.stop()
                world.at(fault.seconds, process.go_on)
                if fault.seconds > KEEPALIVE_S:
                    world.at(KEEPALIVE_S, process.lose_connections)
            case "cut":
                gateway = machine.find("gateway")
                if gateway is not None and gateway.connection.stream is not None:
                    gateway.connection.stream.break_off()
            case "full":
                process.is_full_until = world.now + fault.seconds
            case "swap":
                process.soon(process.begin_swap, fault.process)
            case "step":
                world.step_clock(fault.seconds)
            case "boot":
                world.boot()
            case "slow":
                process.stream.paused_until = world.now + fault.seconds
            case "lie":
                process.lies_until = world.now + fault.seconds
            case "stumble":
                process.stream.paused_until = world.now + fault.seconds
                process.stream.items_left = world.random.randrange(8)
                verify = machine.find("verify")
                if fault.process == "draft" and verify is not None:
                    # So that verify comes to its waits when the late writer is through.
                    verify.stream.paused_until = world.now + fault.seconds + 0.02 * world.random.random()
            case "hang":
                process.stream.is_stuck = True
                if fault.process == "grammar":
                    # As a supervisor does: nothing goes on without it.
                    world.at(HANG_S, process.kill)
