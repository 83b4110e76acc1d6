"""Sequences while the scheduler has them: their tokens, pages and slots, and how much of them was sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.common.worker.layout import PADDING_SLOT
from slipstream.common.worker.step import PrefillChunk, SlotUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.common.api.sequence import SequenceSpec
    from slipstream.scheduler.core.prefix_cache import Prefix


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A slot, a row of every shared buffer, for as long as one sequence has it."""

    slot: int
    generation: int
    """Unique among the leases of a slot: a result of another generation belongs to another sequence."""


NO_SLOT = SlotLease(PADDING_SLOT, 0)
"""The lease of a sequence that has no slot."""


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


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence from its submission to its end. Its lengths while it runs are in `SlotAccounts`."""

    spec: SequenceSpec
    id: int = 0
    """Chosen by its gateway."""
    stream: int = 0
    """Number of the gateway's stream."""
    rank: tuple[int, int, int] = (0, 0, 0)
    """Its place in the queue's order, the lowest first, chosen by the queue: negative priority, arrival, number."""
    num_overtaken: int = 0
    """Sequences of a higher rank that were started before it. Belongs to the queue's lock."""
    is_queued: bool = False
    """True while it is in the queue. Belongs to the queue's lock."""
    is_over: bool = False
    """True if no more output comes. This and the rest belong to the loop's thread."""
    was_preempted: bool = False
    """True once it has given its slot and its pages back for another one's sake; it waits again then."""
    lease: SlotLease = NO_SLOT
    """Its slot, from its admission on."""
    pages: list[int] = field(default_factory=list)
    turn: tuple[int, int] = (0, 0)
    """Its place among the prompts that are taken in, the lowest first: see `Prompts.add`."""
    num_cached: int = 0
    """Of `tokens`, how many the prefix cache had when it began."""
    is_beyond_draft: bool = False
    """True if it is too long for the draft that took part last, so that verify accepts no draft tokens of it."""
    num_prefilled: int = 0
    """Of `tokens`, how many were sent to the workers, or the prefix cache had."""
    was_looked_up: bool = False
    """True once what the prefix cache had was counted."""
    prefix: Prefix = field(init=False)
    """Its pages as the prefix cache knows them."""
    tokens: tuple[int, ...] = field(init=False)
    """The tokens to prefill: the prompt, and the output that it came with."""

    def __post_init__(self) -> None:
        self.tokens = self.spec.prompt + self.spec.output

    @property
    def key(self) -> tuple[int, int]:
        """Stream and id."""
        return self.stream, self.id

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.spec.prompt) + self.spec.max_new_tokens

    @property
    def is_prefilling(self) -> bool:
        """True if some of its tokens were not sent yet."""
        return self.num_prefilled < len(self.tokens)

    def preempt(self, output: tuple[int, ...]) -> None:
        """Goes back to where it has no slot, with the output that it has."""
        self.spec = replace(self.spec, output=output)
        self.tokens = self.spec.prompt + output
        self.was_preempted, self.lease, self.num_prefilled = True, NO_SLOT, 0

    @property
    def max_draft_tokens(self) -> int | None:
        """Draft tokens that verify may accept in a step; None is all of them."""
        return 0 if self.is_beyond_draft else self.spec.max_draft_tokens

    def num_drafted(self, num_draft_tokens: int) -> int:
        """How many of the K tokens drafted in a step are for this sequence."""
        most = self.max_draft_tokens
        return num_draft_tokens if most is None else min(num_draft_tokens, most)

    def slot_update(self) -> SlotUpdate:
        """The parameters that the workers get before its first step."""
        spec = self.spec
        return SlotUpdate(
            slot=self.lease.slot,
            generation=self.lease.generation,
            pages=tuple(self.pages),
            limit_tokens=self.num_tokens_at_most,
            sampling=spec.sampling,
            max_draft_tokens=self.max_draft_tokens,
            prompt_tokens=len(spec.prompt) if spec.output else None,
            cached_tokens=self.num_cached,
            has_cache_salt=bool(spec.cache_salt),
        )

    def update_of_running(self, *, history_from: int) -> SlotUpdate:
        """The same for a draft that comes while it runs. `history_from`: see `SlotUpdate`."""
        prompt_tokens = len(self.spec.prompt)
        return replace(self.slot_update(), prompt_tokens=prompt_tokens, history_from=history_from, cached_tokens=0)

    def page_update(self, first: int) -> SlotUpdate:
        """Its pages from index `first` on, for a worker that has those before, and what may change while it runs."""
        return SlotUpdate(
            slot=self.lease.slot,
            generation=self.lease.generation,
            first_page_index=first,
            pages=tuple(self.pages[first:]),
            limit_tokens=self.num_tokens_at_most,
            max_draft_tokens=self.max_draft_tokens,
            prompt_tokens=len(self.spec.prompt),
        )

    def next_chunk(self, max_tokens: int) -> PrefillChunk:
        """Takes the next of its tokens to prefill, `max_tokens` at most."""
        start = self.num_prefilled
        tokens = self.tokens[start : start + max_tokens]
        self.num_prefilled += len(tokens)
        is_last = self.num_prefilled == len(self.tokens)
        return PrefillChunk(slot=self.lease.slot, start=start, tokens=tokens, is_last=is_last)
