"""The journal's file: an SQLite database of jobs, and of the output that the running ones got step by step."""

from __future__ import annotations

import enum
import os
import sqlite3
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError, FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

VERSION = 1
"""Version of the tables; a file with another one is refused."""
_APPLICATION_ID = 0x536C6A6C

_COLLECT_EVERY = 64
"""Commits between two looks for rows that no job needs."""
_MOST_COLLECTED = 256
"""Rows deleted at once: a few hundred microseconds, in which no other commit is made."""
ROOM_BYTES = 2**20
"""Free bytes from which on a disk that was full takes jobs again."""
_WAL_BYTES = 16 * 2**20

_TABLES = f"""
BEGIN;
CREATE TABLE jobs (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE outputs (number INTEGER PRIMARY KEY, since INTEGER NOT NULL, ended_ns INTEGER, output BLOB);
CREATE TABLE steps (number INTEGER PRIMARY KEY, rows BLOB NOT NULL);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""
_INSERT_STEPS = "INSERT INTO steps VALUES (?, ?)"


class JournalMode(enum.StrEnum):
    """The strongest failure that jobs survive."""

    OFF = "off"
    """Nothing: jobs are in memory alone."""
    PROCESS = "process"
    """The death of any process."""
    POWER = "power"
    """The loss of power as well: every commit waits for the disk."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job begins, or its record changes."""

    number: int
    record: bytes
    output: bytes | None = None
    """Output that it begins with."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The output of a job so far; rows of steps from `since` on come on top, unless it has ended."""

    number: int
    output: bytes
    since: int
    ended_ns: int | None
    """Nanoseconds since 1970; None while it goes on."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A job is kept no longer."""

    number: int


