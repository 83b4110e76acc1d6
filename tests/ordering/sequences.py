"""Every valid sequence of steps over a few slots, and every place in it where the scheduler may consume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

from slipstream.scheduler.plan import last_consumed
from slipstream.scheduler.records import DraftTraits
from tests.ordering.accesses import Command
from tests.ordering.model import Model


@dataclass(frozen=True, slots=True)
class Move:
    """A step without its number, and the slots that are ready to decode after it.

    Chunks of a prompt can be given to any slot at any time: they go on with the request that is there,
    or the slot has a new owner, which is the same to the order. A request that leaves takes part in no
    further step, which any subset of the ready slots includes.
    """

    rows: int
    ready: int
    prompts: int = 0
    kept: int = 0
    is_drafted: bool = False
    masked: int = 0

    def as_step(self, last: int) -> Command:
        """The move as the step after `last`."""
        return Command(last + 1, self.rows, self.prompts, self.kept, self.is_drafted, self.masked)


@dataclass(frozen=True, slots=True)
class Send:
    """One element of a sequence."""

    move: Move
    consumed: int
    """The last step that the scheduler had consumed when it sent this one."""
    draft: DraftTraits


@dataclass(frozen=True, slots=True)
class Visit:
    """A sequence up to one more step."""

    sends: tuple[Send, ...]
    before: Model
    """About to send the step."""
    after: Model
    """The step is sent and carried out."""
    is_end: bool
    """True if the sequence has its full length."""
    is_new: bool
    """False if the visit before went through the same commands: only which chunks are the last ones differs."""


@cache
def moves(num_slots: int, ready: int, *, stashed: int, masks: bool = False) -> tuple[Move, ...]:
    """Every valid next step when the slots of the mask `ready` have had their last chunk.

    `stashed`: mask of the slots that verify has stashed for since the present draft is there. `masks`: any of the slots
    that yield have a constraint.
    """
    found = []
    for prompts in range(1 << num_slots):
        beside = [rows for rows in range(1 << num_slots) if rows & (~ready | prompts) == 0]
        # Any of the chunks may be the last one of its prompt.
        for ends in [ends for ends in range(1 << num_slots) if ends & ~prompts == 0]:
            after = ready & ~prompts | ends
            for rows in beside:
                found.append(Move(rows, after, prompts))
                for kept in range(1, 1 << num_slots):
                    if kept & ~(rows & stashed) == 0:
                        found += [Move(rows, after, prompts, kept, is_drafted) for is_drafted in (False, True)]
    if masks:
        found += [
            replace(move, masked=masked)
            for move in found
            for masked in range(1, 1 << num_slots)
            if masked & ~(move.rows | move.prompts & move.ready) == 0
        ]
    return tuple(found)


def num_consumable(step: int, consumed: int, unconsumed: list[int], run_ahead: int) -> range:
    """Numbers of steps that the scheduler may consume before it sends `step`: from as few as it must to all."""
    before = last_consumed(step, run_ahead)
    fewest = next((number for number, last in enumerate((consumed, *unconsumed)) if last >= before), 0)
    return range(fewest, len(unconsumed) + 1)


@dataclass(frozen=True, slots=True)
class Walk:
    """Visits every beginning of every valid sequence; a beginning that sequences share is visited once.

    Of sequences that differ by a renaming of the slots one is visited.
    """

    num_slots: int
    drafts: tuple[DraftTraits, ...] = ()
    """Drafts that may take the place of the present one before any step; the same one for a restart."""
    share: float = 1.0
    """The share of the sequences to visit: drawn for each beginning that lacks the last two steps."""
    randomness: random.Random = field(default_factory=random.Random)
    masks: bool = False
    """Any slot may have a constraint, and the grammar worker may change before any step."""

    def visits(self, model: Model, num_steps: int) -> Iterator[Visit]:
        """All sequences of `num_steps` steps that begin with `model`, where no slot is taken yet."""
        return self._visits(model, num_steps, sends=(), pasts=(0,) * self.num_slots)

    def _visits(
        self, model: Model, num_steps: int, *, sends: tuple[Send, ...], pasts: tuple[int, ...]
    ) -> Iterator[Visit]:
        if num_steps == 2 and sends and self.randomness.random() >= self.share:
            return
        ready = sends[-1].move.ready if sends else 0
        for before in self._befores(model):
            after = before
            for move in moves(self.num_slots, ready, stashed=before.state.stashed, masks=self.masks):
                masks = (move.rows, move.ready, move.prompts, move.kept, move.masked)
                present = tuple(
                    sum((mask >> slot & 1) << place for place, mask in enumerate(masks))
                    for slot in range(self.num_slots)
                )
                if not _is_first_of_its_kind(pasts, present):
                    continue
                command = move.as_step(before.state.step)
                if before.state.consumed < last_consumed(command.step, before.state.run_ahead):
                    continue
                is_new = after.last_sent != command
                if is_new:
                    after = before.copy()
                    after.send(command)
                longer = (*sends, Send(move, before.state.consumed, before.state.draft))
                yield Visit(longer, before, after, is_end=num_steps == 1, is_new=is_new)
                if num_steps > 1:
                    grown = tuple(past << 5 | now for past, now in zip(pasts, present, strict=True))
                    yield from self._visits(after, num_steps - 1, sends=longer, pasts=grown)

    def _befores(self, model: Model) -> Iterator[Model]:
        # The states in which the next step may be sent.
        state = model.state
        fewest, *more = num_consumable(state.step + 1, state.consumed, model.unconsumed, state.run_ahead)
        before = model.copy()
        for _ in range(fewest):
            before.consume()
        for has_more in (*(True for _ in more), False):
            yield before
            if self.masks and before.has_unconsumed:
                changed = before.copy()
                changed.change_grammar()
                yield changed
            for draft in self.drafts:
                if draft.is_present or before.state.draft.is_present:
                    changed = before.copy()
                    changed.change_draft(draft)
                    yield changed
            if has_more:
                before = before.copy()
                before.consume()


def _is_first_of_its_kind(pasts: tuple[int, ...], present: tuple[int, ...]) -> bool:
    # Slots with the same past can be exchanged: only the order is taken in which the first has most.
    pairs = combinations(zip(pasts, present, strict=True), 2)
    return all(past != other_past or now >= other_now for (past, now), (other_past, other_now) in pairs)
