"""The accounts of the running sequences in arrays over slots: how long their output is, and where it ends.

Every operation is over all rows of a step at once, so that its time hardly grows with their number. It is the same few
operations of NumPy in each step, of arrays of one type: the loop's thread sleeps between steps, so that their code
is fetched from memory. Reductions and conversions take several times as much of it as the others.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.common.errors import PendingLengthError
from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.scheduler.records import GOES_ON, LENGTH, NO_OUTCOME, STOP, SlotLease, StepOutcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.scheduler.records import Bools, Counts, Ints, Sequence, Step, StepResult, StepSlots

NUM_STOPS = 8
"""Stop tokens of a sequence that are compared at once; sequences with more are looked at one by one."""
_NO_TOKEN = -1
_NO_END = (1 << 31) - 1


class SlotAllocator:
    """Hands out slots 1 and up; row 0 is padding."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: row 0 included."""
        self.num_slots = num_slots - 1
        """Slots in all."""
        self._free = list(range(num_slots - 1, PADDING_SLOT, -1))
        self.generations: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """[num_slots]: the generation of the lease of each slot; of a free slot, one that no lease has."""

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    def allocate(self) -> SlotLease:
        """Takes a slot; there must be a free one."""
        assert self._free, "a free slot was seen before"
        slot = self._free.pop()
        self.generations[slot] += 1
        return SlotLease(slot, int(self.generations[slot]))

    def release(self, lease: SlotLease) -> None:
        """Gives a slot back; the lease is not current from now on."""
        assert self.is_current(lease), f"slot {lease.slot}: generation {lease.generation} is over"
        self.generations[lease.slot] += 1
        self._free.append(lease.slot)

    def is_current(self, lease: SlotLease) -> bool:
        """True while the sequence that was given this lease has the slot."""
        return bool(self.generations[lease.slot] == lease.generation)


class _UnderWay(NamedTuple):
    """A step that adds to the lengths of some slots."""

    rows: Ints
    most_more: Counts
    """The most that it adds to each; 1 at least."""

    def without(self, slot: int) -> _UnderWay:
        """The same for the others."""
        is_other = self.rows != slot
        return self if is_other.all() else _UnderWay(self.rows[is_other], self.most_more[is_other])


class PendingLengths:
    """The lengths of the outputs of all slots, to which steps under way add."""

    __slots__ = ("_ended", "_known", "_under_way")

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.int32)
        """Without what is in `_ended`."""
        self._ended: list[tuple[Ints, Counts]] = []
        """Rows and tokens of the last steps: most steps need no length, so they are added up when one is asked for."""
        self._under_way: deque[_UnderWay] = deque()

    def reset(self, slot: int, known: int) -> None:
        """Begins anew: no step under way counts for this slot's length."""
        self.tidy()
        self._known[slot] = known
        self._under_way = deque(step.without(slot) for step in self._under_way)

    def begin(self, rows: Ints, most_more: Counts) -> None:
        """Counts one more step under way, which adds 1 to `most_more` tokens to each of `rows`."""
        self._under_way.append(_UnderWay(rows, most_more))

    def end(self, rows: Ints, found: Counts) -> None:
        """Ends the oldest step under way for `rows`, those of its slots that still count: it added `found`.

        Both are kept, so they must not change. Raises PendingLengthError, and changes nothing, if it was not to change
        one of them.
        """
        oldest = self._under_way[0].rows if self._under_way else rows[:0]
        if oldest is not rows and not (is_begun := np.isin(rows, oldest)).all():
            row = rows[is_begun.argmin()]
            raise PendingLengthError(f"a step added to the length of slot {row}, which no step was to change")
        self._under_way.popleft()
        self._ended.append((rows, found))

    def known(self, rows: Ints | int) -> Counts:
        """The lengths without the steps under way."""
        self.tidy()
        known: Counts = self._known[rows]
        return known

    def most(self, rows: Ints | int) -> Counts:
        """Upper bounds once the steps under way are done."""
        bounds = self.known(rows)
        for step in self._under_way:
            bounds = bounds + self._more(rows, step, step.most_more)
        return bounds

    def least(self, rows: Ints) -> Counts:
        """Lower bounds once the steps under way are done; the lengths themselves where none is."""
        bounds = self.known(rows)
        for step in self._under_way:
            bounds = bounds + self._more(rows, step, np.ones_like(step.most_more))
        return bounds

    def tidy(self) -> None:
        """Adds up the tokens of the steps that have ended."""
        # Steps of the same slots share one array of rows.
        for _, steps in groupby(self._ended, lambda ended: id(ended[0])):
            (rows, *_), found = zip(*steps, strict=True)
            self._known[rows] += np.add.reduce(found)
        self._ended.clear()

    def _more(self, rows: Ints | int, step: _UnderWay, more: Counts) -> Counts:
        """What a step adds to each of `rows`, if it adds `more` to its own."""
        if step.rows is rows:
            return more
        of_all = np.zeros_like(self._known)
        of_all[step.rows] = more
        found: Counts = of_all[rows]
        return found


