"""The masks of a grammar worker as verify waits for them and applies them, at each place of a constrained slot."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch

from slipstream.common.wire.events import EventLog, Site
from slipstream.common.wire.layout import UNMASKED, UNMATCHED, BufferName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slipstream.common.device.interface import Device, Stream
    from slipstream.common.wire.layout import GrammarShape
    from slipstream.common.wire.step import StepCommand
    from slipstream.services.worker.slots import Staging

NO_STEP = 2**62
"""A stamp that no step has."""


class Allowed(Protocol):
    """The masks of some rows of a step."""

    def apply(self, logits: torch.Tensor, *, keeps: bool = False) -> torch.Tensor:
        """Returns logits ([B, W, vocab_size]) without the tokens that may not stand there.

        `keeps`: the given ones stay as they are.
        """

    def faults_of(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int64: 0 for rows whose masks are there or that have no constraint, else UNMASKED or UNMATCHED."""


@dataclass(frozen=True, slots=True)
class HostAllowed:
    """Implements `Allowed` on a CPU; logits stay as they are."""

    at: torch.Tensor
    """[M] int64: the rows that have a constraint."""
    tokens: torch.Tensor
    """[M, W, vocab_size] bool: the tokens that may stand at each place; all of them where there are no masks."""
    faults: torch.Tensor
    """[M] int64: 0 where the masks are there, else UNMASKED or UNMATCHED."""

    def apply(self, logits: torch.Tensor, *, keeps: bool = False) -> torch.Tensor:
        masked = logits.index_select(0, self.at).masked_fill(~self.tokens, float("-inf"))
        return logits.index_copy(0, self.at, masked)

    def faults_of(self, num_rows: int) -> torch.Tensor:
        return self.faults.new_zeros(num_rows).index_copy(0, self.at, self.faults)


class GrammarMasks:
    """The memory between verify and a grammar worker.

    A mask counts if its stamp is the step's. What a grammar worker writes late, or does not write, so has no effect on
    any token.
    """

    def __init__(
        self,
        shape: GrammarShape,
        buffers: dict[BufferName, torch.Tensor],
        *,
        number: int,
        log: EventLog,
    ) -> None:
        """`number`: that of the attachment."""
        self.shape = shape
        self.masks = buffers[BufferName.MASKS]
        self.stamps = buffers[BufferName.MASK_STAMPS]
        self._log = log
        self._number = number
        self._copied_tokens = buffers[BufferName.COPIED_TOKENS]

    @classmethod
    def unshared(cls, shape: GrammarShape, device: torch.device) -> Self:
        """Makes memory of this process, in which there are no masks of any step, for rehearsals."""
        specs = (*shape.given_specs(), *shape.own_specs())
        # Masks are not read: one word for all takes no memory.
        made = {
            BufferName(spec.name): (
                torch.zeros((1,) * len(spec.shape), dtype=spec.dtype, device=device).expand(spec.shape)
                if spec.name == BufferName.MASKS
                else torch.full(spec.shape, NO_STEP, dtype=spec.dtype, device=device)
            )
            for spec in specs
        }
        return cls(shape, made, number=0, log=EventLog())

    def of_step(self, command: StepCommand, staging: Staging) -> StepMasks:
        """The masks of a step, which is being staged."""
        return StepMasks(self, command)

    def copy_out(self, command: StepCommand, rows: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        """See `StepMasks.copy_out`."""
        self.access(BufferName.COPIED_TOKENS, command.slots, command.step, is_write=True)
        self._copied_tokens[:, : draft_tokens.shape[1]].index_copy_(0, rows, draft_tokens)

    def access(self, name: BufferName, slots: Sequence[int], step: int, *, is_write: bool) -> None:
        """Logs an access."""
        if self._log.is_enabled:
            self._log.access(name, slots, is_write=is_write, step=step, attachment=self._number)

    def log_reads(self, slots: Sequence[int], step: int) -> None:
        """Logs that the masks of these slots are read."""
        for name in (BufferName.MASKS, BufferName.MASK_STAMPS):
            self.access(name, slots, step, is_write=False)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step in which a slot has a constraint. On a CPU: see `FusedStepMasks`."""

    memory: GrammarMasks
    command: StepCommand

    def copy_out(self, rows: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        """Stream work: writes the draft tokens of all slots that decode as verify uses them, for the grammar worker.

        `rows`: [B] int64, the slots; `draft_tokens`: [B, K] int64.
        """
        self.memory.copy_out(self.command, rows, draft_tokens)

    def take(self, rows: torch.Tensor, width: int) -> Allowed | None:
        """Stream work: reads the masks of B slots for `width` places; None if none of them has a constraint."""
        memory, step, constrained = self.memory, self.command.step, self.command.constrained
        slots = rows.tolist()
        at = [place for place, slot in enumerate(slots) if slot in constrained]
        if not at:
            return None
        masked = [slots[place] for place in at]
        memory.log_reads(masked, step)
        stamps = memory.stamps[masked]
        faults = torch.where(stamps == step, 0, torch.where(stamps == -step, UNMATCHED, UNMASKED))
        # The words are little-endian, so that their bytes are the bits in order.
        words = memory.masks.numpy()[masked, :width].view(np.uint8)
        bits = np.unpackbits(words, axis=-1, count=memory.shape.vocab_size, bitorder="little")
        tokens = torch.from_numpy(bits.view(np.bool_)) | (faults != 0)[:, None, None]
        return HostAllowed(torch.tensor(at), tokens, faults)


MOST_TIMED = 16
"""Waits for masks whose stamps are kept until they are there: more than steps may be under way."""


class MaskWaits:
    """Times the stream's waits for masks, by stamps before and after them, which a later wait looks at."""

    def __init__(self, device: Device, log: EventLog) -> None:
        """`log`: gets the stalls."""
        self._device = device
        self._log = log
        self._stamps = torch.zeros((MOST_TIMED, 2), dtype=torch.int64, pin_memory=device.torch_device.type == "cuda")
        self._steps: deque[tuple[int, int]] = deque()
        """Steps under way and their places among the stamps."""
        self._free = list(range(MOST_TIMED))

    @contextmanager
    def timed(self, stream: Stream, step: int) -> Iterator[None]:
        """Has the stream stamp before and after what is enqueued within."""
        self._collect()
        if not self._free:
            yield
            return
        place = self._free.pop()
        self._steps.append((step, place))
        self._device.stamp(stream, self._stamps[place, 0])
        yield
        self._device.stamp(stream, self._stamps[place, 1])

    def _collect(self) -> None:
        """Logs the waits that are over."""
        while self._steps and int(self._stamps[self._steps[0][1], 1]):
            step, place = self._steps.popleft()
            self._log.stall(Site.MASKS, step, *self._stamps[place].tolist())
            self._stamps[place] = 0
            self._free.append(place)
