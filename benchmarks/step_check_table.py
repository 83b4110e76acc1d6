"""What marks of steps come to: metrics against the host's clock, and where a delay shows.

Pure arithmetic over marks. A block of steps counts if all of them were decode steps of all clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from slipstream.benchmarks.delayed_plan import HOLD_S, Late
from slipstream.benchmarks.step_check_marks import SERVICES
from slipstream.scheduler.telemetry.timings import DRAFT_TO_VERIFY, EDGES, VERIFY_TO_DRAFT, VERIFY_TO_VERIFY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.benchmarks.delayed_plan import DelayPlan
    from slipstream.benchmarks.step_check_marks import Mark

MOST_OFF = 0.01
"""Of the metrics' sum against the host's clock."""
LEAST_STEPS = 1000
"""Of a stretch that is compared with the host's clock."""
ROUNDING = 1e-6
"""Of busy and bubbles against steps: sums of nanoseconds in 64-bit floats."""
MOST_STRAY = 0.1
"""Of the delay: what its edge's bubble may miss of it, and what another's may grow by."""


@dataclass(frozen=True, slots=True)
class Block:
    """Steps between two marks."""

    late: Late
    first: Mark
    last: Mark

    @classmethod
    def between(cls, first: Mark, last: Mark, plan: DelayPlan) -> Block:
        """What a plan has there."""
        return cls(plan.at(last.step).in_step(is_plain=last.num_plain > first.num_plain), first, last)

    @property
    def num_steps(self) -> int:
        """Of them."""
        return self.last.step - self.first.step

    @property
    def is_plain(self) -> bool:
        """Whether they had no draft."""
        return self.last.num_plain > self.first.num_plain

    def us(self, seconds: Callable[[Mark], float]) -> float:
        """What a metric gained, in microseconds per step."""
        return 1e6 * (seconds(self.last) - seconds(self.first)) / self.num_steps

    def counts(self, num_clients: int) -> bool:
        """Whether they are of one kind, with all clients in each, and all of them timed."""
        num_plain = self.last.num_plain - self.first.num_plain
        return (
            self.last.num_prefills == self.first.num_prefills
            and self.last.num_rows - self.first.num_rows == self.num_steps * num_clients
            and self.last.num_timed - self.first.num_timed == self.num_steps
            and num_plain in (0, self.num_steps)
        )


