"""The journal: order, a killed process, a full disk, files that cannot be used, and its size."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sqlite3
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from slipstream.common.errors import (
    ConfigError,
    FailedPreconditionError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.gateway.journal import Journal
from slipstream.gateway.journal_file import ROOM_BYTES, VERSION, Accepted, Forgotten, JournalFile, JournalMode, Saved
from tests.harness import journal_writer
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

KILLS = 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a journal that is not there yet."""
    return tmp_path / "journal.sqlite3"


def never(*_: object) -> None:
    """A callback that is not expected."""
    pytest.fail("called without a reason")


@asynccontextmanager
async def journal_on(
    file: JournalFile | None,
    *,
    on_failure: Callable[[SlipstreamError], None] = never,
    on_writable: Callable[[bool], None] = never,
    save: Callable[[Sequence[int]], None] = never,
) -> AsyncIterator[Journal]:
    """A journal that is closed at the end."""
    journal = Journal(file, on_failure=on_failure, on_writable=on_writable, save=save)
    try:
        yield journal
    finally:
        await journal.close()


def rows_of(file: JournalFile) -> list[bytes]:
    """All rows of steps in order."""
    return [row for _, rows in file.rows() for row in rows]


@pytest.mark.parametrize("mode", [JournalMode.PROCESS, JournalMode.POWER])
async def test_committed_changes_are_read_back(path: Path, mode: JournalMode) -> None:
    said: list[str] = []
    async with journal_on(JournalFile.open(path, mode)) as journal:
        journal.accepted(1, b"one")
        journal.after(lambda: said.append("accepted"))
        journal.outputs(b"a", lambda: said.append("a"))
        journal.outputs(b"", lambda: said.append("empty"))
        journal.accepted(2, b"two")
        assert said == [], "a callback came before the commit"
        await journal.flush()
        assert said == ["accepted", "a", "empty"]
        journal.outputs(b"b")
        await journal.flush()
        journal.saved(2, b"output of two", ended_ns=17)
        journal.accepted(1, b"one, changed")
    file = JournalFile.open(path, mode)
    one, two = file.jobs()
    assert (one.record, one.output, one.ended_ns) == (b"one, changed", None, None)
    assert (two.record, two.output, two.ended_ns) == (b"two", b"output of two", 17)
    assert rows_of(file) == [b"a", b"", b"b"]
    assert all(number >= one.since for number, _ in file.rows())
    file.close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_output_saved_between_steps_says_which_rows_come_on_top(path: Path) -> None:
    async with journal_on(JournalFile.open(path, JournalMode.PROCESS)) as journal:
        journal.accepted(1, b"")
        for row in (b"a", b"b"):
            journal.outputs(row)
            await journal.flush()
        journal.after(lambda: None)
        await journal.flush()
        journal.saved(1, b"ab")
        for row in (b"c", b"d"):
            journal.outputs(row)
            await journal.flush()
    file = JournalFile.open(path, JournalMode.PROCESS)
    (job,) = file.jobs()
    assert job.output == b"ab"
    assert [row for number, rows in file.rows() for row in rows if number >= job.since] == [b"c", b"d"]
    file.close()


async def test_without_a_file_callbacks_come_at_once() -> None:
    said: list[int] = []
    async with journal_on(None) as journal:
        journal.after(lambda: said.append(1))
        journal.outputs(b"", lambda: said.append(2))
        assert said == [1, 2]
        await journal.flush()


