"""Signals and the work of a command."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from slipstream.cli.cancellation import StopSignals

pytestmark = pytest.mark.timeout(10)


async def test_the_work_is_cancelled_even_when_nobody_can_be_told() -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))

    def on_first() -> None:
        raise OSError("no terminal")

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(2)
        raise AssertionError("was not cancelled")

    signals = StopSignals(on_first=on_first)
    assert await signals.cancel(work()) is None
    assert signals.exit_status == 0
    assert [str(context["exception"]) for context in unhandled] == ["no terminal"]
