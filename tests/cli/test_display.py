"""What `up` shows: states and logs of services, on a console that may lose its reader; and signals of its work."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.cli.cancellation import StopSignals
from slipstream.cli.display import LogFollower, nonfailing_console
from slipstream.common.errors import InternalError
from slipstream.common.rpc.shutdown import raise_failure
from tests.harness.waiting import until


async def test_whole_lines_while_they_come_and_the_rest_at_the_end(tmp_path: Path) -> None:
    output = io.BytesIO()
    with (tmp_path / "a.log").open("wb", buffering=0) as log:
        log.write(b"one\ntw")
        async with LogFollower(output) as follower:
            follower.start([tmp_path / "a.log"])
            await until(lambda: output.getvalue() == b"one\n")
            log.write(b"o\nthree")
    assert output.getvalue() == b"one\ntwo\nthree\n"


async def test_without_a_reader_lines_are_lost_and_nothing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as output:
        async with LogFollower(output) as follower:
            follower.start([path])
            await until(lambda: follower._logs[path][0].tell() == 4)
            assert not follower._task.done()


async def test_a_failure_to_follow_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.log"
    path.touch()
    with suppress(ValueError):
        async with LogFollower(io.BytesIO()) as follower:
            follower.start([path])
            follower._logs[path][0].close()
            await until(lambda: "closed file" in caplog.text)


async def test_a_log_that_is_replaced_is_followed_in_its_new_file(tmp_path: Path) -> None:
    output, path = io.BytesIO(), tmp_path / "a.log"
    path.write_bytes(b"one\ntw")
    async with LogFollower(output) as follower:
        follower.start([path])
        await until(lambda: output.getvalue() == b"one\n")
        path.replace(tmp_path / "a.log.1")
        path.write_bytes(b"three\n")
        await until(lambda: b"three\n" in output.getvalue())
    assert output.getvalue() == b"one\ntw\nthree\n"


def pipe() -> tuple[int, int]:
    """Whose writes fail with EPIPE once the first is closed."""
    return os.pipe()


def terminal() -> tuple[int, int]:
    """Whose writes fail with EIO once the first is closed."""
    return os.openpty()


@pytest.mark.parametrize("make", [pipe, terminal])
def test_it_writes_while_somebody_reads_and_raises_nothing_then(
    make: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = make()
    with os.fdopen(writer, "w", buffering=1) as file:
        monkeypatch.setattr(sys, "stderr", file)
        console = nonfailing_console()
        assert console.is_terminal == file.isatty()
        console.print("one")
        assert os.read(reader, 100).split() == [b"one"]
        os.close(reader)
        console.print("two")
        console.print("three")
        file.write("four\n")  # as a logger does, past the console


def test_a_full_disk_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        nonfailing_console().print("lost")
        with pytest.raises(OSError, match="No space"):
            full.flush()
        reader, writer = pipe()
        os.dup2(writer, full.fileno())  # has room again
        os.close(writer)
    assert os.read(reader, 100) == b"lost\n"
    os.close(reader)


async def test_a_failure_of_a_callback_ends_the_work() -> None:
    """It may have been the one that would have told it to go on."""
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    gone.set_exception(OSError("no disk"))
    gone.add_done_callback(raise_failure)
    with pytest.raises(InternalError, match="has failed"):
        await StopSignals().cancel(asyncio.sleep(5))


async def test_the_work_is_cancelled_even_when_nobody_can_be_told(caplog: pytest.LogCaptureFixture) -> None:
    def on_first() -> None:
        raise OSError("no terminal")

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(2)
        raise AssertionError("was not cancelled")

    signals = StopSignals(on_first=on_first)
    assert await signals.cancel(work()) is None
    assert signals.exit_status == 0
    assert "no terminal" in caplog.text
