"""The FutureMap on a GPU: in captured steps, kernels read and write its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.common.worker.layout import BufferName
from slipstream.services.models.kernels.launching import power_of_two
from slipstream.services.models.kernels.step_ops import gather_kernel, publish_kernel, stash_kernel
from slipstream.services.worker.future_map import CapturedStep, FutureMap, NextStepState

if TYPE_CHECKING:
    from slipstream.services.worker.future_map import StepNumber, VerifyResult


class FusedFutureMap(FutureMap):
    """A FutureMap with kernels for captured steps; other steps, and results with logprobs, go the base class's way."""

    def publish(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        if not isinstance(step, CapturedStep) or result.logprobs is not None:
            super().publish(step, rows, result)
            return
        tokens = result.tokens.contiguous()
        publish_kernel[(len(rows),)](
            self._ring_write(BufferName.NEW_SEQ_LENS, step),
            self._ring_write(BufferName.NUM_ACCEPTED, step),
            output_tokens := self._ring_write(BufferName.OUTPUT_TOKENS, step),
            step.ring_row,
            rows,
            result.seq_lens,
            result.num_accepted,
            tokens,
            self._shape.num_slots,
            ROW=output_tokens.shape[1],
            WIDTH=tokens.shape[1],
            BLOCK_W=power_of_two(tokens.shape[1]),
            num_warps=1,
        )

    def stash(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        if not isinstance(step, CapturedStep):
            super().stash(step, rows, result)
            return
        tokens = result.tokens.contiguous()
        stash_kernel[(len(rows),)](
            self._slot_write(BufferName.SEQ_LENS, rows, step),
            self._slot_write(BufferName.BONUS_TOKENS, rows, step),
            self._slot_write(BufferName.NUM_NEW, rows, step),
            last_tokens := self._slot_write(BufferName.LAST_TOKENS, rows, step),
            rows,
            result.seq_lens,
            result.num_accepted,
            tokens,
            ROW=last_tokens.shape[1],
            WIDTH=tokens.shape[1],
            BLOCK_W=power_of_two(tokens.shape[1]),
            num_warps=1,
        )
        if result.hidden_states is not None:
            self._stash_hidden(step, rows, result.hidden_states)

    def gather_ends(
        self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(step, CapturedStep):
            return super().gather_ends(step, rows, limits)
        seq_lens, bonus_tokens, _, _ = self._gather(step, rows, limits, has_last=False)
        return seq_lens, bonus_tokens

    def gather(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> NextStepState:
        if not isinstance(step, CapturedStep):
            return super().gather(step, rows, limits)
        seq_lens, bonus_tokens, num_new, last_tokens = self._gather(step, rows, limits, has_last=True)
        return NextStepState(
            seq_lens=seq_lens,
            bonus_tokens=bonus_tokens,
            num_new=num_new,
            last_tokens=last_tokens,
            hidden_states=self._hidden(step, rows),
        )

    def _gather(
        self, step: CapturedStep, rows: torch.Tensor, limits: torch.Tensor, *, has_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        names = [BufferName.SEQ_LENS, BufferName.BONUS_TOKENS]
        if has_last:
            names += [BufferName.NUM_NEW, BufferName.LAST_TOKENS]
        for name in names:
            self._declare(name, rows, step, is_write=False)
        last_tokens = self._buffers[BufferName.LAST_TOKENS]
        width = last_tokens.shape[1]
        seq_lens, bonus_tokens, num_new = torch.empty((3, len(rows)), dtype=torch.int64, device=rows.device)
        last = torch.empty((len(rows), width), dtype=torch.int64, device=rows.device)
        gather_kernel[(len(rows),)](
            self._buffers[BufferName.SEQ_LENS],
            self._buffers[BufferName.BONUS_TOKENS],
            self._buffers[BufferName.NUM_NEW],
            last_tokens,
            rows,
            limits,
            seq_lens,
            bonus_tokens,
            num_new,
            last,
            self._vocab_size,
            WIDTH=width,
            BLOCK_W=power_of_two(width),
            HAS_LAST=has_last,
            num_warps=1,
        )
        return seq_lens, bonus_tokens, num_new, last
