"""The FutureMap, a draft's region and a grammar worker's masks on a GPU: one kernel for each operation of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from slipstream.common.wire.layout import NOT_FINITE, BufferName
from slipstream.services.models.kernels.launching import overlapping, power_of_two
from slipstream.services.models.kernels.masks import apply_masks, faults_of
from slipstream.services.models.kernels.step_ops import (
    copy_in_kernel,
    gather_kernel,
    propose_kernel,
    publish_kernel,
    stash_kernel,
    token_block,
)
from slipstream.services.worker.future_map import PROPOSED, STASHED, CapturedStep, FutureMap, NextStepState, Region
from slipstream.services.worker.masks import GrammarMasks, StepMasks

if TYPE_CHECKING:
    from slipstream.common.wire.step import StepCommand
    from slipstream.services.worker.future_map import StampPlace, StepNumber, VerifyResult
    from slipstream.services.worker.slots import Staging

HIDDEN_BLOCK = 1024
"""Numbers of a hidden state that a program of the stash copies."""


class FusedRegion(Region):
    """A Region whose stash, and in captured steps gather and propose, are a kernel each."""

    @cached_property
    def words_on_device(self) -> torch.Tensor:
        """[words of `RegionWord`] int64, for steps without graphs. Stream work, which does not wait for the stream."""
        words, device = torch.tensor(self.words), self._buffers[BufferName.SEQ_LENS].device
        return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words

    def write_stash(self, rows: torch.Tensor, result: VerifyResult) -> None:
        stash(self.words_on_device, rows, result, end=None)

    def gather(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> NextStepState:
        if not isinstance(step, CapturedStep):
            return super().gather(step, rows, limits)
        for name in STASHED:
            self._declare(name, rows, step, is_write=False)
        buffers = [self._buffers[name] for name in STASHED]
        seq_lens, bonus_tokens, num_new, last_tokens = gather(
            buffers, rows, limits, self._vocab_size, has_last=True, start=step.start
        )
        return NextStepState(
            seq_lens=seq_lens,
            bonus_tokens=bonus_tokens,
            num_new=num_new,
            last_tokens=last_tokens,
            hidden_states=self._hidden(step, rows),
        )

    def propose(self, step: StepNumber, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        if not isinstance(step, CapturedStep):
            super().propose(step, rows, tokens)
            return
        for name in PROPOSED:
            self._declare(name, rows, step, is_write=True)
        num_rows, width = tokens.shape
        draft_tokens = self._buffers[BufferName.DRAFT_TOKENS]
        propose_kernel[(num_rows,)](
            draft_tokens, self._buffers[BufferName.NUM_PROPOSED], *_stamped(step.end, rows), rows, tokens.contiguous(),
            width,
            ROW=draft_tokens.shape[1], BLOCK_W=token_block(width), HAS_STAMP=_has_stamp(step.end), num_warps=1,
            **overlapping(rows.device),
        )  # fmt: skip
        _stamp_on_host(step.end)


class FusedFutureMap(FutureMap):
    """A FutureMap with kernels for captured steps and for copying in; other work goes the base class's way."""

    def publish(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        if not isinstance(step, CapturedStep) or result.logprobs is not None:
            super().publish(step, rows, result)
            return
        tokens = result.tokens.contiguous()
        publish_kernel[(len(rows),)](
            self._ring_write(BufferName.NEW_SEQ_LENS, step), self._ring_write(BufferName.NUM_ACCEPTED, step),
            output_tokens := self._ring_write(BufferName.OUTPUT_TOKENS, step), self._seq_lens, self._bonus_tokens,
            step.ring_row, rows, result.seq_lens, result.num_accepted, tokens,
            tokens if result.scores is None else result.scores.contiguous(), self._shape.num_slots, tokens.shape[1],
            ROW=output_tokens.shape[1], BLOCK_W=token_block(tokens.shape[1]), HAS_SCORES=result.scores is not None,
            NOT_FINITE=NOT_FINITE, num_warps=1, **overlapping(rows.device),
        )  # fmt: skip

    def ends(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(step, CapturedStep):
            return super().ends(step, rows, limits)
        own = [self._seq_lens, self._bonus_tokens, self._seq_lens, self._seq_lens[:, None]]
        seq_lens, bonus_tokens, _, _ = gather(own, rows, limits, self._vocab_size, has_last=False, start=step.start)
        return seq_lens, bonus_tokens

    def copy_in_captured(self, step: CapturedStep, rows: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
        return self._copy(step.region_words, rows, num_draft_tokens, step.ring_row, 0, is_captured=True)

    def stash_captured(self, step: CapturedStep, rows: torch.Tensor, result: VerifyResult) -> None:
        stash(step.region_words, rows, result, end=step.end)

    def _copied(self, row: int, region: Region, rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(region, FusedRegion), "on a device all regions are"
        return self._copy(region.words_on_device, rows, region.sizes.num_draft_tokens, rows, row, is_captured=False)

    def _copy_stamps(self, row: int, region: Region) -> None:
        # By the kernel of other steps, which is loaded, with no tokens: a copy to the host's memory would need another.
        assert isinstance(region, FusedRegion), "on a device all regions are"
        words = region.words_on_device
        self._copy(words, words[:1], 0, words, row, is_captured=False)

    def _copy(
        self,
        region_words: torch.Tensor,
        rows: torch.Tensor,
        width: int,
        ring_row: torch.Tensor,
        row: int,
        *,
        is_captured: bool,
    ) -> torch.Tensor:
        copied = rows.new_empty(len(rows), width)
        copy_in_kernel[(len(rows),)](
            region_words, self._buffers[BufferName.DRAFT_STAMPS], rows, copied, ring_row, row, self._ring,
            self._vocab_size, width,
            BLOCK_W=token_block(width), IS_CAPTURED=is_captured, num_warps=1,
        )  # fmt: skip
        return copied


def stash(region_words: torch.Tensor, rows: torch.Tensor, result: VerifyResult, *, end: StampPlace | None) -> None:
    """Writes the stash of B slots into a region, if there is one; stamps `end`. `region_words`: [words] int64."""
    tokens, hidden = result.tokens.contiguous(), result.hidden_states
    num_rows, num_tokens = tokens.shape
    width, source = (0, tokens) if hidden is None else (hidden.shape[2], hidden)
    assert hidden is None or hidden.stride(2) == 1, "a state lies in one piece"
    stash_kernel[num_rows, 1 + num_tokens * -(-width // HIDDEN_BLOCK)](
        region_words, *_stamped(end, rows), rows, result.seq_lens, result.num_accepted, tokens, source,
        source.stride(0), source.stride(1), num_tokens, width,
        BLOCK_W=token_block(num_tokens), BLOCK_H=HIDDEN_BLOCK, HAS_STAMP=_has_stamp(end), num_warps=4 if width else 1,
    )  # fmt: skip
    _stamp_on_host(end)


def gather(
    buffers: list[torch.Tensor],
    rows: torch.Tensor,
    limits: torch.Tensor,
    vocab_size: int,
    *,
    has_last: bool,
    start: StampPlace | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads lengths, bonus tokens and, with `has_last`, `num_new` and `last_tokens` of B slots in one launch.

    `start`: is stamped.
    """
    width = buffers[3].shape[1]
    seq_lens, bonus_tokens, num_new = torch.empty((3, len(rows)), dtype=torch.int64, device=rows.device)
    last = torch.empty((len(rows), width), dtype=torch.int64, device=rows.device)
    _stamp_on_host(start)
    gather_kernel[(len(rows),)](
        *buffers, *_stamped(start, rows), rows, limits, seq_lens, bonus_tokens, num_new, last, vocab_size,
        WIDTH=width, BLOCK_W=power_of_two(width), HAS_LAST=has_last, HAS_STAMP=_has_stamp(start), num_warps=1,
    )  # fmt: skip
    return seq_lens, bonus_tokens, num_new, last


def _stamped(place: StampPlace | None, unread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Arguments of a kernel that stamps. `unread` stands for what is not read without a stamp."""
    return (unread, unread, 0) if place is None else (place.column, place.ring_row, place.column.stride(0))


def _has_stamp(place: StampPlace | None) -> bool:
    return place is not None and place.column.is_cuda


def _stamp_on_host(place: StampPlace | None) -> None:
    """For Triton's interpreter, which has no clock."""
    if place is not None and not place.column.is_cuda:
        place.stamp()


class FusedMasks(GrammarMasks):
    """A GrammarMasks whose rows may be any, with padding: what has a constraint is told by a table of all slots."""

    def of_step(self, command: StepCommand, staging: Staging) -> FusedStepMasks:
        is_constrained = [0] * self.shape.num_slots
        for slot in command.constrained:
            is_constrained[slot] = 1
        return FusedStepMasks(self, command, staging.put_integers(is_constrained))


@dataclass(frozen=True, slots=True)
class FusedStepMasks(StepMasks):
    """A StepMasks whose masks are read in the host's memory when the sampling needs them."""

    constrained: torch.Tensor
    """[slots] int64: 1 for those with a constraint."""

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