class SlotAccounts:
    """One row for each slot, row 0 (padding) included."""

    def __init__(self, num_slots: int, num_draft_tokens: int) -> None:
        self.lengths = PendingLengths(num_slots)
        """Counts the outputs, with the tokens that sequences were submitted with."""
        self.num_drafted = np.zeros(num_slots, np.int32)
        """How many tokens drafted in a step may be for the sequence; 0 while it is too long for the draft."""
        self.top_logprobs = np.full(num_slots, -1, np.int64)
        """Most likely tokens that it asked for at each place; -1 for no logprobs."""
        self._num_draft_tokens = num_draft_tokens
        self._streams = np.zeros(num_slots, np.int64)
        self._ids = np.zeros(num_slots, np.uint64)
        self._max_new_tokens = np.zeros(num_slots, np.int32)
        self._stops = np.full((num_slots, NUM_STOPS), _NO_TOKEN, np.int64)
        self._most_stops = 0
        """The most stop tokens of a sequence so far, of those with up to NUM_STOPS."""
        self._many_stops: dict[int, frozenset[int]] = {}
        self._places = np.arange(num_draft_tokens + 1)
        # Of the last step: steps have the same `StepSlots` while no sequence starts or ends.
        self._last_slots: StepSlots | None = None
        self._last_more: Counts | None = None
        """Its `most_more`, also the same while each sequence has as many draft tokens."""
        self._last: StepOutcome = NO_OUTCOME
        """The columns of its outcome that no step changes, with the reasons of a step in which no sequence ends."""
        self._ends: tuple[Counts, tuple[Ints, ...]] = (np.zeros(0, np.int32), ())
        """[rows] the most new tokens of its sequences; and [rows, 1] each, as many as one of all sequences has had stop
        tokens."""
        self._room = 0
        """Each of these sequences takes at least so many more tokens."""

    def admit(self, sequence: Sequence) -> None:
        """Writes the row of the slot that a sequence was given."""
        slot, spec = sequence.lease.slot, sequence.spec
        self._last_slots = None
        self.lengths.reset(slot, len(spec.output))
        self.count_drafted(sequence)
        self.top_logprobs[slot] = -1 if spec.top_logprobs is None else spec.top_logprobs
        self._streams[slot], self._ids[slot] = sequence.stream, sequence.id
        self._max_new_tokens[slot] = spec.max_new_tokens
        self._stops[slot] = _NO_TOKEN
        self._many_stops.pop(slot, None)
        if len(spec.stop_token_ids) <= NUM_STOPS:
            self._stops[slot, : len(spec.stop_token_ids)] = list(spec.stop_token_ids)
            self._most_stops = max(self._most_stops, len(spec.stop_token_ids))
        else:
            self._many_stops[slot] = spec.stop_token_ids

    def count_drafted(self, sequence: Sequence) -> None:
        """Writes `num_drafted` of a sequence that has a slot. Counts for steps that are made from now on."""
        self.num_drafted[sequence.lease.slot] = sequence.num_drafted(self._num_draft_tokens)

    def most_accepted(self, rows: Ints, num_draft_tokens: int) -> Counts:
        """The most tokens that each of these slots can accept of `num_draft_tokens` drafted ones."""
        most: Counts = np.minimum(self.num_drafted[rows], num_draft_tokens)
        return most

    def is_sure_to_end(self, rows: Ints) -> Bools:
        """Whether the steps under way reach the end in any case, for each of these slots."""
        sure: Bools = self.lengths.least(rows) >= self._max_new_tokens[rows]
        return sure

    def least_room(self, rows: Ints) -> int:
        """How many more tokens one of these slots is sure to end after, the steps under way counted at their least."""
        room: Counts = self._max_new_tokens[rows] - self.lengths.least(rows)
        return int(room.min(initial=_NO_END))

    def take_in(self, step: Step, result: StepResult, is_current: Bools | None = None) -> StepOutcome:
        """Takes in a step's tokens, cut where an output ends; rows that are not current are left out. None: all are.

        Raises PendingLengthError if no step under way was to bring it.
        """
        accepted, found, tokens, logprobs = result.num_accepted, result.num_tokens, result.tokens, result.logprobs
        if is_current is not None:
            accepted, found, tokens = accepted[is_current], found[is_current], tokens[is_current]
            places = is_current.cumsum() - 1
            logprobs = {int(places[at]): likely for at, likely in logprobs.items() if is_current[at]}
        is_same = self._last_slots is step.yielding and self._last_more is step.most_more
        if not is_same or is_current is not None:
            self._last = self._columns_of(step, is_current)
            self._last_slots, self._last_more, self._room = step.yielding, step.most_more, 0
            if is_current is not None:
                self._last_slots = None
        rows = self._last.rows
        num_tokens, reasons = self._cut(rows, tokens, found)
        if len(step.yielding.rows):
            self.lengths.end(rows, found)
        return self._last._replace(
            num_tokens=num_tokens,
            num_accepted=accepted,
            reasons=reasons,
            tokens=tokens,
            logprobs={at: likely[: num_tokens[at]] for at, likely in logprobs.items()} if logprobs else logprobs,
        )

    def _columns_of(self, step: Step, is_current: Bools | None) -> StepOutcome:
        """Returns an outcome with the columns that no step changes, in which no sequence ends."""
        # As of the step's making: what a sequence may accept can have changed since.
        rows, most_more = step.yielding.rows, step.most_more
        is_beyond = np.zeros(len(rows), np.bool_) if step.is_beyond_draft is None else step.is_beyond_draft
        if is_current is not None:
            rows, most_more, is_beyond = rows[is_current], most_more[is_current], is_beyond[is_current]
        goes_on = np.full(len(rows), GOES_ON, np.int8)
        goes_on.setflags(write=False)
        stops = tuple(self._stops[rows, at, None] for at in range(self._most_stops))
        self._ends = self._max_new_tokens[rows], stops
        return NO_OUTCOME._replace(
            rows=rows,
            streams=self._streams[rows],
            ids=self._ids[rows],
            reasons=goes_on,
            num_drafted=most_more - 1,
            is_beyond_draft=is_beyond,
        )

    def _cut(self, rows: Ints, tokens: Ints, num_tokens: Counts) -> tuple[Counts, NDArray[np.int8]]:
        """Returns the number of tokens up to the end of each output, and the reasons."""
        # Most steps end nothing: what only an end needs is done after a look for one.
        reasons, (max_new_tokens, stops) = self._last.reasons, self._ends
        if self._room <= tokens.shape[1]:
            room = max_new_tokens - self.lengths.known(rows)
            self._room = int(room.min(initial=_NO_END))
            is_full = num_tokens >= room
            if np.count_nonzero(is_full):
                reasons = is_full * np.int8(LENGTH)
                num_tokens = np.minimum(num_tokens, room)
        self._room -= tokens.shape[1]
        if stops or self._many_stops:
            is_stop = self._is_stop(rows, stops, tokens)
            if np.count_nonzero(is_stop):
                is_stop &= self._places[: tokens.shape[1]] < num_tokens[:, None]
                ends = is_stop.any(axis=1)
                num_tokens = num_tokens.copy()
                num_tokens[ends] = is_stop[ends].argmax(axis=1) + 1
                reasons = np.where(ends, np.int8(STOP), reasons)
        return num_tokens, reasons

    def _is_stop(self, rows: Ints, columns: tuple[Ints, ...], tokens: Ints) -> Bools:
        """[rows, K + 1]: True for the tokens that are stop tokens of their sequence."""
        is_stop = np.zeros(tokens.shape, np.bool_)
        for stops in columns:
            is_stop |= tokens == stops
        if self._many_stops:
            for at in np.isin(rows, list(self._many_stops)).nonzero()[0]:
                is_stop[at] = np.isin(tokens[at], list(self._many_stops[int(rows[at])]))
        return is_stop


