"""What a server has in use at a moment, to be compared with what it had before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.client import AsyncClient

SETTLE_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Held:
    """What is in use at one moment."""

    num_free_pages: int
    num_running: int
    num_waiting: int
    threads: dict[str, int]
    """By service."""
    descriptors: dict[str, int]

    def exceeds(self, before: Held) -> bool:
        """Whether more is in use than before."""
        counts = ((self.threads, before.threads), (self.descriptors, before.descriptors))
        return (
            (self.num_free_pages, self.num_running, self.num_waiting)
            != (before.num_free_pages, before.num_running, before.num_waiting)
        ) or any(now[name] > then[name] for now, then in counts for name in now)


async def held(client: AsyncClient) -> Held:
    """What the server has in use now; its services run on this host."""
    info = await client.server_info()
    processes = {service.name: Path("/proc") / str(service.pid) for service in info.services}
    return Held(
        num_free_pages=info.num_free_pages,
        num_running=info.num_running,
        num_waiting=info.num_waiting,
        threads={name: len(list((path / "task").iterdir())) for name, path in processes.items()},
        descriptors={name: len(list((path / "fd").iterdir())) for name, path in processes.items()},
    )


async def settled(client: AsyncClient, before: Held | None) -> Held:
    """What is in use when it is no more than `before`, or nothing runs; as it is if that takes too long."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await held(client)
        is_idle = now.num_running == now.num_waiting == 0
        if (is_idle if before is None else not now.exceeds(before)) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(POLL_S)