def blocks_of(marks: Sequence[Mark], plan: DelayPlan, num_clients: int) -> list[Block]:
    """Those that count, in order."""
    blocks = [Block.between(first, last, plan) for first, last in pairwise(marks)]
    return [block for block in blocks if block.counts(num_clients)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    """Consecutive steps by the metrics, and by the host's clock; no request came or went between."""

    run_ahead: int
    is_plain: bool
    has_delays: bool
    """Whether some of the steps were delayed."""
    num_steps: int
    step_s: float
    """Sum of `slipstream_step_seconds`."""
    clock_s: float
    """Between the results of the step before the first and of the last, as the host took them in."""
    busy_and_bubbles_s: float
    """Sum of the other two metrics over the same steps."""

    @property
    def ratio(self) -> float:
        """1 where they agree."""
        return self.step_s / self.clock_s

    @property
    def passes(self) -> bool:
        """Whether both sums agree with the steps', over enough of them."""
        is_complete = abs(self.busy_and_bubbles_s / self.step_s - 1) <= ROUNDING
        return self.num_steps >= LEAST_STEPS and abs(self.ratio - 1) <= MOST_OFF and is_complete


def clock_check(blocks: Sequence[Block], run_ahead: int, *, is_plain: bool, with_delays: bool) -> ClockCheck | None:
    """Over the longest stretch of such blocks without a gap; None if there is none."""
    wanted = [block for block in blocks if block.is_plain == is_plain and (with_delays or block.late is Late.NOTHING)]
    if not wanted:
        return None
    stretch = max(_stretches(wanted), key=lambda found: found[-1].last.step - found[0].first.step)
    first, last = stretch[0].first, stretch[-1].last
    parts = [sum(mark.busy_s.values()) + sum(mark.bubble_s.values()) for mark in (first, last)]
    return ClockCheck(
        run_ahead=run_ahead,
        is_plain=is_plain,
        has_delays=any(block.late is not Late.NOTHING for block in stretch),
        num_steps=last.step - first.step,
        step_s=last.step_s - first.step_s,
        clock_s=1e-9 * (last.taken_in_ns - first.taken_in_ns),
        busy_and_bubbles_s=parts[1] - parts[0],
    )


def _stretches(blocks: Sequence[Block]) -> list[list[Block]]:
    """Of at least one, each beginning where the one before ends."""
    stretches = [[blocks[0]]]
    for before, block in pairwise(blocks):
        if block.first == before.last:
            stretches[-1].append(block)
        else:
            stretches.append([block])
    return stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Where a delay is put, and at which edge it must show."""

    late: Late
    is_plain: bool
    """In steps without a draft."""
    run_ahead: int
    edge: str
    where: str
    """For people."""

    @property
    def base(self) -> Late:
        """What blocks are like that it is compared with."""
        return _BASES.get(self.late, Late.NOTHING)


_BASES = {Late.FIRST_LATER: Late.FIRST_HELD, Late.VERIFY_LATER: Late.VERIFY_HELD}
_STASH = "verify's stream, behind the end stamp and before the signal of the stash"
_HELD = f"in both kinds of blocks behind a hold of {1000 * HOLD_S:g} ms"
DELAYS = (
    Delay(late=Late.STASH, is_plain=False, run_ahead=1, edge=VERIFY_TO_DRAFT, where=_STASH),
    Delay(
        late=Late.DONE,
        is_plain=False,
        run_ahead=1,
        edge=DRAFT_TO_VERIFY,
        where="draft's stream, behind the end stamp and before the signal of draft.done",
    ),
    Delay(late=Late.STASH, is_plain=True, run_ahead=1, edge=VERIFY_TO_VERIFY, where=_STASH),
    Delay(
        late=Late.FIRST_LATER,
        is_plain=False,
        run_ahead=0,
        edge=VERIFY_TO_DRAFT,
        where=f"the scheduler, before it sends draft's command; {_HELD}",
    ),
    Delay(
        late=Late.VERIFY_LATER,
        is_plain=False,
        run_ahead=0,
        edge=DRAFT_TO_VERIFY,
        where=f"the scheduler, behind draft.done and before it sends verify's command; {_HELD}",
    ),
    Delay(
        late=Late.FIRST_LATER,
        is_plain=True,
        run_ahead=0,
        edge=VERIFY_TO_VERIFY,
        where=f"the scheduler, before it sends verify's command; {_HELD}",
    ),
)
CYCLES = {
    1: (Late.NOTHING, Late.STASH, Late.NOTHING, Late.DONE),
    0: (Late.FIRST_HELD, Late.FIRST_LATER, Late.FIRST_HELD, Late.VERIFY_HELD, Late.VERIFY_LATER, Late.VERIFY_HELD),
}
"""By run-ahead. With a step ahead a late command is hidden; with none, commands come too late for a late fence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a delayed block takes more than the blocks before and behind it, in microseconds per step."""

    bubble_us: dict[str, float]
    """By edge."""
    busy_us: dict[str, float]
    """By service."""
    step_us: float

    @classmethod
    def between(cls, before: Block, block: Block, after: Block) -> Growth:
        """The mean of both neighbours is the base: what grows steadily, such as the context, cancels."""

        def growth(seconds: Callable[[Mark], float]) -> float:
            return block.us(seconds) - (before.us(seconds) + after.us(seconds)) / 2

        def by(name: str, key: str) -> float:
            return growth(lambda mark: float(getattr(mark, name)[key]))

        return cls(
            bubble_us={edge: by("bubble_s", edge) for edge in EDGES},
            busy_us={service: by("busy_s", service) for service in SERVICES},
            step_us=growth(lambda mark: mark.step_s),
        )

    @classmethod
    def median(cls, growths: Sequence[Growth]) -> Growth:
        """Of each number by itself."""
        return cls(
            bubble_us={edge: median(growth.bubble_us[edge] for growth in growths) for edge in EDGES},
            busy_us={name: median(growth.busy_us[name] for growth in growths) for name in SERVICES},
            step_us=median(growth.step_us for growth in growths),
        )


def growths(blocks: Sequence[Block], delay: Delay) -> list[Growth]:
    """One for each block with this delay that has a neighbour without it on both sides."""
    found = []
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        is_whole = before.last == block.first and block.last == after.first
        kinds = (before.late, block.late, after.late) == (delay.base, delay.late, delay.base)
        if is_whole and kinds and all(each.is_plain == delay.is_plain for each in (before, block, after)):
            found.append(Growth.between(before, block, after))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCheck:
    """Where a delay showed."""

    delay: Delay
    delay_us: float
    block_steps: int
    median: Growth
    all: tuple[Growth, ...]

    @property
    def passes(self) -> bool:
        """Whether its edge's bubble grew by it, and no other's."""
        most = MOST_STRAY * self.delay_us
        wanted = {edge: self.delay_us if edge == self.delay.edge else 0.0 for edge in EDGES}
        return all(abs(self.median.bubble_us[edge] - wanted[edge]) <= most for edge in EDGES)


def delay_check(blocks: Sequence[Block], delay: Delay, plan: DelayPlan) -> DelayCheck | None:
    """None if no block of it counts."""
    found = growths(blocks, delay)
    if not found:
        return None
    return DelayCheck(
        delay=delay,
        delay_us=plan.delay_us,
        block_steps=plan.block_steps,
        median=Growth.median(found),
        all=tuple(found),
    )


def clock_line(check: ClockCheck) -> str:
    """For people."""
    kind = "plain" if check.is_plain else "drafted"
    delays = "some delayed" if check.has_delays else "none delayed"
    return (
        f"run-ahead {check.run_ahead}, {check.num_steps} {kind} steps, {delays}: metrics {check.step_s:.6f} s, clock "
        f"{check.clock_s:.6f} s, ratio {check.ratio:.6f}; busy and bubbles {check.busy_and_bubbles_s:.6f} s"
        f"{'' if check.passes else '  MISSED'}"
    )


def delay_lines(checks: Sequence[DelayCheck]) -> list[str]:
    """A table: what grew, in microseconds per step."""
    head = ("edge", "delay at", *EDGES, "draft busy", "verify busy", "step")
    rows: list[tuple[str, ...]] = [head]
    for check in checks:
        grown = check.median
        times = (*grown.bubble_us.values(), *grown.busy_us.values(), grown.step_us)
        where = f"{check.delay.late}, run-ahead {check.delay.run_ahead}"
        rows.append((check.delay.edge, where, *(f"{time:+.1f}" for time in times)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [
        lines[0],
        *(line + ("" if check.passes else "  MISSED") for line, check in zip(lines[1:], checks, strict=True)),
    ]