Change = Accepted | Saved | Forgotten


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as it is in the file."""

    number: int
    record: bytes
    since: int
    """Rows of the steps from this one on come on top of `output`."""
    ended_ns: int | None
    output: bytes | None
    """None if there was none."""


class JournalFile:
    """The file, used by one thread at a time. The caller gives it opaque bytes, and gets them back.

    The output of a step is one row for all jobs together. When a job ends, its whole output is saved with it; rows that
    only jobs of this kind have a part in are deleted. A job that goes on for long is saved in between: see
    `jobs_to_save`.
    """

    def __init__(self, database: sqlite3.Connection, *, max_log_bytes: int) -> None:
        """Use `open`."""
        self._database = database
        self._directory = Path(database.execute("PRAGMA database_list").fetchone()[2]).parent
        self._max_log_bytes = max_log_bytes
        self._log: deque[tuple[int, int]] = deque()
        """Number and size of each row of steps."""
        self._log_bytes = 0
        self._live: dict[int, int] = {}
        """For each job that goes on, the first step whose row it needs."""
        self._until_collection = _COLLECT_EVERY
        self.next_step = 1
        """The number of the next commit's row."""

    @classmethod
    def open(cls, path: Path, mode: JournalMode, *, max_log_bytes: int = 8 * 2**20) -> JournalFile:
        """Opens the file, or makes it, for this process and user alone.

        Raises ConfigError if it cannot be had, FailedPreconditionError if what is in it cannot be used.
        """
        _make(path)
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        try:
            _prepare(database, path, mode)
            file = cls(database, max_log_bytes=max_log_bytes)
            file._find_out()
        except sqlite3.Error as error:
            database.close()
            raise _explained(error, path) from error
        except BaseException:
            database.close()
            raise
        return file

    def jobs(self) -> Iterator[StoredJob]:
        """Every job, the earliest first."""
        query = "SELECT number, record, since, ended_ns, output FROM jobs JOIN outputs USING (number) ORDER BY number"
        for row in self._database.execute(query):
            yield StoredJob(*row)

    def rows(self) -> Iterator[tuple[int, list[bytes]]]:
        """For each step, its number and the rows that were committed with it, in order."""
        for number, joined in self._database.execute("SELECT number, rows FROM steps ORDER BY number"):
            yield number, _split(joined)

    def commit(self, changes: Sequence[Change], rows: Sequence[bytes]) -> int:
        """Commits all of it or nothing. Returns the number of the step. Raises sqlite3.Error."""
        step, database = self.next_step, self._database
        # Each statement gives the interpreter away and waits for it again: in most steps there is only one.
        if changes:
            database.execute("BEGIN")
        try:
            for change in changes:
                self._make_change(change, step)
            if rows:
                joined = _join(rows)
                database.execute(_INSERT_STEPS, (step, joined))
            if changes:
                database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        self._note(changes, step)
        if rows:
            self._log.append((step, len(joined)))
            self._log_bytes += len(joined)
        self.next_step = step + 1
        return step

    def has_room(self) -> bool:
        """True if the disk takes `ROOM_BYTES`. Called on any thread."""
        try:
            with TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
        except OSError:
            return False
        return True

    def collect(self) -> None:
        """Deletes rows that no job needs, now and then. Called after each commit. Raises sqlite3.Error."""
        self._until_collection -= 1
        if self._until_collection > 0:
            return
        self._until_collection = _COLLECT_EVERY
        least = min(self._live.values(), default=self.next_step)
        num_bytes = num_rows = 0
        for number, size in self._log:
            if number >= least or num_rows == _MOST_COLLECTED:
                break
            num_rows, num_bytes, last = num_rows + 1, num_bytes + size, number
        if num_rows:
            self._database.execute("DELETE FROM steps WHERE number <= ?", (last,))
            self._log_bytes -= num_bytes
            for _ in range(num_rows):
                self._log.popleft()

    def jobs_to_save(self) -> list[int]:
        """The jobs that must be saved, because the rows kept for their sake take too much room."""
        if self._log_bytes <= self._max_log_bytes:
            return []
        middle = self._log[len(self._log) // 2][0]
        return [number for number, since in self._live.items() if since <= middle]

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def _make_change(self, change: Change, step: int) -> None:
        execute = self._database.execute
        match change:
            case Accepted():
                upsert = "INSERT INTO jobs VALUES (?, ?) ON CONFLICT DO UPDATE SET record = excluded.record"
                execute(upsert, (change.number, change.record))
                execute("INSERT OR IGNORE INTO outputs VALUES (?, ?, NULL, ?)", (change.number, step, change.output))
            case Saved():
                query = "UPDATE outputs SET since = ?, ended_ns = ?, output = ? WHERE number = ?"
                execute(query, (change.since, change.ended_ns, change.output, change.number))
            case Forgotten():
                execute("DELETE FROM jobs WHERE number = ?", (change.number,))
                execute("DELETE FROM outputs WHERE number = ?", (change.number,))

    def _note(self, changes: Iterable[Change], step: int) -> None:
        for change in changes:
            match change:
                case Accepted():
                    # A new record does not begin a job again; that of one that has ended is not changed.
                    self._live.setdefault(change.number, step)
                case Saved() if change.ended_ns is None:
                    self._live[change.number] = change.since
                case _:
                    self._live.pop(change.number, None)

    def _find_out(self) -> None:
        execute = self._database.execute
        self._live = dict(execute("SELECT number, since FROM outputs WHERE ended_ns IS NULL").fetchall())
        self._log = deque(execute("SELECT number, length(rows) FROM steps ORDER BY number").fetchall())
        self._log_bytes = sum(size for _, size in self._log)
        (last,) = execute("SELECT max((SELECT ifnull(max(number), 0) FROM steps), ifnull(max(since), 0)) FROM outputs")
        self.next_step = last[0] + 1


def _make(path: Path) -> None:
    """Makes the file if it is not there, or checks that it is this user's; no other user may read it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        accepted = f"a file that this user may write, and no link ({error.strerror})"
        raise ConfigError("journal", str(path), accepted) from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError("journal", str(path), "a regular file of this user")
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


def _prepare(database: sqlite3.Connection, path: Path, mode: JournalMode) -> None:
    # Exclusive from the first access on; the log's index is then in memory, and another gateway is refused.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL").fetchall()
    database.execute(f"PRAGMA synchronous = {'FULL' if mode is JournalMode.POWER else 'OFF'}")
    database.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}").fetchall()
    version, application, num_tables = (
        database.execute(query).fetchone()[0]
        for query in ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_schema")
    )
    if num_tables == 0:
        database.executescript(_TABLES)
        return
    if application != _APPLICATION_ID:
        raise ConfigError("journal", str(path), "a journal of jobs; this is another SQLite database")
    if version != VERSION:
        raise FailedPreconditionError(
            f"the journal {path} was written by another version of Slipstream (format {version}, this one reads"
            f" {VERSION}): start that version, or move the file away to go on without its jobs"
        )
    (problem,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)
    free, pages = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count"))
    if free > pages // 2:
        database.execute("VACUUM")


def _explained(error: sqlite3.Error, path: Path) -> Exception:
    # The lower byte: the others tell kinds of input and output errors apart.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ConfigError("journal", str(path), "a file that no other gateway uses")
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        accepted = f"a file on a disk with {_WAL_BYTES // 2**20} MiB free, in a directory that this user may write"
        return ConfigError("journal", str(path), f"{accepted} ({error})")
    return FailedPreconditionError(
        f"the journal {path} cannot be read ({error}): move it and {path.name}-wal away to go on without its jobs"
    )


def _join(rows: Iterable[bytes]) -> bytes:
    return b"".join(part for item in rows for part in (len(item).to_bytes(4, "little"), item))


def _split(joined: bytes) -> list[bytes]:
    rows, position = [], 0
    while position < len(joined):
        end = position + 4 + int.from_bytes(joined[position : position + 4], "little")
        rows.append(joined[position + 4 : end])
        position = end
    return rows