class CommittedTokens:
    """One row for each slot: the prompt of its sequence, and the output of all results that arrived.

    A draft that arrives later has to take them in.
    """

    def __init__(self, num_slots: int) -> None:
        # Pages that were never written to take no memory.
        self._tokens: NDArray[np.int32] = np.zeros((num_slots, 0), np.int32)
        self._lengths = np.zeros(num_slots, np.int64)
        self._unwritten: list[StepOutcome] = []
        """Of the last steps."""

    def begin(self, slot: int, tokens: tuple[int, ...], most: int) -> None:
        """Gives the slot to a sequence that starts with `tokens` and has up to `most` tokens at its end."""
        self.tidy()
        num_columns = self._tokens.shape[1]
        if most > num_columns:
            wider = np.zeros((len(self._lengths), max(most, 2 * num_columns)), np.int32)
            for row in self._lengths.nonzero()[0]:
                length = self._lengths[row]
                wider[row, :length] = self._tokens[row, :length]
            self._tokens = wider
        self._tokens[slot, : len(tokens)] = tokens
        self._lengths[slot] = len(tokens)

    def append(self, outcome: StepOutcome) -> None:
        """Adds the new tokens of a step to its slots."""
        self._unwritten.append(outcome)

    def num_tokens(self, slot: int) -> int:
        """How many tokens of the slot's sequence are known."""
        self.tidy()
        return int(self._lengths[slot])

    def row(self, slot: int) -> NDArray[np.int32]:
        """Returns the tokens of the slot's sequence; what follows them means nothing."""
        self.tidy()
        row: NDArray[np.int32] = self._tokens[slot]
        return row

    def read(self, slot: int, start: int, end: int) -> tuple[int, ...]:
        """The tokens at positions `start` to `end - 1`."""
        return tuple(self.row(slot)[start:end].tolist())

    def tidy(self) -> None:
        """Writes the tokens that were added: to do so for many steps at once is cheaper than for each."""
        # Steps of the same slots share one array of rows.
        for _, steps in groupby(self._unwritten, lambda outcome: id(outcome.rows)):
            self._write_steps(list(steps))
        self._unwritten.clear()

    def _write_steps(self, steps: list[StepOutcome]) -> None:
        """Writes the tokens of steps of the same slots."""
        rows = steps[0].rows
        tokens = np.stack([outcome.tokens for outcome in steps], 1)
        num_tokens = np.stack([outcome.num_tokens for outcome in steps], 1)
        is_new = np.arange(tokens.shape[2]) < num_tokens[:, :, None]
        num_new = num_tokens.sum(1)
        ends = self._lengths[rows] + num_new
        # New tokens are ordered by slot, those of a slot by position, in the table as in `tokens`.
        first = rows * self._tokens.shape[1] + ends - num_new.cumsum()
        new_tokens = tokens[is_new]
        self._tokens.reshape(-1)[np.arange(len(new_tokens)) + first.repeat(num_new)] = new_tokens
        self._lengths[rows] = ends
