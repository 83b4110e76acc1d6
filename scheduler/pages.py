"""The KV pages: found by their content, and held by the running sequences, which get more before they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Container, Mapping

    from numpy.typing import NDArray

    from slipstream.common.wire.step import SlotUpdate
    from slipstream.scheduler.page_log import PageLog
    from slipstream.scheduler.records import Counts, DraftKV, Ints, Prefix, Sequence
    from slipstream.scheduler.sizes import BatchSizes

PADDING_PAGE = 0


class _Entry(NamedTuple):
    """A page in the cache."""

    page: int
    attachment: int
    """The draft whose keys and values it has; 0 for none."""
    following: bytes
    """For a head: the tokens after the page that its content depends on."""

    def serves(self, draft: DraftKV, following: bytes) -> bool:
        """Returns whether a sequence may use the page that is followed by `following`, while `draft` drafts."""
        if not draft.attachment:
            return True
        return draft.is_paged and self.attachment == draft.attachment and self.following == following


class PrefixCache:
    """Hands out the KV pages of draft and verify alike, and keeps their content. Belongs to the loop's thread.

    Its pages have the numbers 1 and up; page 0 is padding, never read. A freed page may be handed out at once: stale
    work that still writes to it precedes its new owner's on the same stream, and only at positions that are written
    again before they are read.
    """

    def __init__(self, num_pages: int, page_tokens: int, *, is_enabled: bool = True) -> None:
        """`num_pages`: page 0 included. If it is not enabled, it finds and keeps nothing."""
        self.is_enabled = is_enabled
        self._page_tokens = page_tokens
        self.num_pages = num_pages - 1
        """Pages in all."""
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        """Pages without content."""
        self._references: dict[int, int] = {}
        """By page; none for those in `_unused`."""
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[int, bytes] = {}
        """By page, of those in the cache."""
        self._unused: dict[int, None] = {}
        """Pages in the cache without a reference, the least recently used first."""
        self.log: PageLog | None = None
        """Is told of the pages that the cache gets and loses, if it is set, but for those with a salt."""

    @property
    def num_free(self) -> int:
        """Pages that can be taken: those without content, and those in the cache without a reference."""
        return len(self._free) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Pages in the cache, with and without references."""
        return len(self._entries)

    def touch(self, prefix: Prefix, tokens: NDArray[np.int32], num_tokens: int) -> int:
        """Has the pages that a sequence may begin with be evicted last; returns how many tokens these have.

        Arguments as for `begin`, which follows.
        """
        found: list[int] = []
        for key in prefix.keys(tokens, (num_tokens - 1) // self._page_tokens) if self.is_enabled else ():
            if (entry := self._entries.get(key)) is None:
                break
            found.append(entry.page)
        # As in `release`: the last one is the first of them to go.
        for page in reversed(found):
            if page in self._unused:
                del self._unused[page]
                self._unused[page] = None
        return len(found) * self._page_tokens

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` pages for new content. Raises ResourceExhaustedError if there are fewer; then none is taken."""
        if count > self.num_free:
            raise ResourceExhaustedError(f"{count} KV pages wanted, {self.num_free} free", retry_after_ms=100)
        while len(self._free) < count:
            page = next(iter(self._unused))
            del self._unused[page]
            self._forget(page)
            self._free.append(page)
        taken = tuple([self._free.pop() for _ in range(count)])
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def release(self, pages: abc.Sequence[int]) -> None:
        """Gives back one reference to each of a sequence's pages, in their order."""
        # The last pages of a sequence are of use to the fewest others, so they are the first to go.
        for page in reversed(pages):
            assert page in self._references, f"page {page} is given back but was not taken"
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._keys:
                self._unused[page] = None
            else:
                self._free.append(page)

    def begin(
        self, prefix: Prefix, tokens: NDArray[np.int32], num_tokens: int, draft: DraftKV, filling: Container[bytes]
    ) -> list[int] | None:
        """Takes references to the pages that a sequence can begin with, and returns them.

        None if the next page is among those that other sequences are `filling`: a step later it may be there. `tokens`:
        the sequence's, of which the first `num_tokens` are to be taken in; `draft`: takes part.
        """
        # The last token is computed in any case: the output's first token is sampled from it.
        num_pages = (num_tokens - 1) // self._page_tokens
        keys = prefix.keys(tokens, num_pages) if self.is_enabled else []
        found: list[int] = []
        if draft.is_paged:
            for number, key in enumerate(keys, start=1):
                entry = self._entries.get(key)
                if entry is None or not entry.serves(draft, self._following(tokens[:num_tokens], number, draft)):
                    break
                found.append(entry.page)
            if len(found) < len(keys) and keys[len(found)] in filling:
                return None
        for page in found:
            self._unused.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1
        prefix.draft, prefix.num_kept = draft, len(found)
        return found

    def keep(self, prefix: Prefix, pages: abc.Sequence[int], tokens: NDArray[np.int32], num_settled: int) -> None:
        """Puts the full pages of a sequence into the cache, as far as their content does not change any more.

        `pages`: the sequence's; `tokens`: at least `num_settled`, those whose content is settled, and what a draft
        reads after them.
        """
        num_pages = num_settled // self._page_tokens
        if not self.is_enabled or num_pages <= prefix.num_kept:
            return
        keys = prefix.keys(tokens, num_pages)
        for number in range(prefix.num_kept, num_pages):
            following = self._following(tokens, number + 1, prefix.draft)
            if self._keep(keys[number], pages[number], prefix.draft, following) and self.log and not prefix.is_salted:
                page = tokens[number * self._page_tokens : (number + 1) * self._page_tokens]
                self.log.stored(keys[number], keys[number - 1] if number else b"", page)
        prefix.num_kept = num_pages

    def _following(self, tokens: NDArray[np.int32], num_pages: int, draft: DraftKV) -> bytes:
        """Returns the tokens after the first `num_pages` pages that a draft's entries in them depend on."""
        end = num_pages * self._page_tokens
        return tokens[end : end + draft.tokens_ahead].tobytes()

    def _keep(self, key: bytes, page: int, draft: DraftKV, following: bytes) -> bool:
        """A page that the cache has under this key stays, unless it serves this draft less well.

        Returns whether there was none under this key.
        """
        if page in self._keys:
            return False
        has_draft = draft.attachment > 0 and draft.is_paged
        entry = _Entry(page, draft.attachment if has_draft else 0, following)
        before = self._entries.get(key)
        if before is not None:
            if not has_draft or before.serves(draft, following):
                return False
            del self._entries[self._keys.pop(before.page)]
            if before.page in self._unused:
                del self._unused[before.page]
                self._free.append(before.page)
        self._entries[key], self._keys[page] = entry, key
        return before is None

    def drop(self, pages: abc.Sequence[int]) -> None:
        """Takes pages that are in use out of the cache, as their content is not to be trusted."""
        for page in pages:
            if page in self._keys:
                self._forget(page)

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page)
        del self._entries[key]
        if self.log is not None:
            self.log.removed(key)


_KEPT_SHARE = 32
"""The watermark: one page in so many is kept for the sequences that run."""
STEPS_AHEAD = 32
"""Steps that a sequence gets pages for at a time, while more than the kept ones are free."""
_LOW_STEPS = 16
"""When one sequence needs pages, those that have pages for fewer steps than this get some, too: not every step then has
updates."""
_WHOLE = 1 << 62


class PageLists:
    """Belongs to the loop's thread. Lengths are those of outputs."""

    def __init__(self, sizes: BatchSizes, pages: PrefixCache) -> None:
        self._sizes = sizes
        self._pages = pages
        self._num_kept = -(-pages.num_pages // _KEPT_SHARE)
        self._room: NDArray[np.int64] = np.full(sizes.num_slots, _WHOLE)
        """[slots]: output tokens that a slot's pages have room for; _WHOLE if they are all that it can need."""
        self._most: NDArray[np.int64] = np.zeros(sizes.num_slots, np.int64)
        """[slots]: output tokens at most."""
        self._unsent: dict[Sequence, int] = {}
        """Sequences that the workers are to be told of with the next step, and the index of the first new page."""

    def fits(self, sequence: Sequence, *, is_alone: bool) -> bool:
        """True if the pages to prefill a sequence are free, beside the kept ones unless no other sequence runs."""
        num_kept = 0 if is_alone else self._num_kept
        return self._pages.num_free - self._num_to_prefill(sequence) >= num_kept

    def begin(self, sequence: Sequence) -> None:
        """Gives a sequence that has got a slot the pages to prefill it. They must be free."""
        self._most[sequence.lease.slot] = sequence.spec.max_new_tokens
        self._extend(sequence, self._num_to_prefill(sequence))

    def end(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence back."""
        self._unsent.pop(sequence, None)
        self._pages.release(sequence.pages)
        sequence.pages = []

    def num_steps(self, rows: Ints, lengths: Counts) -> Ints:
        """How many more steps the pages of some slots last. `lengths`: the most after all steps under way."""
        # A step writes from the place of the last token on: as many as it brings, of which the last one is not written.
        num_steps: Ints = (self._room[rows] - lengths + 1) // self._sizes.most_step_tokens
        return num_steps

    def short(self, rows: Ints, lengths: Counts) -> tuple[Ints, Counts]:
        """The slots that are to get pages now, and their lengths."""
        is_short = self.num_steps(rows, lengths) < (_LOW_STEPS if self._pages.num_free > self._num_kept else 1)
        return rows[is_short], lengths[is_short]

    def grow_together(self, rows: Ints, lengths: Counts, sequences: Mapping[int, Sequence]) -> bool:
        """Gives short slots pages for STEPS_AHEAD steps; returns False, and gives none, if too few are free.

        `sequences`: by slot.
        """
        room, most, page_tokens = self._room[rows], self._most[rows], self._sizes.page_tokens
        ahead = np.minimum(lengths + (STEPS_AHEAD * self._sizes.most_step_tokens - 1), most)
        num_more = -((room - ahead) // page_tokens)
        total = int(num_more.sum())
        if self._pages.num_free - total < self._num_kept:
            return False
        room += num_more * page_tokens
        room[room >= most] = _WHOLE
        self._room[rows] = room
        pages, end = self._pages.allocate(total), 0
        for slot, count in zip(rows.tolist(), num_more.tolist(), strict=True):
            sequence, begin, end = sequences[slot], end, end + count
            self._unsent.setdefault(sequence, len(sequence.pages))
            sequence.pages += pages[begin:end]
        return True

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Gives a sequence pages for its next steps. Returns False if too few are free for the first of them."""
        num_pages, num_free = len(sequence.pages), self._pages.num_free
        num_more = self._num_for(sequence, length, STEPS_AHEAD) - num_pages
        if num_free - num_more < self._num_kept:
            num_more = max(0, self._num_for(sequence, length, 1) - num_pages)
        if num_more > num_free:
            return False
        if num_more:
            self._unsent.setdefault(sequence, num_pages)
            self._extend(sequence, num_more)
        return True

    def resend(self, sequence: Sequence) -> None:
        """Has the workers told anew what `Sequence.page_update` says, whether or not it has got pages."""
        self._unsent.setdefault(sequence, len(sequence.pages))

    def take_updates(self) -> tuple[SlotUpdate, ...]:
        """Returns the new pages since the last call, for the workers."""
        if not self._unsent:
            return ()
        unsent, self._unsent = self._unsent, {}
        return tuple(sequence.page_update(first) for sequence, first in unsent.items())

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        sequence.pages.extend(self._pages.allocate(num_pages))
        room = len(sequence.pages) * self._sizes.page_tokens
        is_whole = room >= sequence.num_tokens_at_most
        self._room[sequence.lease.slot] = _WHOLE if is_whole else room - len(sequence.spec.prompt)

    def _num_to_prefill(self, sequence: Sequence) -> int:
        most = self._sizes.pages_of(sequence.num_tokens_at_most)
        return min(self._sizes.pages_for(len(sequence.tokens)), most)

    def _num_for(self, sequence: Sequence, length: int, num_steps: int) -> int:
        # Positions at the limit and after it have no pages.
        most = length + num_steps * self._sizes.most_step_tokens - 1
        return self._sizes.pages_of(len(sequence.spec.prompt) + min(most, sequence.spec.max_new_tokens))
