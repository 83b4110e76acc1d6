"""The metrics of a target's ranks, on rank 0's endpoint: what ranks say by themselves, and the kernel of processes.

Nothing asks a device. On a GPU the collectives are parts of graphs, and how long a rank is in them is not measured.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from slipstream.common.rpc.metrics import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from slipstream.common.rpc.metrics import MetricFamily, MetricSpec

RANK_UP = gauge(
    "slipstream_rank_up", "1 once the rank has its part of the target. Verify ends with a rank that is lost.", "rank"
)
RANK_RESIDENT = gauge("slipstream_rank_resident_memory_bytes", "Resident memory of the rank's process.", "rank")
RANK_FREE = gauge(
    "slipstream_rank_device_free_bytes", "Memory that is free on the GPU of a rank after the first.", "rank"
)
RANK_WAITED = counter(
    "slipstream_rank_collective_seconds_total",
    "On a CPU: time that the rank was in collectives, and waited there for slower ranks.",
    "rank",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank as rank 0 knows it."""

    rank: int
    pid: int | None = None
    """Its process; None: one that is not to be measured."""
    is_loaded: bool
    free_bytes: int = 0
    """Memory that is free on its GPU; 0 on a CPU, and for rank 0, whose GPU is not asked."""
    waited_s: float | None = None
    """Seconds in collectives; None where that is not measured."""

    def resident_bytes(self) -> int | None:
        """Memory of its process; None if that has ended."""
        with suppress(OSError):
            return int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
                "SC_PAGESIZE"
            )
        return None


_VALUES: Mapping[MetricSpec, Callable[[RankReport], float | None]] = MappingProxyType(
    {
        RANK_UP: lambda rank: rank.is_loaded,
        RANK_RESIDENT: RankReport.resident_bytes,
        RANK_FREE: lambda rank: rank.free_bytes or None,
        RANK_WAITED: lambda rank: rank.waited_s,
    }
)
SPECS = tuple(_VALUES)


class RankMetrics(Collector):
    """Reads the ranks' metrics at each scrape."""

    def __init__(self, reports: Callable[[], list[RankReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[MetricFamily]:
        ranks = self._reports()
        for spec, value_of in _VALUES.items():
            family = spec.family()
            for rank in ranks:
                if (value := value_of(rank)) is not None:
                    family.add_metric((str(rank.rank),), value)
            yield family
