"""The journal: order, a killed process, a full disk, files that cannot be used, and its size."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.common.errors import (
    ConfigError,
    FailedPreconditionError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.gateway.journal import Journal
from slipstream.gateway.journal_file import (
    ROOM_BYTES,
    Accepted,
    Forgotten,
    JournalFile,
    JournalMode,
    Saved,
    StoredJob,
)
from slipstream.gateway.journal_repair import VERSION, Damage, kept_path, log_path
from tests.harness import journal_writer
from tests.harness.generation_server import killed, make_version_1
from tests.harness.sampling import examples
from tests.harness.waiting import until

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
    for _ in range(examples(KILLS // 2)):
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


@dataclass
class Written:
    """What a journal has, and its files as a kill leaves them, or an orderly end."""

    jobs: list[StoredJob]
    rows: list[tuple[int, list[bytes]]]
    files: dict[str, bytes]
    """By suffix."""

    @classmethod
    def at(cls, path: Path, *, is_closed: bool) -> Written:
        """Writes 60 jobs, of which the last goes on, each with a step."""
        file, rng = JournalFile.open(path, JournalMode.PROCESS), random.Random(5)
        for number in range(1, 61):
            changes: list[Accepted | Saved] = [Accepted(number, rng.randbytes(300))]
            if number % 2:
                changes.append(Saved(number, rng.randbytes(500), file.next_step, 7))
            file.commit(changes, [rng.randbytes(200)])
        jobs, rows = list(file.jobs()), list(file.rows())
        suffixes = ("", ".last") if is_closed else ("", "-wal", ".last")
        if is_closed:
            file.close()
        files = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in suffixes}
        file.close()
        return cls(jobs, rows, files)

    def damaged_at(self, path: Path, suffix: str, content: bytes) -> JournalFile:
        """Opens the files at a path with another content of one of them."""
        for found in path.parent.glob(f"{path.name}*"):
            found.unlink()
        for name, whole in {**self.files, suffix: content}.items():
            Path(f"{path}{name}").write_bytes(whole)
        return JournalFile.open(path, JournalMode.PROCESS)


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_flipped_bit_costs_what_it_hits_and_is_said(path: Path, suffix: str) -> None:
    """In the database a job or the steps' output, or what can be reached only by a page; in the log all after it."""
    written = Written.at(path, is_closed=not suffix)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, num_lost = random.Random(seed), Counter[int]()
    # A file of another version, or of another program, is refused.
    names = () if suffix else (47, *range(60, 64), *range(68, 72))
    places = [place for place in range(len(written.files[suffix])) if place not in names]
    for _ in range(examples(150, sampled=60)):
        flipped = bytearray(written.files[suffix])
        flipped[rng.choice(places)] ^= 1 << rng.randrange(8)
        file = written.damaged_at(path, suffix, bytes(flipped))
        jobs, rows = list(file.jobs()), list(file.rows())
        assert all(job in written.jobs for job in jobs), "a job comes back as it never was"
        lost = [job.number for job in written.jobs if job not in jobs]
        num_lost[len(lost)] += 1
        assert file.damage.lacks_output or rows == written.rows
        assert file.damage.lacks_output or lost == [number for number, _ in file.damage.jobs]
        if file.damage.reason and not suffix:
            assert kept_path(path).read_bytes() == bytes(flipped)
        file.close()
        again = JournalFile.open(path, JournalMode.PROCESS)
        assert (again.damage, list(again.jobs()), again.last_number) == (Damage(), jobs, 60), "it is said once"
        again.close()
    if not suffix:
        assert num_lost[0] + num_lost[1] > 0.9 * num_lost.total()


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"", lambda whole: b"no database" * 100, lambda whole: whole[: len(whole) // 2]],
    ids=["no bytes", "garbage", "half"],
)
def test_a_journal_that_cannot_be_read_is_kept_and_another_one_begun(
    path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    written = Written.at(path, is_closed=True)
    content = damage(written.files[""])
    file = written.damaged_at(path, "", content)
    assert (list(file.jobs()), file.last_number, file.damage.lacks_output) == ([], 60, True)
    assert "ended with no job: jobs after it are lost, the last of them was the job of 1970-01-01" in caplog.text
    assert not content or kept_path(path).read_bytes() == content
    file.commit([Accepted(61, b"new")], [])
    file.close()
    file = JournalFile.open(path, JournalMode.PROCESS)
    assert [job.number for job in file.jobs()] == [61]
    file.close()


@pytest.mark.parametrize("table", ["jobs", "outputs"])
def test_half_a_job_is_none(path: Path, table: str) -> None:
    written = Written.at(path, is_closed=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"DELETE FROM {table} WHERE number = 17")
        database.commit()
    file = JournalFile.open(path, JournalMode.PROCESS)
    assert [number for number, _ in file.damage.jobs] == [17]
    assert list(file.jobs()) == [job for job in written.jobs if job.number != 17]
    assert (list(file.rows()), file.damage.lacks_output) == (written.rows, False)
    file.close()


def test_a_journal_that_says_that_nobody_may_write_it_is_made_anew(path: Path) -> None:
    written = Written.at(path, is_closed=True)
    header = bytearray(written.files[""])
    header[18] ^= 8
    file = written.damaged_at(path, "", bytes(header))
    assert (list(file.jobs()), list(file.rows())) == (written.jobs, written.rows)
    file.commit([Accepted(61, b"new")], [b"output"])
    file.close()


def test_a_tail_that_is_lost_is_said_though_all_jobs_are_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS)
    file.commit([Accepted(1, b"one")], [])
    file._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    for _ in range(5):
        file.commit([], [b"output"])
    left = killed(path)
    file.close()
    log = bytearray(log_path(left).read_bytes())
    log[2 * len(log) // 5] ^= 1
    log_path(left).write_bytes(log)
    file = JournalFile.open(left, JournalMode.PROCESS)
    assert file.damage.lacks_output
    assert [job.number for job in file.jobs()] == [1]
    assert len(rows_of(file)) < 5
    assert re.search(r"its last [34] commits cannot be read, and are lost", caplog.text)
    assert kept_path(log_path(left)).read_bytes() == log
    file.close()


def test_the_last_number_outlives_its_job(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = JournalFile.open(path, JournalMode.PROCESS)
    file.commit([Accepted(7, b"seven"), Forgotten(7)], [])
    file.close()
    for has_side_file in (True, False):
        file = JournalFile.open(path, JournalMode.PROCESS)
        assert (file.last_number, file.damage) == (7, Damage())
        file.close()
        if has_side_file:
            Path(f"{path}.last").unlink()
    assert caplog.text == ""


def test_a_journal_of_the_first_format_is_taken_over(path: Path) -> None:
    written = Written.at(path, is_closed=True)
    make_version_1(path)
    file = JournalFile.open(path, JournalMode.PROCESS)
    assert (list(file.jobs()), list(file.rows())) == (written.jobs, written.rows)
    assert (file.last_number, file.damage) == (60, Damage())
    file.close()
    JournalFile.open(path, JournalMode.PROCESS).close()


def test_a_file_that_never_was_a_journal_is_left_alone(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(FailedPreconditionError, match=r"move it and journal\.sqlite3-wal away") as raised:
        JournalFile.open(path, JournalMode.PROCESS)
    assert str(path) in str(raised.value)
    assert path.read_bytes() == b"no database at all" * 100


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
    code = (
        "import sys; from pathlib import Path; from slipstream.gateway.journal_file import *\n"
        f"try: JournalFile.open(Path({str(path)!r}), JournalMode.PROCESS)\n"
        "except ConfigError as error: sys.exit(str(error))"
    )
    for _ in range(2):
        file = JournalFile.open(path, JournalMode.PROCESS)
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert "no other gateway uses" in found.stderr
        file.close()
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


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
