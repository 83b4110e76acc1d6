"""The masks of a grammar worker as verify applies them: which tokens may stand at each place of a constrained slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from slipstream.common.wire.layout import UNMASKED, UNMATCHED, BufferName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.layout import GrammarShape


class Allowed(NamedTuple):
    """The masks of some rows of a step."""

    at: torch.Tensor
    """[M] int64: the rows that have a constraint."""
    tokens: torch.Tensor
    """[M, W, vocab_size] bool: the tokens that may stand at each place; all of them where there are no masks."""
    faults: torch.Tensor
    """[M] int64: 0 where the masks are there, else UNMASKED or UNMATCHED."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Takes tokens that may not stand there out of logits ([B, W, vocab_size]), which stay as they are."""
        masked = logits.index_select(0, self.at).masked_fill(~self.tokens, float("-inf"))
        return logits.index_copy(0, self.at, masked)

    def faults_of(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int64: `faults` of all rows, 0 for those without a constraint."""
        return self.faults.new_zeros(num_rows).index_copy(0, self.at, self.faults)


class GrammarMasks:
    """The memory between verify and a grammar worker. Every operation is work of verify's stream, on a CPU.

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
        self._shape = shape
        self._log = log
        self._number = number
        self._copied_tokens = buffers[BufferName.COPIED_TOKENS]
        self._masks = buffers[BufferName.MASKS].numpy()
        self._stamps = buffers[BufferName.MASK_STAMPS]

    def copy_out(self, step: int, slots: Sequence[int], rows: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        """Writes the draft tokens as verify uses them. `rows`: [B] int64, the slots; `draft_tokens`: [B, K] int64."""
        self._access(BufferName.COPIED_TOKENS, slots, step, is_write=True)
        self._copied_tokens[:, : draft_tokens.shape[1]].index_copy_(0, rows, draft_tokens)

    def take(self, step: int, constrained: Sequence[int], slots: Sequence[int], width: int) -> Allowed | None:
        """Reads the masks of those of `slots` that are `constrained`, for `width` places; None if none is."""
        at = [place for place, slot in enumerate(slots) if slot in constrained]
        if not at:
            return None
        masked = [slots[place] for place in at]
        for name in (BufferName.MASKS, BufferName.MASK_STAMPS):
            self._access(name, masked, step, is_write=False)
        stamps = self._stamps[masked]
        faults = torch.where(stamps == step, 0, torch.where(stamps == -step, UNMATCHED, UNMASKED))
        # The words are little-endian, so that their bytes are the bits in order.
        words = self._masks[masked, :width].view(np.uint8)
        bits = np.unpackbits(words, axis=-1, count=self._shape.vocab_size, bitorder="little")
        tokens = torch.from_numpy(bits.view(np.bool_)) | (faults != 0)[:, None, None]
        return Allowed(torch.tensor(at), tokens, faults)

    def _access(self, name: BufferName, rows: Sequence[int], step: int, *, is_write: bool) -> None:
        if self._log.is_enabled:
            self._log.access(name, rows, is_write=is_write, step=step, attachment=self._number)
