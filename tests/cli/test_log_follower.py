"""Logs that are copied while they grow."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.up.display import LogFollower

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(10)


async def test_whole_lines_while_they_come_and_the_rest_at_the_end(tmp_path: Path) -> None:
    output = io.BytesIO()
    with (tmp_path / "a.log").open("wb", buffering=0) as log:
        log.write(b"one\ntw")
        async with LogFollower(output) as follower:
            follower.start([tmp_path / "a.log"])
            while output.getvalue() != b"one\n":  # noqa: ASYNC110 — the follower polls, and tells nobody
                await asyncio.sleep(0.01)
            log.write(b"o\nthree")
    assert output.getvalue() == b"one\ntwo\nthree\n"


async def test_a_log_that_is_replaced_is_followed_in_its_new_file(tmp_path: Path) -> None:
    output, path = io.BytesIO(), tmp_path / "a.log"
    path.write_bytes(b"one\ntw")
    async with LogFollower(output) as follower:
        follower.start([path])
        while output.getvalue() != b"one\n":  # noqa: ASYNC110 — the follower polls, and tells nobody
            await asyncio.sleep(0.01)
        path.replace(tmp_path / "a.log.1")
        path.write_bytes(b"three\n")
        while b"three\n" not in output.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert output.getvalue() == b"one\ntw\nthree\n"
