"""Logs that are copied while they grow."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.display import LogFollower
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(10)


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
