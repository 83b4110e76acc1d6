"""Signals and the work of a command."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from slipstream.cli.cancellation import StopSignals
from slipstream.common.errors import InternalError
from slipstream.common.rpc.shutdown import raise_failure

pytestmark = pytest.mark.timeout(10)


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
