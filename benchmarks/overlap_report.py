"""The measurements of `overlap.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.benchmarks.result_files import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HOST_BLOCKS = "host_blocks"
"""A worker acknowledges a step when its work is done, and every command waits for the acknowledgements it needs."""
RUN_AHEAD = "run_ahead"
"""The streams wait for each other, and steps are sent ahead: the product's own order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One window of one order; times are means per decode step."""

    device: str
    draft_ms: float
    verify_ms: float
    policy: str
    """`Order.name`."""
    run_ahead: int
    fence: str = "host"
    mps: bool = False
    repeat: int
    kernel_sum_ms: float
    """The length that the dummy kernels were asked to have."""
    busy_ms: float
    """Their length by the workers' stamps."""
    step_ms: float
    """From the end of a step to the end of the next, by the stamps."""
    lost_share: float | None = None
    """step - busy, as a share of that of host blocks in the same repeat."""
    elapsed_ms: float
    """The window's time by this process's clock, over its steps."""
    ratio: float
    """step_ms / kernel_sum_ms."""
    num_steps: int
    num_clients: int
    tokens_per_second: float
    tokens_sha256: str = ""
    """Hash of the first tokens of all clients: the same in every order."""
    host: str

    @property
    def lost_ms(self) -> float:
        """Time of a step in which neither worker worked."""
        return self.step_ms - self.busy_ms

    @property
    def title(self) -> str:
        """The order, for people."""
        name = "host blocks" if self.policy == HOST_BLOCKS else f"run-ahead {self.run_ahead}"
        return name if self.fence in ("host", "timeline") else f"{name}, {self.fence}"


def with_shares(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The same with `lost_share` filled in, also for results that were written without; other orders are left out."""
    of_host = {(m.draft_ms, m.verify_ms, m.mps, m.repeat): m.lost_ms for m in measurements if m.policy == HOST_BLOCKS}
    return [
        replace(m, lost_share=m.lost_ms / of_host[m.draft_ms, m.verify_ms, m.mps, m.repeat])
        for m in measurements
        if m.policy in (HOST_BLOCKS, RUN_AHEAD) and (m.draft_ms, m.verify_ms, m.mps, m.repeat) in of_host
    ]


def read_measurements(path: Path) -> list[Measurement]:
    """Reads a result file. Raises ValueError for a file of another kind."""
    return with_shares(read_rows(path, Measurement))
