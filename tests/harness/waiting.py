"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import psutil

TIMEOUT_S = 60.0
DEADLINES_S = (0.2, 2.0, 20.0)
"""Deadlines of a call that must have begun by then: a test makes it again with the next while it has not."""


async def until(condition: Callable[[], bool]) -> None:
    """Returns as soon as `condition` holds; fails when it does not come to."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - nobody sets an event for what is looked at here
            await asyncio.sleep(0.002)


def block_until(condition: Callable[[], bool]) -> None:
    """As `until`, and blocks the thread."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_at, "it does not come to hold"
        time.sleep(0.002)


def runs(process: psutil.Process) -> bool:
    """True until it has ended, reaped or not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_listening(path: str) -> bool:
    """Whether something listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(path) == 0
