"""The log of pages that enter and leave the prefix cache.

Routers watch it, to send a conversation to the server that has its beginning.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import ResourceExhaustedError
from slipstream.protos import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

MAX_UNREAD = 2**16
"""Changes that may wait for a watcher which does not read."""
MAX_IN_MESSAGE = 1024
"""Changes in a message: some hundred KiB."""
_KEY_BYTES = 8


class PageChange(NamedTuple):
    """A page that the cache got, or lost: then it has no tokens."""

    key: bytes
    parent: bytes = b""
    """The key of the page before; empty for the first of a prompt."""
    tokens: bytes = b""
    """The tokens of the page, 32 bits each."""

    def to_pb(self) -> scheduler_pb2.PageChange:
        key, parent = (int.from_bytes(one[:_KEY_BYTES], "little") for one in (self.key, self.parent))
        return scheduler_pb2.PageChange(key=key, parent=parent, token_ids=memoryview(self.tokens).cast("I"))


class PageLog:
    """The pages in the prefix cache of an epoch. Written on the loop's thread, watched on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[bytes, PageChange] = {}
        """By key; a page is after the one before it."""
        self._watches: list[PageWatch] = []

    def stored(self, key: bytes, parent: bytes, tokens: NDArray[np.int32]) -> None:
        """Called with a page that the cache did not have."""
        change = PageChange(key, parent, tokens.tobytes())
        with self._lock:
            self._pages[key] = change
            self._tell(change)

    def removed(self, key: bytes) -> None:
        """Called with a page that the cache has no more."""
        with self._lock:
            if self._pages.pop(key, None) is not None:
                self._tell(PageChange(key))

    @contextmanager
    def watching(self, wake: Callable[[], object]) -> Iterator[PageWatch]:
        """Yields a watch that begins with all pages; `wake` is called on the loop's thread when there is more."""
        with self._lock:
            watch = PageWatch(list(self._pages.values()), wake, self._lock)
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches.remove(watch)

    def _tell(self, change: PageChange) -> None:
        for watch in self._watches:
            watch.add(change)


class PageWatch:
    """The changes that one watcher has not read. Belongs to its log's lock."""

    def __init__(self, changes: list[PageChange], wake: Callable[[], object], lock: threading.Lock) -> None:
        self._changes = changes
        self._most = len(changes) + MAX_UNREAD
        self._wake = wake
        self._lock = lock

    def add(self, change: PageChange) -> None:
        """Called with the lock."""
        if len(self._changes) <= self._most:
            self._changes.append(change)
        if len(self._changes) == 1:
            self._wake()

    def take(self) -> list[PageChange]:
        """Returns the next changes, at most MAX_IN_MESSAGE. Raises ResourceExhaustedError if some are lost."""
        with self._lock:
            if len(self._changes) > self._most:
                raise ResourceExhaustedError(f"{MAX_UNREAD} changes of the prefix cache are unread", retry_after_ms=0)
            taken, self._changes = self._changes[:MAX_IN_MESSAGE], self._changes[MAX_IN_MESSAGE:]
        return taken
