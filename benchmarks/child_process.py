"""How processes of a measurement end."""

from __future__ import annotations

import asyncio
import signal

STOP_TIMEOUT_S = 30.0


async def end(process: asyncio.subprocess.Process) -> None:
    """By SIGTERM, and by SIGKILL if that takes too long; returns when it is over."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
