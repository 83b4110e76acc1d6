"""Finds what is damaged in a journal's file, and makes a whole file of the rest.

Each row has a checksum of its values. SQLite checks the structure of the file, and leaves out what follows damage
in its write-ahead log without a word: the log's frames say where it ended before.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from slipstream.common.private_files import open_new

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = 2
"""Version of the tables; a file with a later one is refused."""
APPLICATION_ID = 0x536C6A6C
TABLES = {
    name: f"CREATE TABLE {name} (number INTEGER PRIMARY KEY, {columns}checksum INTEGER)"
    for name, columns in (
        ("jobs", "record BLOB NOT NULL, "),
        ("outputs", "since INTEGER NOT NULL, ended_ns INTEGER, output BLOB, "),
        ("steps", "rows BLOB NOT NULL, "),
        ("last_jobs", ""),
    )
}
"""How each table is made. `last_jobs` has the number of the last job, where that is no longer in `jobs`."""
CREATE_TABLES = f"""
BEGIN;
{"; ".join(TABLES.values())};
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""
MIGRATE_FROM_1 = f"""
BEGIN;
ALTER TABLE jobs ADD COLUMN checksum INTEGER;
ALTER TABLE outputs ADD COLUMN checksum INTEGER;
ALTER TABLE steps ADD COLUMN checksum INTEGER;
UPDATE jobs SET checksum = checksum_of(number, CAST(record AS BLOB));
UPDATE outputs SET checksum = checksum_of(number, since, ended_ns, CAST(output AS BLOB));
UPDATE steps SET checksum = checksum_of(number, CAST(rows AS BLOB));
{TABLES["last_jobs"]};
PRAGMA user_version = {VERSION};
COMMIT;
"""
HEADER_BYTES = 100
_PIECE_BYTES = 4096
"""zlib gives the interpreter away for a piece above 5 KiB, and waits for it again."""
_LOG_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_PAGE_BYTES = 4096
"""As SQLite makes them unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What a journal has lost."""

    reason: str = ""
    """For people; empty if it is whole."""
    jobs: tuple[tuple[int, bytes], ...] = ()
    """Jobs that are lost: their numbers and their records, which may be damaged."""
    lacks_output: bool = False
    """True if a job that goes on may have had more output than is left."""


def is_damage(error: Exception) -> bool:
    """Returns whether SQLite's error says that the file is damaged, and not that it cannot be had."""
    damage = sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in damage


def checksum(*values: bytes | int | None) -> int:
    """Returns the checksum of a row's values."""
    found = 0
    for value in values:
        view = memoryview(value if isinstance(value, bytes) else b"%r " % value)
        for start in range(0, len(view), _PIECE_BYTES):
            found = crc32(view[start : start + _PIECE_BYTES], found)
    return found


def has_our_id(header: bytes) -> bool:
    """Returns whether a file says that it is a journal, damaged or not."""
    return header[68:72] == APPLICATION_ID.to_bytes(4, "big")


