"""The prompts of the running sequences, in the order in which steps take them in."""

from __future__ import annotations

from bisect import insort
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from slipstream.scheduler.records import NO_DRAFT, NO_SLOTS, Step, StepSlots
from slipstream.scheduler.sizes import LEAST_PROMPTS

if TYPE_CHECKING:
    from slipstream.scheduler.pages import PrefixCache
    from slipstream.scheduler.records import Sequence
    from slipstream.scheduler.sizes import BatchSizes
    from slipstream.scheduler.slots import CommittedTokens


class Prompts:
    """The running sequences whose tokens were not sent in full, in the order in which they get room in steps.

    A new prompt precedes those of its priority that are longer by more tokens than were taken in since they arrived.
    So a short one does not wait for the long ones before it. Once as many tokens as a prompt has were taken in since it
    arrived, no later one precedes it.
    """

    def __init__(self, sizes: BatchSizes, pages: PrefixCache, committed: CommittedTokens) -> None:
        self.draft = NO_DRAFT
        """Takes part in the steps."""
        self._sizes = sizes
        self._pages = pages
        self._committed = committed
        self._looked_up: list[tuple[Sequence, int]] = []
        self.sequences: list[Sequence] = []
        """The running sequences of whose tokens some were not sent, in the order of `Sequence.turn`."""
        self._num_taken = 0
        """Tokens of prompts that were taken in so far."""

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence has a slot. `num_tokens`: about how many the cache does not have; it is looked at again later."""
        sequence.turn = -sequence.spec.priority, self._num_taken + num_tokens
        insort(self.sequences, sequence, key=attrgetter("turn"))

    def discard(self, sequence: Sequence) -> None:
        """A sequence gives its slot back."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def looked_up(self) -> list[tuple[Sequence, int]]:
        """Returns the sequences that began since the last call, and how many tokens of their prompts the cache had.

        Each sequence is there once.
        """
        found, self._looked_up = self._looked_up, []
        return found

    def exceed(self, num_tokens: int) -> bool:
        """Returns whether more tokens than that wait. Counts tokens that the prefix cache may have, too."""
        for sequence in self.sequences:
            num_tokens -= len(sequence.tokens) - sequence.num_prefilled
            if num_tokens < 0:
                return True
        return False

    def take(self, room: int, doubling_context: int | None = None) -> Step:
        """Takes chunks of `room` tokens together, at least one token. Returns a step of these, without a number.

        `doubling_context`: c, if a token after a context of L tokens counts for 1 + L / c, but a chunk has part of the
        room in any case; None if each counts for one.
        """
        chunks, updates, num_taken = [], [], self._num_taken
        members: list[Sequence] = []
        filling: set[bytes] = set()  # by those that go before
        for sequence in self.sequences:
            if room == 0:
                break
            if not sequence.num_prefilled:
                if not self._begin(sequence, filling):
                    continue
                updates.append(sequence.slot_update())
            else:
                filling.update(sequence.prefix.filling)
            weight = 1.0 if doubling_context is None else 1 + sequence.num_prefilled / doubling_context
            least = -(-room // LEAST_PROMPTS)
            chunks.append(sequence.next_chunk(max(least, int(room / weight))))
            num_tokens = len(chunks[-1].tokens)
            # What a prompt that goes on leaves of the room is less than one of its tokens.
            room = 0 if sequence.is_prefilling else max(0, room - ceil(num_tokens * weight))
            self._num_taken += num_tokens
            members.append(sequence)
        # After this step they are filled, as every later step follows it on all streams.
        for sequence in members:
            tokens = self._committed.row(sequence.lease.slot)
            num_settled = sequence.num_prefilled - max(1, sequence.prefix.draft.tokens_ahead)
            self._pages.keep(sequence.prefix, sequence.pages, tokens, num_settled)
        self.sequences = [sequence for sequence in self.sequences if sequence.is_prefilling]
        ending = StepSlots.of(sequence.lease for sequence in members if not sequence.is_prefilling)
        return Step(
            number=0,
            decoded=NO_SLOTS,
            yielding=ending,
            most_more=np.ones(len(ending.slots), np.int32),
            chunks=tuple(chunks),
            num_prompt_tokens=self._num_taken - num_taken,
            updates=tuple(updates),
        )

    def _begin(self, sequence: Sequence, filling: set[bytes]) -> bool:
        """Begins to prefill a sequence, after the pages that the cache has. False if it waits for pages of `filling`.

        `filling`: the keys of pages that sequences before it are filling; those that this one fills are added.
        """
        cache, prefix, num_tokens = self._pages, sequence.prefix, len(sequence.tokens)
        tokens = self._committed.row(sequence.lease.slot)
        # Penalties count the tokens of the prompt, so all of them are sent.
        draft = NO_DRAFT if sequence.is_beyond_draft else self.draft
        if sequence.spec.sampling.has_penalty:
            draft = draft._replace(is_paged=False)
        found = cache.begin(prefix, tokens, num_tokens, draft, filling)
        if found is None:
            return False
        filling.update(prefix.filling)
        cache.release(sequence.pages[: len(found)])
        sequence.pages[: len(found)] = found
        sequence.num_cached = sequence.num_prefilled = len(found) * self._sizes.page_tokens
        if cache.is_enabled and not sequence.was_looked_up:
            sequence.was_looked_up = True
            self._looked_up.append((sequence, min(sequence.num_cached, len(sequence.spec.prompt))))
        return True
