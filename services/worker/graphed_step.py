"""What graphs of a step are made with: all that lies at the same place whichever step they are replayed for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from slipstream.common.worker.captured_step import CapturedStep
    from slipstream.services.worker.graphs import Capture


@dataclass(frozen=True, slots=True)
class GraphedStep:
    """Of one epoch of a worker."""

    capture: Capture
    slots: torch.Tensor
    """[num_slots] int64: the step's slots, then padding."""
    step: CapturedStep
    """Stands for the step's number wherever the FutureMap wants that."""
    stamp_start: Callable[[], None]
    """Stream work: the worker's own work of the step begins."""
    stamp_end: Callable[[], None]
    """Stream work: it ends."""
