"""Logs that are copied while they grow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.up.display import LogFollower
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
