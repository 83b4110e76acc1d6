"""Looks at a server again and again: what it says each time, and what happened to it since the time before."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import datetime
from http.client import HTTPException
from typing import TYPE_CHECKING

from slipstream.cli.server_status import fetch_status
from slipstream.cli.status_watch_numbers import IntervalNumbers, Reading, finished, kv_pools
from slipstream.common.errors import SlipstreamError
from slipstream.common.rpc.scrape import scrape

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known at one moment."""

    at: datetime
    """With the time zone."""
    reading: Reading | None
    """None when no server answers."""
    why_gone: str = ""
    numbers: IntervalNumbers | None = None
    """Of the time since the look before; None when there is nothing to compare with."""
    event: str = ""
    """What happened last to the server while it was watched, and when."""

    def as_json(self) -> dict[str, object]:
        """All of it, for `json.dumps`."""
        reading, numbers = self.reading, self.numbers
        found: dict[str, object] = {"time": self.at.isoformat(timespec="milliseconds"), "event": self.event or None}
        if reading is None:
            return {**found, "error": self.why_gone, "healthy": False}
        metrics = reading.metrics
        return {
            **found,
            "error": reading.why_no_metrics or None,
            **reading.status.as_json(),
            "interval": None if numbers is None else asdict(numbers),
            "finished": None if metrics is None else finished(metrics),
            "kv_pools": None if metrics is None else [asdict(pool) for pool in kv_pools(metrics)],
        }


class Watcher:
    """Remembers what the last look found."""

    def __init__(self, locate: Callable[[], str], read: Callable[[str], Awaitable[Reading]]) -> None:
        """`locate` gives the server's address, which may change; `read` is `read_server`. Both raise a SlipstreamError
        while there is no server.
        """
        self._locate = locate
        self._read = read
        self._last: Reading | None = None
        self._gone_since_s: float | None = None
        self._event = ""

    async def look(self) -> Look:
        """Asks the server and its services, and reads the metrics. A server that does not answer is no error."""
        try:
            reading = await self._read(self._locate())
        except SlipstreamError as error:
            return self._gone(str(error))
        return self._found(reading)

    def _gone(self, why: str) -> Look:
        at = _now()
        if self._gone_since_s is None:
            self._gone_since_s = time.monotonic()
            self._event = f"no answer since {at:%H:%M:%S}"
        return Look(at=at, reading=None, why_gone=why, event=self._event)

    def _found(self, reading: Reading) -> Look:
        at, last = _now(), self._last
        self._event = self._what_happened(reading, at) or self._event
        self._last, self._gone_since_s = reading, None
        return Look(at=at, reading=reading, numbers=IntervalNumbers.between(last, reading), event=self._event)

    def _what_happened(self, reading: Reading, at: datetime) -> str:
        last, gone_since_s = self._last, self._gone_since_s
        away = "" if gone_since_s is None else f", after {reading.at_s - gone_since_s:.1f} s without an answer"
        if last is not None and not reading.is_same_process(last):
            return f"the scheduler was started anew, seen at {at:%H:%M:%S}{away}"
        if last is not None and last.status.state.epoch != (epoch := reading.status.state.epoch):
            return f"workers attached anew, epoch {epoch}, seen at {at:%H:%M:%S}{away}"
        return f"answers since {at:%H:%M:%S}{away}" if away else ""


async def read_server(server: str) -> Reading:
    """Asks this server. Raises a SlipstreamError when it does not answer; without its metrics, the reading says why."""
    status = await fetch_status(server)
    port = next((service.metrics_port for service in status.state.services if service.name == "scheduler"), 0)
    if not port:
        return Reading(at_s=time.monotonic(), status=status, metrics=None, why_no_metrics="it serves no metrics")
    try:
        metrics = await scrape(port, timeout_s=_SCRAPE_TIMEOUT_S)
    except (OSError, HTTPException, ValueError) as error:
        why = f"its metrics, on port {port} of its own host, cannot be read from here: {error}"
        return Reading(at_s=time.monotonic(), status=status, metrics=None, why_no_metrics=why)
    return Reading(at_s=time.monotonic(), status=status, metrics=metrics)


def _now() -> datetime:
    return datetime.now().astimezone()