@pytest.mark.parametrize("mode", [JournalMode.PROCESS, JournalMode.POWER])
def test_a_killed_writer_loses_nothing_that_it_told(path: Path, mode: JournalMode) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    in_file = 0
    for _ in range(KILLS // 2):
        command = [sys.executable, journal_writer.__file__, str(path), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None, "a pipe was asked for"
            for _ in range(rng.randrange(1, 300)):
                writer.stdout.readline()
            writer.kill()
            told = writer.stdout.read().split("\n")
        # The last line may be cut off.
        last_told = max([in_file, *(int(number) for number in told[:-1])])
        file = JournalFile.open(path, mode)
        numbers = [int.from_bytes(row, "big") for row in rows_of(file)]
        assert numbers == list(range(1, len(numbers) + 1)), "a gap, a repetition or another order"
        assert len(numbers) >= last_told
        in_file = len(numbers)
        first, *short = file.jobs()
        assert first.ended_ns is None
        assert [job.number for job in short] == list(range(2, len(short) + 2))
        assert len(short) >= last_told // journal_writer.SHORT_JOBS_EVERY
        file.close()


def test_the_file_stays_small_under_short_jobs_and_a_long_one(path: Path) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS, max_log_bytes=2**18)
    kept, long_job, sizes = 100, 1, []
    file.commit([Accepted(long_job, b"long")], [])
    for number in range(2, 10_002):
        changes: list[Accepted | Saved | Forgotten] = [Accepted(number, bytes(200))]
        if number > 2:
            changes.append(Saved(number - 1, bytes(300), file.next_step, 1))
        if number > kept + 2:
            changes.append(Forgotten(number - kept - 1))
        step = file.commit(changes, [bytes(500)])
        for job in file.jobs_to_save():
            assert job == long_job
            file.commit([Saved(job, bytes(1000), step + 1, None)], [])
        file.collect()
        sizes.append(path.stat().st_size)
    assert len(list(file.jobs())) == kept + 2
    assert sum(len(row) for row in rows_of(file)) < 2**19
    file.close()
    # 10,000 jobs and steps without an end would take 10 MB.
    assert max(sizes[5000:]) == sizes[-1] < 2**20, "it still grows"
    assert path.stat().st_size < 2**20


def test_space_without_jobs_is_given_back_at_the_next_start(path: Path) -> None:
    sizes = []
    for changes in ([Accepted(number, bytes(10**5)) for number in range(20)], [Forgotten(n) for n in range(19)], []):
        file = JournalFile.open(path, JournalMode.PROCESS)
        file.commit(changes, [])
        file.close()
        sizes.append(path.stat().st_size)
    assert sizes[1] == sizes[0] > 10 * sizes[2]


async def test_a_long_job_is_saved_on_request(path: Path) -> None:
    asked: list[Sequence[int]] = []

    def save(jobs: Sequence[int]) -> None:
        asked.append(jobs)
        for job in jobs:
            journal.saved(job, b"%d" % len(done))

    done: list[int] = []
    file = JournalFile.open(path, JournalMode.PROCESS, max_log_bytes=10_000)
    async with journal_on(file, save=save) as journal:
        journal.accepted(1, b"")
        for number in range(1000):
            journal.outputs(bytes(100), lambda number=number: done.append(number))
            await journal.flush()
    assert asked
    assert all(jobs == [1] for jobs in asked)
    file = JournalFile.open(path, JournalMode.PROCESS)
    (job,) = file.jobs()
    assert job.output is not None
    on_top = sum(len(rows) for number, rows in file.rows() if number >= job.since)
    assert int(job.output) + on_top == 1000
    assert len(rows_of(file)) < 500
    file.close()


async def test_a_full_disk_ends_the_jobs_and_not_the_journal(path: Path) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS)
    (pages,) = file._database.execute("PRAGMA page_count").fetchone()
    file._database.execute(f"PRAGMA max_page_count = {pages + 8}").fetchall()
    failures: list[SlipstreamError] = []
    told: list[bytes] = []
    async with journal_on(file, on_failure=failures.append, on_writable=lambda _: None) as journal:
        journal.accepted(1, b"record")
        for _ in range(8):
            journal.outputs(row := os.urandom(5000), lambda row=row: told.append(row))
        with pytest.raises(ResourceExhaustedError, match="the disk that the journal of jobs is on is full"):
            await journal.flush()
        assert len(failures) == 1
        # There is room again.
        file._database.execute("PRAGMA max_page_count = 100000").fetchall()
        journal.outputs(b"more", lambda: told.append(b"more"))
        await journal.flush()
    file = JournalFile.open(path, JournalMode.PROCESS)
    assert rows_of(file) == told
    assert told[-1] == b"more"
    file.close()


