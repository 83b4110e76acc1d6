"""A draft's region: the memory between verify and one draft. Its rows are slots, one per running request."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import FutureMapError
from slipstream.common.wire.layout import BufferName
from slipstream.services.worker.shared_buffers import SharedBuffers, stamp_end, stamp_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.common.wire.access_log import AccessLog
    from slipstream.common.wire.layout import DraftShape
    from slipstream.common.wire.worker import DraftSizes
    from slipstream.services.worker.shared_buffers import StepNumber
    from slipstream.services.worker.verify_result import VerifyResult

POISON = -1
"""Stands for a length that was never written; only in debug mode."""


class RegionWord(enum.IntEnum):
    """Words by which verify's captured work finds a region; all are 0 in steps without a draft."""

    ATTACHMENT = 0
    """The attachment's number, by which it is found where the device is the host."""
    ROW_WIDTH = enum.auto()
    """Tokens that a slot has room for: K + 1."""
    # Addresses of buffers that verify uses, under their names.
    DRAFT_TOKENS = enum.auto()
    DRAFT_STAMPS = enum.auto()
    SEQ_LENS = enum.auto()
    BONUS_TOKENS = enum.auto()
    NUM_NEW = enum.auto()
    LAST_TOKENS = enum.auto()
    HIDDEN_STATES = enum.auto()
    """0 if the draft reads none."""


