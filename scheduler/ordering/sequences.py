"""Every valid sequence of steps over a few slots, and every place in it where the scheduler may consume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from slipstream.common.buffers import last_consumed
from slipstream.common.step import StepKind
from slipstream.scheduler.ordering.plan import OrderedStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.scheduler.ordering.model import Model


@dataclass(frozen=True, slots=True)
class Move:
    """A step without its number, and the slots that are ready to decode after it.

    Chunks of a prompt can be given to any slot at any time: they go on with the request that is there,
    or the slot has a new owner. A request that leaves takes part in no further step, which any subset
    of the ready slots includes.
    """

    kind: StepKind
    rows: int
    ready: int

    def as_step(self, step: int) -> OrderedStep:
        """The move as the step of this number."""
        return OrderedStep(step, self.kind, self.rows)


@cache
def moves(num_slots: int, ready: int, *, has_draft: bool) -> tuple[Move, ...]:
    """Every valid next step when the slots of the mask `ready` have had their last chunk."""
    ready_subsets = [rows for rows in range(1 << num_slots) if rows & ~ready == 0]
    found = [Move(StepKind.PLAIN, rows, ready) for rows in ready_subsets]
    if has_draft:
        found.extend(Move(StepKind.DECODE, rows, ready) for rows in ready_subsets if rows)
    # For each slot: no chunk, a chunk in the middle of a prompt, or the last chunk of one.
    for chunks in product((None, False, True), repeat=num_slots):
        if any(is_last is not None for is_last in chunks):
            started = sum(1 << slot for slot, is_last in enumerate(chunks) if is_last is not None)
            ended = sum(1 << slot for slot, is_last in enumerate(chunks) if is_last)
            found.append(Move(StepKind.PREFILL, ended, ready & ~started | ended))
    return tuple(dict.fromkeys(found))


def num_consumable(step: int, consumed: int, run_ahead: int) -> range:
    """How many steps the scheduler may consume before it sends `step`: as few as it must, up to all."""
    return range(max(0, last_consumed(step, run_ahead) - consumed), step - consumed)


@dataclass(frozen=True, slots=True)
class Visit:
    """A model in which the last step of a sequence is about to be sent."""

    before: Model
    move: Move
    after: Model
    is_end: bool


def walk(model: Model, depth: int, *, num_slots: int, ready: int = 0) -> Iterator[Visit]:
    """Visits every beginning of every valid sequence of `depth` steps; shared beginnings once."""
    step = model.state.step + 1
    fewest, *more = num_consumable(step, model.state.consumed, model.state.run_ahead)
    before = model.copy()
    for _ in range(fewest):
        before.consume()
    for has_consumed_more in (False, *(True for _ in more)):
        if has_consumed_more:
            before = before.copy()
            before.consume()
        for move in moves(num_slots, ready, has_draft=model.state.draft.is_present):
            after = before.copy()
            after.send(move.as_step(step))
            yield Visit(before, move, after, depth == 1)
            if depth > 1:
                yield from walk(after, depth - 1, num_slots=num_slots, ready=move.ready)