def find_damage(database: sqlite3.Connection, header: bytes) -> str:
    """Returns what is wrong with a journal, for people; empty if it is whole. Raises sqlite3.DatabaseError.

    `header`: its first `HEADER_BYTES` before it was opened, empty if it was not there.
    """
    if header and header[18:20] != b"\2\2":
        return "its header says that nobody may write it"
    (problem,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if problem != b"ok":
        return str(problem, errors="replace")
    made = dict(database.execute("SELECT name, sql FROM sqlite_schema"))
    if made != {name.encode(): sql.encode() for name, sql in TABLES.items()}:
        return "its tables are not as they were made"
    for table in TABLES:
        for *values, found in database.execute(f"SELECT * FROM {table}"):
            if found != checksum(*values):
                return f"the checksum of row {values[0]} of {table} is wrong"
    halves = (
        "SELECT number FROM jobs {0} SELECT number FROM outputs",
        "SELECT number FROM outputs {0} SELECT number FROM jobs",
    )
    for query in halves:
        for (number,) in database.execute(query.format("EXCEPT")):
            return f"job {number} is there by half"
    return ""


def rebuild(path: Path, database: sqlite3.Connection, reason: str) -> Damage:
    """Makes a whole file of what is whole in a damaged one, closes that, and keeps it beside the new one.

    Output of steps is left out where any of it is damaged: what follows a gap is of no use.
    """
    found = {table: list(_read(database, table)) for table in TABLES}
    whole = {table: {values[0]: values for values, is_whole in rows if is_whole} for table, rows in found.items()}
    known, kept = whole["jobs"].keys() | whole["outputs"].keys(), whole["jobs"].keys() & whole["outputs"].keys()
    last_number = max(known | whole["last_jobs"].keys(), default=0)
    whole["last_jobs"] = {last_number: (last_number,)} if last_number else {}
    records = {values[0]: values[1] for values, _ in found["jobs"] if isinstance(values[1], bytes)}
    lost = sorted({values[0] for table in ("jobs", "outputs") for values, _ in found[table]} - kept)
    lacks_output = _is_torn(database) or len(whole["steps"]) < len(found["steps"])
    new_path = path.with_name(f"{path.name}.new")
    new_path.unlink(missing_ok=True)
    os.close(open_new(new_path))
    new = sqlite3.connect(new_path, isolation_level=None)
    try:
        new.executescript(CREATE_TABLES)
        new.execute("BEGIN")
        for table, rows in whole.items():
            if table == "steps" and lacks_output:
                continue
            for number, values in rows.items():
                if table not in ("jobs", "outputs") or number in kept:
                    places = ", ".join("?" * (len(values) + 1))
                    new.execute(f"INSERT INTO {table} VALUES ({places})", (*values, checksum(*values)))
        new.execute("COMMIT")
    finally:
        new.close()
    database.close()
    _keep(path, new_path)
    return Damage(reason, tuple((number, records.get(number, b"")) for number in lost), lacks_output)


def kept_path(path: Path) -> Path:
    """Where the damaged file is kept that was at `path`."""
    return path.with_name(f"{path.name}.damaged")


def log_path(path: Path) -> Path:
    """Path of the write-ahead log."""
    return path.with_name(f"{path.name}-wal")


def keep(path: Path, content: bytes) -> None:
    """Keeps a damaged file's content."""
    with os.fdopen(open_new(kept_path(path)), "wb") as file:
        file.write(content)


def _keep(path: Path, new_path: Path) -> None:
    kept_path(path).unlink(missing_ok=True)
    os.link(path, kept_path(path))
    if log_path(path).exists():
        log_path(path).replace(kept_path(log_path(path)))
    new_path.replace(path)


def _read(database: sqlite3.Connection, table: str) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yields the rows of a damaged file that can be read, with whether each is whole."""
    seen: set[int] = set()
    for order in ("ASC", "DESC"):
        try:
            query = f"SELECT rowid, * FROM {table} ORDER BY rowid {order}"
            for number, _, *values, found in database.execute(query):
                if number not in seen:
                    seen.add(number)
                    yield (number, *values), found == checksum(number, *values)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            continue  # from the other end up to here
        return


def _is_torn(database: sqlite3.Connection) -> bool:
    try:
        return bool(database.execute("PRAGMA quick_check(1)").fetchone()[0] != b"ok")
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return True


def commits_in_log(log: bytes) -> list[int]:
    """Returns the numbers of the frames that end a commit in a write-ahead log, whether SQLite can read them or not.

    Frames of a log before, which this one has not overwritten yet, have another salt.
    """
    header = log[:_LOG_HEADER_BYTES]
    is_whole = _log_checksum(header[:24]) == header[24:]
    page_bytes = int.from_bytes(header[8:12], "big") if is_whole else _PAGE_BYTES
    salt = header[16:24] if is_whole else log[_LOG_HEADER_BYTES + 8 : _LOG_HEADER_BYTES + 16]
    starts = range(_LOG_HEADER_BYTES, len(log) - _FRAME_HEADER_BYTES, _FRAME_HEADER_BYTES + page_bytes)
    frames = (log[start : start + _FRAME_HEADER_BYTES] for start in starts)
    return [number for number, frame in enumerate(frames, 1) if frame[8:16] == salt and any(frame[4:8])]


def _log_checksum(header: bytes) -> bytes:
    """Returns the checksum of the log's header, as SQLite makes it: over words in the order that its byte 3 says."""
    order = "big" if header[3:4] == b"\x83" else "little"
    first = second = 0
    for start in range(0, len(header), 8):
        first = (first + int.from_bytes(header[start : start + 4], order) + second) % 2**32  # type: ignore[arg-type]
        second = (second + int.from_bytes(header[start + 4 : start + 8], order) + first) % 2**32  # type: ignore[arg-type]
    return first.to_bytes(4, "big") + second.to_bytes(4, "big")