NO_REGION = (0,) * len(RegionWord)
"""The words of a step without a draft."""
PROPOSED = (BufferName.DRAFT_TOKENS, BufferName.NUM_PROPOSED)
"""The buffers that a draft writes with its guesses."""
STASHED = (BufferName.SEQ_LENS, BufferName.BONUS_TOKENS, BufferName.NUM_NEW, BufferName.LAST_TOKENS)
"""The buffers that every stash writes; hidden states are written where the draft reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStepState:
    """A slot's last step as the draft's next forward reads it, for B slots; in range, whatever was in the memory."""

    seq_lens: torch.Tensor
    """[B] int64."""
    bonus_tokens: torch.Tensor
    """[B] int64: the last token, at position `seq_lens`, whose KV is not written yet."""
    num_new: torch.Tensor
    """[B] int64: a + 1."""
    last_tokens: torch.Tensor
    """[B, K+1] int64: the tokens of the last step, of which `num_new` count."""
    hidden_states: torch.Tensor | None
    """[B, K+1, width]."""


class Region(SharedBuffers):
    """The memory between verify and one draft, as either of them sees it."""

    def __init__(
        self,
        shape: DraftShape,
        sizes: DraftSizes,
        buffers: Mapping[BufferName, torch.Tensor],
        *,
        number: int,
        vocab_size: int,
        log: AccessLog,
        is_debug: bool = False,
    ) -> None:
        """`number`: of the attachment. `vocab_size`: tokens that are read are clamped below it."""
        super().__init__(buffers, BufferName.DRAFT_STAMPS, log, number)
        self.shape = shape
        self.sizes = sizes
        self._vocab_size = vocab_size
        self._is_debug = is_debug
        self._zero = torch.zeros((), dtype=torch.int64, device=buffers[BufferName.SEQ_LENS].device)
        words = {name.name: buffer.data_ptr() for name, buffer in buffers.items()}
        words |= {RegionWord.ATTACHMENT.name: number, RegionWord.ROW_WIDTH.name: shape.num_draft_tokens + 1}
        self.words = tuple(words.get(word.name, 0) for word in RegionWord)
        """See `RegionWord`."""

    def poison(self) -> None:
        """Verify, in debug mode: no slot has a stash yet."""
        self._buffers[BufferName.SEQ_LENS].fill_(POISON)

    def stash(self, step: int, slots: Sequence[int], rows: torch.Tensor, result: VerifyResult) -> None:
        """Verify: writes what the draft's next forward on these slots reads.

        `rows`: [B] int64, the slots on the device, perhaps with padding behind them.
        """
        self.log_stash(step, slots, result)
        self.write_stash(rows, result)

    def log_stash(self, step: int, slots: Sequence[int], result: VerifyResult) -> None:
        """Logs that the stash of `result` is written."""
        if self._log.is_enabled:
            for name in (*STASHED, BufferName.HIDDEN_STATES) if self._takes_states(result) else STASHED:
                self.access(name, slots, step, is_write=True)

    def write_stash(self, rows: torch.Tensor, result: VerifyResult) -> None:
        """Verify: does what `stash` does, without the log."""
        bonus = result.tokens.gather(1, result.num_accepted[:, None])[:, 0]
        self._buffers[BufferName.SEQ_LENS].index_copy_(0, rows, result.seq_lens)
        self._buffers[BufferName.BONUS_TOKENS].index_copy_(0, rows, bonus)
        self._buffers[BufferName.NUM_NEW].index_copy_(0, rows, result.num_accepted + 1)
        copy_rows(self._buffers[BufferName.LAST_TOKENS], rows, result.tokens)
        if self._takes_states(result):
            assert result.hidden_states is not None, "the draft reads them"
            copy_rows(self._buffers[BufferName.HIDDEN_STATES], rows, result.hidden_states)

    def forget(self, step: int, slots: Sequence[int]) -> None:
        """Verify, in debug mode: poisons slots that another request takes, as nothing of the last one may be read."""
        if slots:
            self._to_write(BufferName.SEQ_LENS, slots, step)[list(slots)] = POISON

    def stash_prefill(self, step: int, hidden: torch.Tensor) -> None:
        """Verify: leaves a chunk's hidden states ([tokens, width], chunk after chunk) for the draft's own prefill."""
        self._to_write(BufferName.PREFILL_HIDDEN, [0], step)[: len(hidden)] = hidden

    def gather_prefill(self, step: int, num_tokens: int) -> torch.Tensor:
        """Draft: the hidden states of the chunks of a prefill, chunk after chunk: [num_tokens, width]."""
        return self.access(BufferName.PREFILL_HIDDEN, [0], step, is_write=False)[:num_tokens].clone()

    def gather(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> NextStepState:
        """Draft: reads the stash of B slots. `rows`: [B] int64; `limits`: [slots] int64, lengths are clamped to them.

        Raises FutureMapError in debug mode when a row was never stashed.
        """
        stamp_start(step)
        seq_lens = self._slot_read(BufferName.SEQ_LENS, rows, step)
        if self._is_debug:
            check_stashed(seq_lens, rows, step)
        return NextStepState(
            seq_lens=torch.clamp(seq_lens, self._zero, limits.index_select(0, rows)),
            bonus_tokens=self._tokens(BufferName.BONUS_TOKENS, rows, step),
            num_new=self._slot_read(BufferName.NUM_NEW, rows, step).clamp_(1, self.shape.num_draft_tokens + 1),
            last_tokens=self._tokens(BufferName.LAST_TOKENS, rows, step),
            hidden_states=self._hidden(step, rows),
        )

    def propose(self, step: StepNumber, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Draft: writes its tokens and how many they are. `rows`: [B] int64; `tokens`: [B, W] int64, W up to K."""
        for name in PROPOSED:
            self._declare(name, rows, step, is_write=True)
        copy_rows(self._buffers[BufferName.DRAFT_TOKENS], rows, tokens)
        self._buffers[BufferName.NUM_PROPOSED].index_fill_(0, rows, tokens.shape[1])
        stamp_end(step)

    def _takes_states(self, result: VerifyResult) -> bool:
        return result.hidden_states is not None and bool(self.shape.hidden_width)

    def _hidden(self, step: StepNumber, rows: torch.Tensor) -> torch.Tensor | None:
        """The stashed states of B slots, if the draft reads them."""
        return self._slot_read(BufferName.HIDDEN_STATES, rows, step) if self.shape.hidden_width else None

    def _tokens(self, name: BufferName, rows: torch.Tensor, step: StepNumber) -> torch.Tensor:
        return self._slot_read(name, rows, step).clamp_(0, self._vocab_size - 1)


def check_stashed(seq_lens: torch.Tensor, rows: torch.Tensor, step: StepNumber) -> None:
    """Raises FutureMapError if a length was never written: in debug mode, where such rows are poisoned."""
    if bool((seq_lens == POISON).any()):
        raise FutureMapError(f"step {step}: gathered slots {rows.tolist()} before they were stashed")


def copy_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` ([B, W, ...]) into the first W columns of some rows of `target` ([slots, >= W, ...])."""
    width = values.shape[1]
    (target if width == target.shape[1] else target.narrow(1, 0, width)).index_copy_(0, rows, values)
