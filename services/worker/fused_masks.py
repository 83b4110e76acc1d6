"""The masks of a grammar worker on a GPU, which reads them in the host's memory when the sampling needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.services.models.kernels.masks import apply_masks, faults_of
from slipstream.services.worker.masks import GrammarMasks

if TYPE_CHECKING:
    import torch

    from slipstream.common.wire.step import StepCommand
    from slipstream.services.worker.slots import Staging


class FusedMasks(GrammarMasks):
    """A GrammarMasks whose rows may be any, with padding: what has a constraint is told by a table of all slots."""

    def of_step(self, command: StepCommand, staging: Staging) -> FusedStepMasks:
        is_constrained = [0] * self.shape.num_slots
        for slot in command.constrained:
            is_constrained[slot] = 1
        return FusedStepMasks(self, command, staging.put_integers(is_constrained))


@dataclass(frozen=True, slots=True)
class FusedStepMasks:
    """Implements `StepMasks`."""

    memory: FusedMasks
    command: StepCommand
    constrained: torch.Tensor
    """[slots] int64: 1 for those with a constraint."""

    def copy_out(self, rows: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        self.memory.copy_out(self.command, rows, draft_tokens)

    def take(self, rows: torch.Tensor, width: int) -> FusedAllowed:
        command = self.command
        self.memory.log_reads(command.constrained, command.step)
        return FusedAllowed(self, rows, faults_of(self.memory.stamps, self.constrained, rows, command.step))


@dataclass(frozen=True, slots=True)
class FusedAllowed:
    """Implements `Allowed`."""

    masks: FusedStepMasks
    rows: torch.Tensor
    """[B] int64."""
    faults: torch.Tensor
    """[B] int64."""

    def apply(self, logits: torch.Tensor, *, keeps: bool = False) -> torch.Tensor:
        given = logits.clone() if keeps else logits
        apply_masks(self.masks.memory.masks, self.masks.constrained, self.rows, self.faults, given)
        return given

    def faults_of(self, num_rows: int) -> torch.Tensor:
        return self.faults
