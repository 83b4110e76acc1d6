"""The prefix cache: full KV pages that sequences which begin with the same tokens share.

A page is found by its key, a chained hash of a salt and all tokens up to the page's end. Pages are counted by their
references. One without a reference stays in the cache until its memory is needed, the least recently used first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from slipstream.scheduler.records import DraftKV, Prefix

PADDING_PAGE = 0


class _Entry(NamedTuple):
    """A page in the cache."""

    page: int
    attachment: int
    """The draft whose keys and values it has; 0 for none."""
    following: bytes
    """For a head: the tokens behind the page that its content depends on."""

    def serves(self, draft: DraftKV, following: bytes) -> bool:
        """True if a sequence may use the page that has `following` behind it, while `draft` drafts."""
        if not draft.attachment:
            return True
        return draft.is_paged and self.attachment == draft.attachment and self.following == following


class PrefixCache:
    """Hands out the KV pages of draft and verify alike, and keeps their content. Belongs to the loop's thread."""

    def __init__(self, num_pages: int, page_tokens: int, *, is_enabled: bool = True) -> None:
        """`num_pages`: page 0 included. If it is not enabled, it finds and keeps nothing."""
        self.is_enabled = is_enabled
        self._page_tokens = page_tokens
        self._pages = PageAllocator(num_pages)
        self._references: dict[int, int] = {}
        """By page; none for those in `_unused`."""
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[int, bytes] = {}
        """By page, of those in the cache."""
        self._unused: dict[int, None] = {}
        """Pages in the cache without a reference, the least recently used first."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken: those without content, and those in the cache without a reference."""
        return self._pages.num_free + len(self._unused)

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
        while self._pages.num_free < count:
            page = next(iter(self._unused))
            del self._unused[page]
            self._forget(page)
            self._pages.release((page,))
        taken = self._pages.allocate(count)
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def release(self, pages: Sequence[int]) -> None:
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
                self._pages.release((page,))

    def begin(
        self, prefix: Prefix, tokens: NDArray[np.int32], num_tokens: int, draft: DraftKV, filling: Container[bytes]
    ) -> list[int] | None:
        """Takes references to the pages that a sequence can begin with, and returns them.

        None if the next page is among those that other sequences are `filling`: a step later it may be there. `tokens`:
        the sequence's, of which the first `num_tokens` are to be taken in; `draft`: takes part.
        """
        # The last token is computed in any case: the first one of the output comes from it.
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

    def keep(self, prefix: Prefix, pages: Sequence[int], tokens: NDArray[np.int32], num_settled: int) -> None:
        """Puts the full pages of a sequence into the cache, as far as their content does not change any more.

        `pages`: the sequence's; `tokens`: at least `num_settled`, those whose content is settled, and what a draft
        reads behind them.
        """
        num_pages = num_settled // self._page_tokens
        if not self.is_enabled or num_pages <= prefix.num_kept:
            return
        keys = prefix.keys(tokens, num_pages)
        for number in range(prefix.num_kept, num_pages):
            following = self._following(tokens, number + 1, prefix.draft)
            self._keep(keys[number], pages[number], prefix.draft, following)
        prefix.num_kept = num_pages

    def _following(self, tokens: NDArray[np.int32], num_pages: int, draft: DraftKV) -> bytes:
        """The tokens behind the first `num_pages` pages that a draft's entries in them depend on."""
        end = num_pages * self._page_tokens
        return tokens[end : end + draft.tokens_ahead].tobytes()

    def _keep(self, key: bytes, page: int, draft: DraftKV, following: bytes) -> None:
        """A page that the cache has under this key stays, unless it serves this draft less well."""
        if page in self._keys:
            return
        has_draft = draft.attachment > 0 and draft.is_paged
        entry = _Entry(page, draft.attachment if has_draft else 0, following)
        before = self._entries.get(key)
        if before is not None:
            if not has_draft or before.serves(draft, following):
                return
            self._forget(before.page)
            if before.page in self._unused:
                del self._unused[before.page]
                self._pages.release((before.page,))
        self._entries[key], self._keys[page] = entry, key

    def drop(self, pages: Sequence[int]) -> None:
        """Takes pages that are in use out of the cache, as their content is not to be trusted."""
        for page in pages:
            if page in self._keys:
                self._forget(page)

    def _forget(self, page: int) -> None:
        del self._entries[self._keys.pop(page)]


class PageAllocator:
    """Hands out page numbers 1 and up, for the KV pools of draft and verify alike; page 0 is padding, never read.

    A freed page may be handed out at once: stale work that still writes to it comes before its new
    owner's on the same stream, and only at positions that are written again before they are read.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: page 0 included."""
        self.num_pages = num_pages - 1
        """Pages in all."""
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` pages. Raises ResourceExhaustedError if there are fewer; then none is taken."""
        if count > len(self._free):
            raise ResourceExhaustedError(f"{count} KV pages wanted, {len(self._free)} free", retry_after_ms=100)
        pages = tuple(self._free[len(self._free) - count :][::-1])
        del self._free[len(self._free) - count :]
        self._taken.update(pages)
        return pages

    def release(self, pages: tuple[int, ...]) -> None:
        """Gives pages back."""
        for page in pages:
            assert page in self._taken, f"page {page} is given back but was not taken"
            self._taken.remove(page)
            self._free.append(page)
