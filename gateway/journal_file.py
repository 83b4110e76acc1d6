"""The journal's file: an SQLite database of jobs, and of the output that the running ones got step by step."""

from __future__ import annotations

import enum
import logging
import os
import sqlite3
import stat
from collections import deque
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError, FailedPreconditionError
from slipstream.gateway.journal_repair import (
    APPLICATION_ID,
    CREATE_TABLES,
    HEADER_BYTES,
    MIGRATE_FROM_1,
    VERSION,
    Damage,
    checksum,
    commits_in_log,
    find_damage,
    has_our_id,
    is_damage,
    keep,
    kept_path,
    log_path,
    rebuild,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

_COLLECT_EVERY = 64
"""Commits between two looks for rows that no job needs."""
_MOST_COLLECTED = 256
"""Rows deleted at once: a few hundred microseconds, in which no other commit is made."""
ROOM_BYTES = 2**20
"""Free bytes from which on a disk that was full takes jobs again."""
_WAL_BYTES = 16 * 2**20

_INSERT_STEPS = "INSERT INTO steps VALUES (?, ?, ?)"


class JournalMode(enum.StrEnum):
    """The strongest failure that jobs survive."""

    OFF = "off"
    """Nothing: jobs are in memory only."""
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
    """The output of a job so far; rows of steps from `since` on are added to it, unless it has ended."""

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
    """Rows of the steps from this one on are added to `output`."""
    ended_ns: int | None
    output: bytes | None
    """None if there was none."""


class JournalFile:
    """The file, used by one thread at a time. The caller gives it opaque bytes, and gets them back.

    The output of a step is one row for all jobs together. When a job ends, its whole output is saved with it; rows that
    only jobs of this kind have a part in are deleted. A job that goes on for long is saved in between: see
    `jobs_to_save`.
    """

    def __init__(
        self, path: Path, database: sqlite3.Connection, last_number: LastNumber, damage: Damage, *, max_log_bytes: int
    ) -> None:
        """Use `open`."""
        self.damage = damage
        """What was found lost when it was opened."""
        self._last_number = last_number
        self._database = database
        self._directory = path.parent
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
        """Opens the file, or makes it, for only this process and user.

        What is damaged in it is lost, which `damage` and the log say; the damaged file is kept. Raises ConfigError if
        it cannot be had, FailedPreconditionError if it is no journal, or one of a later version.
        """
        # Not later: as any descriptor of the file is closed, SQLite's lock of it is gone.
        handle = _make(path)
        header = os.pread(handle, HEADER_BYTES, 0)
        os.close(handle)
        with ExitStack() as held:
            last_number = held.enter_context(closing(LastNumber(path.with_name(f"{path.name}.last"))))
            is_ours = last_number.value > 0 or has_our_id(header)
            try:
                database, damage = _opened(held, path, mode, header, is_ours=is_ours)
                file = cls(path, database, last_number, damage, max_log_bytes=max_log_bytes)
                file._find_out(path)
                _tidy(database)
            except sqlite3.Error as error:
                raise _explained(error, path) from error
            held.pop_all()
        return file

    def jobs(self) -> Iterator[StoredJob]:
        """Yields every job, the earliest first."""
        query = "SELECT number, record, since, ended_ns, output FROM jobs JOIN outputs USING (number) ORDER BY number"
        for row in self._database.execute(query):
            yield StoredJob(*row)

    def rows(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yields for each step its number and the rows that were committed with it, in order."""
        for number, joined in self._database.execute("SELECT number, rows FROM steps ORDER BY number"):
            yield number, _split(joined)

    @property
    def last_number(self) -> int:
        """Number of the last job that was ever accepted; 0 if there was none."""
        return self._last_number.value

    @property
    def num_changes(self) -> int:
        """Rows that were ever written or deleted."""
        return self._database.total_changes

    def commit(self, changes: Sequence[Change], rows: Sequence[bytes]) -> int:
        """Commits all of it or nothing. Returns the number of the step. Raises sqlite3.Error."""
        step, database = self.next_step, self._database
        last_number = max((self.last_number, *(one.number for one in changes if isinstance(one, Accepted))))
        # Each statement gives the interpreter away and waits for it again: in most steps there is only one.
        if changes:
            database.execute("BEGIN")
        try:
            for change in changes:
                self._make_change(change, step, last_number)
            if rows:
                joined = _join(rows)
                database.execute(_INSERT_STEPS, (step, joined, checksum(step, joined)))
            if changes:
                database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        self._note(changes, step)
        if last_number > self.last_number:
            self._last_number.set(last_number)
        if rows:
            self._log.append((step, len(joined)))
            self._log_bytes += len(joined)
        self.next_step = step + 1
        return step

    def has_room(self) -> bool:
        """Returns whether the disk takes `ROOM_BYTES`. Called on any thread."""
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
        """Returns the jobs that must be saved, because the rows kept for their sake take too much room."""
        if self._log_bytes <= self._max_log_bytes:
            return []
        middle = self._log[len(self._log) // 2][0]
        return [number for number, since in self._live.items() if since <= middle]

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
        self._last_number.close()

    def _make_change(self, change: Change, step: int, last_number: int) -> None:
        execute, number = self._database.execute, change.number
        match change:
            case Accepted():
                execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", _with_checksum(number, change.record))
                output = _with_checksum(number, step, None, change.output)
                execute("INSERT OR IGNORE INTO outputs VALUES (?, ?, ?, ?, ?)", output)
            case Saved():
                _, *values = _with_checksum(number, change.since, change.ended_ns, change.output)
                query = "UPDATE outputs SET since = ?, ended_ns = ?, output = ?, checksum = ? WHERE number = ?"
                execute(query, (*values, number))
            case Forgotten():
                execute("DELETE FROM jobs WHERE number = ?", (number,))
                execute("DELETE FROM outputs WHERE number = ?", (number,))
                if number == last_number:
                    self._keep_last_number(number)

    def _keep_last_number(self, number: int) -> None:
        self._database.execute("DELETE FROM last_jobs")
        self._database.execute("INSERT INTO last_jobs VALUES (?, ?)", _with_checksum(number))

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

    def _find_out(self, path: Path) -> None:
        execute = self._database.execute
        query = "SELECT max(ifnull((SELECT max(number) FROM jobs), 0), ifnull((SELECT max(number) FROM last_jobs), 0))"
        (last_number,) = execute(query).fetchone()
        if self.last_number > last_number:
            logger.error(
                "the journal %s ended with %s: jobs after it are lost, the last of them was %s",
                *(path, _said(last_number), _said(self.last_number)),
            )
            self.damage = replace(self.damage, lacks_output=True)
            self._keep_last_number(self.last_number)
        self._last_number.set(max(self.last_number, last_number))
        self._live = dict(execute("SELECT number, since FROM outputs WHERE ended_ns IS NULL").fetchall())
        self._log = deque(execute("SELECT number, length(rows) FROM steps ORDER BY number").fetchall())
        self._log_bytes = sum(size for _, size in self._log)
        (last,) = execute("SELECT max((SELECT ifnull(max(number), 0) FROM steps), ifnull(max(since), 0)) FROM outputs")
        self.next_step = last[0] + 1


def _make(path: Path) -> int:
    """Makes the file if it is not there, or checks that it is this user's; no other user may read it. Opens it."""
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
    except BaseException:
        os.close(handle)
        raise
    return handle


class LastNumber:
    """The number of the last job, in a file of its own: without it, the loss of the newest jobs would not show.

    It is at most as large as the journal's own. What cannot be read, or written, does not count.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._file = os.fdopen(_make(path), "r+b", buffering=0)
        number, _, found = self._file.read(64).strip().partition(b" ")
        is_whole = number.isdigit() and found.isdigit() and int(found) == checksum(int(number))
        self.value = int(number) if is_whole else 0

    def set(self, number: int) -> None:
        """Writes it."""
        with suppress(OSError):
            os.pwrite(self._file.fileno(), b"%020d %010d\n" % (number, checksum(number)), 0)
        self.value = number

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _opened(
    held: ExitStack, path: Path, mode: JournalMode, header: bytes, *, is_ours: bool
) -> tuple[sqlite3.Connection, Damage]:
    """Opens the database; makes it whole first if it is damaged. Raises sqlite3.Error and the errors of `open`.

    `held` closes what is opened. `is_ours`: it was a journal, though it may not look as one any more.
    """
    # SQLite deletes the log of a file that is empty.
    log = log_path(path).read_bytes() if log_path(path).exists() else b""
    database, damage = held.enter_context(closing(_connected(path))), Damage()
    try:
        _set_up(database, mode)
        _, num_frames, _ = database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        # A single one may have been written in part when the process died, before anyone was told of it.
        num_lost = sum(commit > num_frames for commit in commits_in_log(log))
        if num_lost > 1:
            keep(log_path(path), log)
            said = "the journal %s is damaged: its last %d commits cannot be read, and are lost; its log is kept as %s"
            logger.error(said, path, num_lost, kept_path(log_path(path)))
            damage = Damage("a damaged log", lacks_output=True)
        _prepare(database, path)
        reason = find_damage(database, header)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if not (is_ours and is_damage(error)):
            raise
        reason = str(error)
    if not reason:
        return database, damage
    found = rebuild(path, database, reason)
    said = "the journal %s is damaged (%s): what is whole is used, the file is kept as %s"
    logger.error(said, path, reason, kept_path(path))
    database = held.enter_context(closing(_connected(path)))
    _set_up(database, mode)
    return database, replace(found, lacks_output=found.lacks_output or damage.lacks_output)


def _connected(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
    database.text_factory = bytes
    return database


def _set_up(database: sqlite3.Connection, mode: JournalMode) -> None:
    # Exclusive from the first access on; the log's index is then in memory, and another gateway is refused.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL").fetchall()
    database.execute(f"PRAGMA synchronous = {'FULL' if mode is JournalMode.POWER else 'OFF'}")
    database.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}").fetchall()


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    """Makes the tables, or those of this version of older ones."""
    version, application, num_tables = (
        database.execute(query).fetchone()[0]
        for query in ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_schema")
    )
    if num_tables == 0:
        database.executescript(CREATE_TABLES)
        return
    if application != APPLICATION_ID:
        raise ConfigError("journal", str(path), "a journal of jobs; this is another SQLite database")
    if version == 1:
        database.create_function("checksum_of", -1, checksum, deterministic=True)
        database.executescript(MIGRATE_FROM_1)
    elif version != VERSION:
        raise FailedPreconditionError(
            f"the journal {path} was written by another version of Slipstream (format {version}, this one reads"
            f" {VERSION}): start that version, or move the file away to go on without its jobs"
        )


def _tidy(database: sqlite3.Connection) -> None:
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


def _with_checksum(*values: bytes | int | None) -> tuple[bytes | int | None, ...]:
    return (*values, checksum(*values))


def _said(number: int) -> str:
    """Returns a job's number for people: it is the time of its creation in microseconds."""
    if not number:
        return "no job"
    return f"the job of {datetime.fromtimestamp(number / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _join(rows: Iterable[bytes]) -> bytes:
    return b"".join(part for item in rows for part in (len(item).to_bytes(4, "little"), item))


def _split(joined: bytes) -> list[bytes]:
    rows, position = [], 0
    while position < len(joined):
        end = position + 4 + int.from_bytes(joined[position : position + 4], "little")
        rows.append(joined[position + 4 : end])
        position = end
    return rows
