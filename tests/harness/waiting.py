"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns as soon as `condition` holds; fails when it does not come to."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - nobody sets an event for what is looked at here
            await asyncio.sleep(0.002)