async def test_it_says_that_it_cannot_be_written_until_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room, told = False, list[bool]()
    monkeypatch.setattr("slipstream.gateway.journal.LOOK_FOR_ROOM_S", 0.01)
    monkeypatch.setattr(JournalFile, "has_room", lambda _: has_room)
    file = JournalFile.open(path, JournalMode.PROCESS)

    async def fails(journal: Journal) -> None:
        file._database.execute("PRAGMA query_only = ON")
        for _ in range(2):
            journal.outputs(b"lost")
            with pytest.raises(UnavailableError):
                await journal.flush()
        file._database.execute("PRAGMA query_only = OFF")

    async with journal_on(file, on_failure=lambda _: None, on_writable=told.append) as journal:
        await fails(journal)
        await asyncio.sleep(0.05)
        assert told == [False]
        has_room = True
        await until(lambda: told == [False, True])
        has_room = False
        await fails(journal)
        journal.outputs(b"kept")
        await journal.flush()
        assert told == [False, True, False, True]


def test_room_is_looked_for_where_the_file_is(path: Path) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS)
    assert file.has_room()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES - 1, limits[1]))
    try:
        assert not file.has_room()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()


async def test_output_given_before_the_failure_is_known_is_not_kept(path: Path) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS)
    failures: list[SlipstreamError] = []
    async with journal_on(file, on_failure=failures.append, on_writable=lambda _: None) as journal:
        journal.outputs(b"first")
        await journal.flush()
        file._database.execute("PRAGMA query_only = ON")
        journal.outputs(b"lost")
        while not journal._has_failed:
            # The event loop is kept busy: it does not know yet.
            os.sched_yield()
        file._database.execute("PRAGMA query_only = OFF")
        journal.outputs(b"would leave a gap")
        with pytest.raises(UnavailableError, match="cannot be written"):
            await journal.flush()
        journal.outputs(b"of another job")
        await journal.flush()
    assert len(failures) == 1
    file = JournalFile.open(path, JournalMode.PROCESS)
    assert rows_of(file) == [b"first", b"of another job"]
    file.close()


def test_a_damaged_file_is_named(path: Path) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS)
    for number in range(1, 200):
        file.commit([Accepted(number, os.urandom(2000))], [])
    file.close()
    whole = path.read_bytes()
    for damaged in (b"no database at all" * 100, whole[: len(whole) // 2], whole[:8192] + os.urandom(8192) * 4):
        path.write_bytes(damaged)
        with pytest.raises(FailedPreconditionError, match=r"move it and journal\.sqlite3-wal away") as raised:
            JournalFile.open(path, JournalMode.PROCESS)
        assert str(path) in str(raised.value)


def test_a_file_of_a_later_version_is_refused(path: Path) -> None:
    JournalFile.open(path, JournalMode.PROCESS).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    with pytest.raises(FailedPreconditionError, match=f"format {VERSION + 1}, this one reads {VERSION}"):
        JournalFile.open(path, JournalMode.PROCESS)


def test_another_database_is_not_touched(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    database.close()
    with pytest.raises(ConfigError, match="another SQLite database"):
        JournalFile.open(path, JournalMode.PROCESS)


def test_a_file_in_use_is_refused(path: Path) -> None:
    first = JournalFile.open(path, JournalMode.PROCESS)
    with pytest.raises(ConfigError, match="no other gateway uses"):
        JournalFile.open(path, JournalMode.PROCESS)
    first.close()
    JournalFile.open(path, JournalMode.PROCESS).close()


@pytest.mark.parametrize("num_bytes", [0, 4096])
def test_no_room_at_the_start_is_named(path: Path, num_bytes: int) -> None:
    """In a process that may write no larger file, as on a disk that is full."""
    code = (
        "import resource, sys; from pathlib import Path; from slipstream.gateway.journal_file import *\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))\n"
        f"try: JournalFile.open(Path({str(path)!r}), JournalMode.PROCESS)\n"
        "except ConfigError as error: sys.exit(str(error))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    accepted = "a file on a disk with 16 MiB free, in a directory that this user may write"
    assert found.stderr.startswith(f"journal: got '{path}', accepted: {accepted} (")
    assert found.stderr.count("\n") == 1


def test_a_link_or_a_missing_directory_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "link", tmp_path / "missing" / "journal.sqlite3", tmp_path):
        with pytest.raises(ConfigError, match="journal: got"):
            JournalFile.open(path, JournalMode.PROCESS)
    assert target.read_text() == "precious"
