"""The batch: the running sequences, the prompts that they take in, and the next step for them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slipstream.common.errors import DeadlineExceededError, InternalError
from slipstream.scheduler.pages import PageLists, PrefixCache
from slipstream.scheduler.prompts import Prompts
from slipstream.scheduler.records import NO_DRAFT, NO_LIMIT, NO_SLOT, NO_SLOTS, Prefix, Step, StepSlots, most_tokens
from slipstream.scheduler.results import Outgoing
from slipstream.scheduler.sizes import FEW_STEPS, MOST_WITHOUT, BatchCounts, BatchSizes
from slipstream.scheduler.slots import CommittedTokens, SlotAccounts, SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.records import (
        Bools,
        ChooseDraftTokens,
        Counts,
        DraftKV,
        Ints,
        Sequence,
        StepOutcome,
        StepResult,
    )
    from slipstream.scheduler.waiting_queue import WaitingQueue


_NOT_FINITE = "the model's logits for this sequence are NaN or infinite, so it has no next token"
_UNMATCHED = "the grammar worker cannot say what may follow: the grammar exceeds its limits here"
_MANY = 1 << 30
"""Steps of no sequence that pages last."""


class Gate(Protocol):
    """Decides which sequences with a constraint may start."""

    def holds(self, sequence: Sequence) -> bool:
        """Returns whether a sequence must not start yet."""
        ...

    def fault_of(self, sequence: Sequence) -> SlipstreamError | None:
        """Why it cannot be run; None if it can, or may be later."""
        ...


class Batch:
    """The running sequences of an epoch. Every method returns at once; none looks at the device."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes
        self.pages = PrefixCache(sizes.num_pages, sizes.page_tokens, is_enabled=sizes.has_prefix_cache)
        self._page_lists = PageLists(sizes, self.pages)
        self.slots = SlotAllocator(sizes.num_slots)
        self.accounts = SlotAccounts(sizes.num_slots, sizes.num_draft_tokens)
        self._context_limit = ContextLimit(sizes, self.accounts, self._page_lists)
        self.committed = CommittedTokens(sizes.num_slots)
        """The tokens of the running sequences."""
        self.outgoing = Outgoing()
        """Gets all output."""
        self.gate: Gate | None = None
        """None where no sequence has a constraint."""
        self.counts = BatchCounts()
        """Replaced as a whole, so that any thread may read it."""
        self._running: dict[int, Sequence] = {}
        """By slot, in the order of their start."""
        self._prompts = Prompts(sizes, self.pages, self.committed)
        self._is_prefilled = np.zeros(sizes.num_slots, np.bool_)
        """[slots]: the slot has a sequence all of whose tokens were sent."""
        self._is_constrained = np.zeros(sizes.num_slots, np.bool_)
        """[slots]: the last sequence of the slot has a constraint."""
        self._decoding: Step | None = None
        """What the sequences that decode do in a step, without its number and updates: the same from step to step until
        one starts, ends or is sure to end. None if one started or ended since it was made."""
        self._decoding_for = 0
        """The K that it was made for."""
        self._chosen: tuple[Step | None, Step] = None, Step(0, NO_SLOTS, NO_SLOTS, np.ones(0, np.int32))
        """`_decoding` when draft tokens were chosen last, and the step with these."""
        self._room = 0
        """No sequence of `_decoding` is sure to end before so many more tokens are sure."""
        self._num_covered = 0
        """The pages of all sequences of `_decoding` last for so many steps more."""
        self._num_in_context = 0
        """The draft has room for those of `_decoding` that it drafts for, for so many steps more."""
        self._preempted: list[Sequence] = []
        """Sequences that are to wait in the queue again."""
        self._over: list[Sequence] = []
        """Sequences that the queue still counts."""
        self.last_step = 0
        """Number of the last step that was made."""
        self._is_decodes_turn = False
        """True after a step of prompts. Counts where steps are not mixed."""
        self._num_without = 0
        """Steps that drafted none since fewer prompts waited than make them do so."""

    def bound_shared_steps(
        self, num_tokens: int, doubling_context: int | None = None, *, large_tokens: int | None = None
    ) -> None:
        """Sets the tokens of a step that takes in prompts while sequences decode; see `BatchSizes`."""
        most = self.sizes.chunk_tokens
        self.sizes = replace(
            self.sizes,
            shared_chunk_tokens=min(num_tokens, most),
            large_chunk_tokens=None if large_tokens is None else min(large_tokens, most),
            doubling_context=doubling_context,
        )

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    def admit(self, queue: WaitingQueue) -> None:
        """Starts waiting sequences in the queue's order, while a slot and the pages to prefill them are free."""
        if self._over:
            queue.release(self._over)
            self._over.clear()
        if self._preempted:
            queue.put_back([sequence for sequence in self._preempted if not sequence.is_over])
            self._preempted.clear()
        for expired in queue.take_expired() if queue.deadlines else ():
            expired.is_over = True
            self.outgoing.add_refused(expired, DeadlineExceededError("the deadline passed before a slot was free"))
        holds = None if self.gate is None else self.gate.holds
        while self.slots.num_free and (sequence := queue.take_next(self._has_room_for, holds)) is not None:
            if self.gate is not None and (fault := self.gate.fault_of(sequence)) is not None:
                self.outgoing.add_refused(sequence, fault)
                self._end(sequence)
                continue
            sequence.lease = self.slots.allocate()
            self._is_constrained[sequence.lease.slot] = bool(sequence.spec.grammar)
            self.accounts.admit(sequence)
            self.committed.begin(sequence.lease.slot, sequence.tokens, sequence.num_tokens_at_most)
            sequence.prefix = Prefix(sequence.spec.cache_salt, self.sizes.page_tokens)
            # Its new pages are not to take the place of those that it begins with.
            num_tokens = len(sequence.tokens)
            num_cached = self.pages.touch(sequence.prefix, self.committed.row(sequence.lease.slot), num_tokens)
            self._page_lists.begin(sequence)
            self._context_limit.look(sequence)
            self._running[sequence.lease.slot] = sequence
            self._prompts.add(sequence, num_tokens - num_cached)
            if not sequence.was_preempted:
                self.outgoing.add_admitted(sequence)

    def next_step(
        self,
        num_draft_tokens: int,
        *,
        decodes_first: bool = False,
        mixes: bool = True,
        evens: tuple[int, ...] = (),
        draft: DraftKV = NO_DRAFT,
        choose: ChooseDraftTokens = most_tokens,
    ) -> Step | None:
        """The next step, or None if there is nothing to do: decodes all that can, and takes in prompts beside.

        `num_draft_tokens`: K of the draft that takes part; 0 decodes plainly. `decodes_first`: where sequences can
        decode, the step takes in no prompts. `mixes`: False if this draft cannot take part in steps that do both.
        `evens`, `choose`: see `ChooseDraftTokens`. `draft`: takes part, and drafts.
        """
        if draft != self._prompts.draft:
            self._prompts.draft, self._decoding = draft, None
            for sequence in self._running.values():
                sequence.prefix.draft = NO_DRAFT
            self._context_limit.change(draft, self._running.values())
        decoding = self._decoding_with(num_draft_tokens)
        if not self._prompts.sequences and not decoding.decoded.slots:
            return None
        decoding = self._with_draft_tokens(decoding, choose, evens)
        step = self._make_step(decoding, decodes_first=decodes_first, mixes=mixes and self.sizes.mixes)
        if step.yielding.slots:
            self.accounts.lengths.begin(step.yielding.rows, step.most_more)
        return step

    def _make_step(self, decoding: Step, *, decodes_first: bool, mixes: bool) -> Step:
        num_rows = len(decoding.decoded.slots)
        num_decoded = decoding.num_decoded_tokens
        self.last_step += 1
        has_turn = decodes_first or (self._is_decodes_turn and not mixes)
        if not self._prompts.sequences or (num_decoded and has_turn):
            self._is_decodes_turn = False
            return self._numbered(decoding)
        self._is_decodes_turn = True
        room = self.sizes.room_in_small_step(num_decoded)
        if self._prompts.exceed(FEW_STEPS * room):
            num_waiting = len(self._prompts.sequences)
            skips_drafting = mixes and self.sizes.skips_drafting(decoding.most_draft_tokens, num_rows, num_waiting)
            if skips_drafting and self._num_without < MOST_WITHOUT:
                decoding, num_decoded = decoding.with_draft_tokens(np.zeros_like(decoding.most_more)), num_rows
                self._num_without += 1
            room = self.sizes.room_for_prompts(num_decoded)
            if self._prompts.exceed(FEW_STEPS * room):
                room = self.sizes.room_in_large_step(num_decoded)
        else:
            self._num_without = 0
        prompts = self._prompts.take(room, self.sizes.doubling_context if num_decoded else None)
        for sequence, num_hit in self._prompts.looked_up():
            self._count_looked_up(sequence, num_hit)
        if prompts.yielding.slots:
            self._is_prefilled[prompts.yielding.rows] = True
            self._decoding = None
        if num_decoded and mixes:
            return self._joined(self._numbered(decoding), prompts)
        return prompts._replace(
            number=self.last_step,
            top_logprobs=self._top_logprobs(prompts.yielding.rows),
            constrained=self._constrained(prompts.yielding.rows),
            updates=(*self._page_lists.take_updates(), *prompts.updates),
        )

    def _numbered(self, decoding: Step) -> Step:
        """The next step, of the sequences that decode."""
        self._room -= 1
        self._num_covered -= 1
        self._num_in_context -= 1
        return decoding._replace(number=self.last_step, updates=self._page_lists.take_updates())

    def _joined(self, step: Step, prompts: Step) -> Step:
        """The same step with the chunks of `prompts`, whose first tokens follow those of the rows that decode."""
        yielding, num_ending = step.yielding + prompts.yielding, len(prompts.yielding.slots)
        is_beyond = step.is_beyond_draft
        return step._replace(
            yielding=yielding,
            most_more=np.concatenate((step.most_more, prompts.most_more)),
            is_bounded=step.is_bounded or (step.most_draft_tokens > 0 and num_ending > 0),
            is_beyond_draft=None if is_beyond is None else np.pad(is_beyond, (0, num_ending)),
            top_logprobs=self._top_logprobs(yielding.rows),
            constrained=self._constrained(yielding.rows),
            chunks=prompts.chunks,
            num_prompt_tokens=prompts.num_prompt_tokens,
            updates=(*step.updates, *prompts.updates),
        )

    def empty_step(self) -> Step:
        """A step of no sequence, which takes next to no time."""
        self.last_step += 1
        return Step(self.last_step, NO_SLOTS, NO_SLOTS, np.ones(0, np.int32))

    def is_decoding(self) -> bool:
        """True if a step that decodes would have members. They have the pages for it then."""
        return bool(self._decoding_with(0 if self._decoding is None else self._decoding_for).decoded.slots)

    def begun(self) -> list[tuple[Sequence, int]]:
        """The running sequences whose prefill has begun, and how many tokens of each were sent or are known since."""
        return [
            (sequence, sequence.num_prefilled if sequence.is_prefilling else self.committed.num_tokens(slot))
            for slot, sequence in self._running.items()
            if sequence.num_prefilled
        ]

    def apply(self, step: Step, result: StepResult, published_ns: int | None = None) -> StepOutcome:
        """Takes in the result of a step. Rows of sequences that are over are dropped.

        Raises PendingLengthError, and takes in nothing, if no step under way was to bring it.
        `published_ns`: when the result was on the host; None: now.
        """
        for reason, rows in ((_NOT_FINITE, result.not_finite), (_UNMATCHED, result.unmatched)):
            for at in rows:
                self._fail(step.yielding, at, reason)
        outcome = self.accounts.take_in(step, result, self._is_current(step.yielding))
        # A result brings one token that the lengths were sure of, and up to K that they were not.
        self._room -= step.most_draft_tokens
        self.committed.append(outcome)
        published_ns = published_ns or time.monotonic_ns()
        self.outgoing.add_step(outcome, published_ns)
        ended = outcome.reasons.nonzero()[0]
        if len(ended):
            for slot in outcome.rows[ended].tolist():
                self._end(self._running[slot])
        return outcome

    def take_output(self) -> Outgoing:
        """Returns the output since the last call."""
        outgoing = self.outgoing
        if not outgoing.is_empty:
            outgoing.taken_ns = time.monotonic_ns()
            self.outgoing = Outgoing()
        return outgoing

    def cancel(self, sequences: list[Sequence]) -> None:
        """Ends sequences, running or not yet; those that are over stay as they are."""
        for sequence in sequences:
            if not sequence.is_over:
                self.outgoing.add_aborted(sequence)
                self._end(sequence)

    def running(self, slot: int) -> Sequence:
        """The sequence that has a slot."""
        return self._running[slot]

    def preempt_constrained(self, *, may_be_cause: bool) -> None:
        """Has all running sequences with a constraint wait again, as their results under way do not count.

        `may_be_cause`: the grammar worker was lost, perhaps because of one of them.
        """
        for sequence in [one for one in self._running.values() if one.spec.grammar]:
            before = len(sequence.spec.output)
            self._preempt(sequence)
            sequence.num_lost = may_be_cause + (sequence.num_lost if len(sequence.spec.output) == before else 0)

    def _fail(self, slots: StepSlots, at: int, reason: str) -> None:
        """Ends a sequence without the tokens of a step, unless it is over."""
        slot = slots.slots[at]
        if self.slots.generations[slot] == slots.generations[at]:
            self.outgoing.add_refused(self._running[slot], InternalError(reason))
            if reason is _NOT_FINITE:
                self.counts = self.counts._replace(not_finite=self.counts.not_finite + 1)
            self.pages.drop(self._running[slot].pages)
            self._end(self._running[slot], is_sound=False)

    def _end(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        sequence.is_over = True
        self._over.append(sequence)
        if self._running.get(sequence.lease.slot) is sequence:
            self._free(sequence, is_sound=is_sound)

    def _preempt(self, sequence: Sequence) -> None:
        """Has a running sequence wait again with the output that it has. Results of its steps under way are dropped."""
        slot = sequence.lease.slot
        output = self.committed.read(slot, len(sequence.spec.prompt), self.committed.num_tokens(slot))
        self._free(sequence)
        sequence.preempt(output)
        self._preempted.append(sequence)
        self.counts = self.counts._replace(preemptions=self.counts.preemptions + 1)

    def _free(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Gives back what a running sequence has. Its full pages stay in the prefix cache if they are sound."""
        slot = sequence.lease.slot
        if is_sound and not sequence.is_prefilling:
            self._keep_pages(sequence, self._num_settled(sequence))
        del self._running[slot]
        self._decoding = None
        self._is_prefilled[slot] = False
        self._prompts.discard(sequence)
        self.slots.release(sequence.lease)
        self._page_lists.end(sequence)

    def _has_room_for(self, sequence: Sequence) -> bool:
        return self._page_lists.fits(sequence, is_alone=not self._running)

    def _is_current(self, slots: StepSlots) -> Bools | None:
        """Which of the leases still hold; None for all."""
        if self._decoding is not None and self._decoding.decoded is slots:
            return None
        is_current: Bools = self.slots.generations[slots.rows] == slots.generations
        return None if is_current.all() else is_current

    def _decoding_with(self, num_draft_tokens: int) -> Step:
        decoding = self._decoding
        if decoding is not None and self._room <= 0:
            self._room = self.accounts.least_room(decoding.decoded.rows)
        is_over = self._room <= 0 or self._num_in_context <= 0
        if decoding is None or is_over or self._decoding_for != num_draft_tokens:
            decoding = self._find_decoding(num_draft_tokens)
        while self._num_covered <= 0 and not self._has_pages(decoding):
            decoding = self._find_decoding(num_draft_tokens)
        return decoding

    def _with_draft_tokens(self, decoding: Step, choose: ChooseDraftTokens, evens: tuple[int, ...]) -> Step:
        """The same step with as many draft tokens for each sequence as are chosen, at most those that it may have."""
        if not decoding.most_draft_tokens:
            return decoding
        counts, last, found = choose(decoding.decoded, decoding.most_more - 1, evens=evens), *self._chosen
        if last is not decoding or not np.array_equal(counts + 1, found.most_more):
            found = decoding.with_draft_tokens(counts, evens=evens)
            self._chosen = decoding, found
        return found

    def _has_pages(self, decoding: Step) -> bool:
        """Gives its sequences the pages that the next step may write to. Returns False if it took slots for that.

        The first in the queue's order gets its pages first; the last one that runs is preempted when none are left.
        """
        rows = decoding.decoded.rows
        lengths = self.accounts.lengths.most(rows)
        if self._count_covered(rows, lengths):
            return True
        short = self._page_lists.short(rows, lengths)
        if not self._page_lists.grow_together(*short, self._running):
            self._grow_in_order(*short)
        self._count_covered(rows, lengths)
        return self._decoding is decoding

    def _count_covered(self, rows: Ints, lengths: Counts) -> bool:
        self._num_covered = int(self._page_lists.num_steps(rows, lengths).min(initial=_MANY))
        return self._num_covered > 0

    def grow_ahead(self) -> None:
        """Gives the pages of the next step while no worker waits, if enough are free and the same ones decode in it."""
        if self._decoding is not None and self._num_covered <= 0:
            rows = self._decoding.decoded.rows
            lengths = self.accounts.lengths.most(rows)
            is_short = not self._count_covered(rows, lengths)
            if is_short and self._page_lists.grow_together(*self._page_lists.short(rows, lengths), self._running):
                self._count_covered(rows, lengths)

    def _grow_in_order(self, rows: Ints, lengths: Counts) -> None:
        short = [(self._running[slot], length) for slot, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
        for sequence, length in sorted(short, key=lambda one: one[0].rank):
            while sequence.lease is not NO_SLOT and not self._page_lists.grow(sequence, length):
                self._preempt(max(self._running.values(), key=lambda one: one.rank))

    def _find_decoding(self, num_draft_tokens: int) -> Step:
        rows = self._is_prefilled.nonzero()[0]
        is_decoding = self._is_prefilled.copy()
        is_decoding[rows] = ~self.accounts.is_sure_to_end(rows)
        rows = is_decoding.nonzero()[0]
        slots = StepSlots(tuple(rows.tolist()), rows, self.slots.generations[rows], _mask(is_decoding))
        beyond, self._num_in_context = self._context_limit.ends(rows)
        for slot in beyond:
            self._leave_draft(self._running[slot])
        most = self.accounts.most_accepted(rows, num_draft_tokens)
        is_drafted = bool(most.any())
        if not is_drafted:
            for slot in rows.tolist():
                self._running[slot].prefix.draft = NO_DRAFT
        self._room = self._num_covered = 0
        self._decoding_for = num_draft_tokens
        self._decoding = Step(
            number=0,
            decoded=slots,
            yielding=slots,
            most_more=most + 1,
            is_bounded=is_drafted and bool((most < num_draft_tokens).any()),
            num_draft_tokens=(num_draft_tokens,) * len(rows) if is_drafted else (),
            most_draft_tokens=num_draft_tokens if is_drafted else 0,
            is_kept=is_drafted,
            is_beyond_draft=self._context_limit.is_beyond(rows),
            top_logprobs=self._top_logprobs(rows),
            constrained=self._constrained(rows),
        )
        return self._decoding

    def _leave_draft(self, sequence: Sequence) -> None:
        """The draft has no room for a sequence that decodes from now on; for its pages so far it had."""
        self._keep_pages(sequence, self._num_settled(sequence))
        sequence.prefix.draft = NO_DRAFT
        self._context_limit.look(sequence)

    def _constrained(self, rows: Ints) -> tuple[int, ...]:
        return () if self.gate is None else tuple(rows[self._is_constrained[rows]].tolist())

    def _top_logprobs(self, rows: Ints) -> dict[int, int]:
        asked = self.accounts.top_logprobs[rows]
        return {at: int(asked[at]) for at in (asked >= 0).nonzero()[0].tolist()}

    def _count_looked_up(self, sequence: Sequence, num_hit: int) -> None:
        counts = self.counts
        self.counts = counts._replace(
            prefix_query_tokens=counts.prefix_query_tokens + len(sequence.spec.prompt),
            prefix_hit_tokens=counts.prefix_hit_tokens + num_hit,
        )
        if num_hit:
            self.outgoing.add_cached(sequence, num_hit)

    def _keep_pages(self, sequence: Sequence, num_settled: int) -> None:
        tokens = self.committed.row(sequence.lease.slot)
        self.pages.keep(sequence.prefix, sequence.pages, tokens, num_settled)

    def _num_settled(self, sequence: Sequence) -> int:
        """Tokens of a sequence that decodes whose KV no step writes again, those under way included."""
        num_known, draft = self.committed.num_tokens(sequence.lease.slot), sequence.prefix.draft
        # The newest token has none yet. A draft's next step writes again what belongs to the last step's tokens.
        return num_known - 1 - (self.sizes.num_draft_tokens + max(1, draft.tokens_ahead) if draft.attachment else 0)


class ContextLimit:
    """Decides which running sequences are too long for the draft: its context limits drafting, and no sequence.

    A sequence that is to grow longer than the draft's context is drafted for while all tokens drafted for it have room
    there. From then on verify accepts none for it, so that it decodes plainly, in the steps of those that are drafted
    for as well as in plain ones. It does not return, as the draft was not told of the tokens of plain steps; another
    draft may have room for it. Belongs to the loop's thread. Lengths are those of outputs.
    """

    def __init__(self, sizes: BatchSizes, accounts: SlotAccounts, page_lists: PageLists) -> None:
        self._sizes = sizes
        self._accounts = accounts
        self._page_lists = page_lists
        self._draft = NO_DRAFT
        self._room: NDArray[np.int64] = np.full(sizes.num_slots, NO_LIMIT)
        """[slots]: see `DraftKV.room_for`."""
        self._is_beyond = np.zeros(sizes.num_slots, np.bool_)

    def change(self, draft: DraftKV, sequences: Iterable[Sequence]) -> None:
        """Another draft takes part from the next step on, or none. `sequences`: all that have a slot."""
        self._draft = draft
        for sequence in sequences:
            self.look(sequence)

    def look(self, sequence: Sequence) -> None:
        """Decides whether a sequence that has a slot is too long for the draft now; the workers learn what changes."""
        slot = sequence.lease.slot
        if self._draft.attachment:
            self._room[slot] = self._draft.room_for(sequence, self._sizes.num_draft_tokens)
            has_room = bool(self._accounts.lengths.most(slot) <= self._room[slot])
            is_beyond = not has_room and sequence.spec.max_draft_tokens != 0
            if is_beyond is not sequence.is_beyond_draft:
                sequence.is_beyond_draft = is_beyond
                self._accounts.count_drafted(sequence)
                if sequence.num_prefilled:
                    self._page_lists.resend(sequence)
        self._is_beyond[slot] = sequence.is_beyond_draft

    def is_beyond(self, rows: Ints) -> Bools | None:
        """Which of these slots are too long for the draft; None if none is, or if there is no draft."""
        is_beyond: Bools = self._is_beyond[rows]
        return is_beyond if self._draft.attachment and is_beyond.any() else None

    def ends(self, rows: Ints) -> tuple[list[int], int]:
        """Returns those of the slots drafted for that have no room now, and for how many steps the others have."""
        if not self._draft.attachment:
            return [], NO_LIMIT
        rows = rows[self._accounts.num_drafted[rows] > 0]
        left = self._room[rows] - self._accounts.lengths.most(rows)
        has_room = left >= 0
        num_steps = left[has_room] // self._sizes.most_step_tokens + 1
        return rows[~has_room].tolist(), int(num_steps.min(initial=NO_LIMIT))


def _mask(rows: Bools) -> int:
    """[slots] as the bits of a number, row 0 the lowest."""
    return int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little")
