"""The journal of jobs: what is in it survives the gateway's process."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import ResourceExhaustedError, SlipstreamError, UnavailableError
from slipstream.common.fail_points import failing_after, failing_before
from slipstream.gateway.journal_file import Accepted, Forgotten, Saved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.gateway.journal_file import Change, JournalFile

RETRY_AFTER_MS = 1000
"""For clients whose job failed because the disk is full."""

logger = logging.getLogger(__name__)


class Journal:
    """Writes what happens to jobs, in order, on a thread of its own. Its methods belong to the event loop.

    A commit covers everything that was given until it begins. After it, the event loop calls the `then` of each item,
    in order: until then no client may see what the item says. Without a file every `then` is called at once.
    """

    def __init__(
        self,
        file: JournalFile | None,
        *,
        on_failure: Callable[[SlipstreamError], None],
        save: Callable[[Sequence[int]], None],
    ) -> None:
        """Made on the event loop. `on_failure` and `save` are called there.

        `on_failure`: a commit failed, and all that was given until then is lost; it must end every job that goes on.
        `save` must call `saved` or `forget` for each of these jobs.
        """
        self._file = file
        self._on_failure = on_failure
        self._save = save
        self._loop = asyncio.get_running_loop()
        self._flushes: set[asyncio.Future[None]] = set()
        self._next_step = 1 if file is None else file.next_step
        """Number of the first step whose output the jobs in memory do not have yet."""
        self._changed = threading.Condition()
        self._pending: list[_Item] = []
        self._has_failed = False
        """From a failed commit until the event loop has ended its jobs."""
        self._is_closed = False
        self._is_saving = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if file is not None:
            self._write = failing_before("gateway.before_commit", failing_after("gateway.after_commit", file.commit))
            self._thread.start()

    def accepted(self, number: int, record: bytes, output: bytes | None = None) -> None:
        """A job begins, perhaps with output that it has already, or its record changes. Job numbers only grow."""
        self._put(_Item(Accepted(number, record, output)))

    def outputs(self, rows: bytes, then: Callable[[], None] | None = None) -> None:
        """Output of a step, for any number of jobs that were accepted before."""
        self._put(_Item(rows=rows, then=then))

    def saved(self, number: int, output: bytes, ended_ns: int | None = None) -> None:
        """The whole output of a job that has ended (in nanoseconds since 1970), or that goes on.

        Of a job that goes on: the output of every step whose `then` was called, and of none after it. Not called from a
        `then`, because others of the same commit may follow.
        """
        self._put(_Item(Saved(number, output, self._next_step, ended_ns)))

    def forget(self, number: int) -> None:
        """A job is kept no longer."""
        self._put(_Item(Forgotten(number)))

    def after(self, then: Callable[[], None]) -> None:
        """Calls `then` when everything given so far is committed."""
        self._put(_Item(then=then))

    async def flush(self) -> None:
        """Returns when everything given so far is committed. Raises the error that prevents it."""
        if self._file is None:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._flushes.add(future)
        self.after(lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            self._flushes.discard(future)

    async def close(self) -> None:
        """Commits everything given so far, and closes the file. What comes later is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._file is not None:
            await asyncio.to_thread(self._thread.join)

    def _put(self, item: _Item) -> None:
        if self._file is None:
            if item.then is not None:
                item.then()
            return
        with self._changed:
            self._pending.append(item)
            if len(self._pending) == 1:
                self._changed.notify()

    def _run(self) -> None:
        assert self._file is not None, "a journal without a file has no thread"
        while True:
            with self._changed:
                while (self._has_failed or not self._pending) and not self._is_closed:
                    self._changed.wait()
                items, self._pending = self._pending, []
                if self._has_failed or not items:
                    break
            self._commit(self._file, items)
        self._file.close()

    def _commit(self, file: JournalFile, items: list[_Item]) -> None:
        try:
            changes = [item.change for item in items if item.change is not None]
            rows = [item.rows for item in items if item.rows is not None]
            step = self._write(changes, rows) if changes or rows else file.next_step - 1
            self._call(self._commit_is_done, items, step, file.jobs_to_save())
            file.collect()
        except sqlite3.Error as error:
            with self._changed:
                self._has_failed = True
            self._call(self._fail, error)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop ended before the journal was closed.
            assert self._loop.is_closed(), "an event loop that runs takes calls"

    def _commit_is_done(self, items: list[_Item], step: int, to_save: list[int]) -> None:
        for item in items:
            if item.then is not None:
                item.then()
        self._next_step = step + 1
        if not to_save:
            self._is_saving = False
        elif not self._is_saving:
            # Until the log is short again, it is said once: a save that is under way would be repeated.
            self._is_saving = True
            self._save(to_save)

    def _fail(self, cause: sqlite3.Error) -> None:
        logger.error("the journal cannot be written: %s", cause)
        error = _error_for_clients(cause)
        # What came meanwhile is about jobs that end now, or lacks what came before.
        with self._changed:
            self._pending = []
            self._has_failed = False
            self._is_saving = False
        for future in self._flushes:
            if not future.done():
                future.set_exception(error)
        self._on_failure(error)


class _Item(NamedTuple):
    change: Change | None = None
    rows: bytes | None = None
    then: Callable[[], None] | None = None


def _error_for_clients(cause: sqlite3.Error) -> SlipstreamError:
    if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        message = "the disk that the journal of jobs is on is full"
        return ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
    return UnavailableError(f"the journal of jobs cannot be written: {cause}")
