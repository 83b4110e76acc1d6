"""Copies what services log to a terminal while they run."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_INTERVAL_S = 0.2


async def follow(paths: Iterable[Path], output: BinaryIO) -> None:
    """Copies what is and will be in these files, whole lines each time, until it is cancelled.

    The services write to files and not to a pipe of ours, so that no service ever waits for us to read.
    """
    with ExitStack() as files:
        logs = [files.enter_context(path.open("rb")) for path in paths]
        rests = [b""] * len(logs)
        try:
            while True:
                for index, log in enumerate(logs):
                    lines, newline, rest = (rests[index] + log.read()).rpartition(b"\n")
                    output.write(lines + newline)
                    rests[index] = rest
                output.flush()
                await asyncio.sleep(_INTERVAL_S)
        finally:
            for rest, log in zip(rests, logs, strict=True):
                output.write(rest + log.read())
            output.flush()
