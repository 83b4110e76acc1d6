"""KV pages: one allocator of page numbers for the pools of draft and verify alike."""

from __future__ import annotations

from slipstream.common.errors import ResourceExhaustedError

PADDING_PAGE = 0


class PageAllocator:
    """Hands out page numbers 1 and up; page 0 takes the writes that nobody reads.

    A freed page may be handed out at once: stale work that still writes to it comes before its new
    owner's on the same stream, and only at positions that are written again before they are read.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: page 0 included."""
        self.num_pages = num_pages - 1
        """Pages that can be handed out."""
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` pages. Raises ResourceExhaustedError if there are fewer; then none is taken."""
        if count > len(self._free):
            raise ResourceExhaustedError(f"{count} KV pages wanted, {len(self._free)} free", retry_after_ms=100)
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def release(self, pages: tuple[int, ...]) -> None:
        """Gives pages back."""
        for page in pages:
            assert page in self._taken, f"page {page} is given back but was not taken"
            self._taken.remove(page)
            self._free.append(page)
