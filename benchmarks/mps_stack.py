"""The services as they are meant to run on a GPU: workers under an MPS daemon of their own, the scheduler outside."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from slipstream.benchmarks.stack import Stack
from slipstream.cli.up.mps import mps_daemon, outside_mps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from slipstream.cli.up.mps import MpsMode


@asynccontextmanager
async def mps_stack(mode: MpsMode, log_dir: Path) -> AsyncIterator[Stack]:
    """A stack for as long as the context, and the daemon with it. Raises what `mps_daemon` raises."""
    with TemporaryDirectory(prefix="slipstream-") as folder:
        async with mps_daemon(mode, Path(folder)) as mps:
            outside = outside_mps(Path(folder))
            inside = outside if mps is None else mps.environment
            async with Stack(log_dir, worker_environment=inside, scheduler_environment=outside) as stack:
                yield stack
