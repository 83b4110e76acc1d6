"""The FutureMap: results of one step for the next step, before any host knows them.

Verify's `FutureMap` has two parts. *Ring* rows, one per step, carry what the scheduler consumes (`publish`). What its
own next forward needs of a slot is private. A `Region`, the memory between verify and one draft, has *slot* rows, one
per running request, with what only the draft's next forward needs (`stash`) and with what the draft gives. Filtering
or merging a batch moves no tensor, only slot numbers. Idea and terms: SGLang's overlap scheduler (sgl-project/sglang,
"spec v2").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.common.wire.layout import DECODE_PART, NOT_FINITE, PREFILL_PART, BufferName
from slipstream.services.worker.region import POISON, RegionWord, check_stashed, copy_rows
from slipstream.services.worker.shared_buffers import (
    CapturedAccess,
    CapturedStep,
    SharedBuffers,
    stamp_end,
    stamp_start,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.common.wire.access_log import AccessLog
    from slipstream.common.wire.layout import EpochShape
    from slipstream.services.models.sampler import Logprobs
    from slipstream.services.worker.region import Region
    from slipstream.services.worker.shared_buffers import StepNumber
    from slipstream.services.worker.verify_result import VerifyResult

_RING_BUFFERS = (
    BufferName.NEW_SEQ_LENS,
    BufferName.NUM_ACCEPTED,
    BufferName.OUTPUT_TOKENS,
    BufferName.OUTPUT_LOGPROBS,
    BufferName.TOP_TOKENS,
    BufferName.TOP_LOGPROBS,
)


class FutureMap(SharedBuffers):
    """Verify's results, and the state of each slot that its own next forward reads."""

    def __init__(
        self,
        shape: EpochShape,
        buffers: Mapping[BufferName, torch.Tensor],
        *,
        vocab_size: int,
        log: AccessLog,
        regions: Mapping[int, Region] | None = None,
        is_debug: bool = False,
    ) -> None:
        """`vocab_size`: tokens are below it. `regions`: of attached drafts, by number; read on a host alone."""
        super().__init__(buffers, BufferName.VERIFY_STAMPS, log, attachment=0)
        self._shape = shape
        self._vocab_size = vocab_size
        self._regions = {} if regions is None else regions
        self._is_debug = is_debug
        self._ring_rows = {name: buffers[name].unbind() for name in _RING_BUFFERS}
        self._flat = {name: buffers[name].flatten(0, 1) for name in _RING_BUFFERS}
        # Not shared, so that no draft can change an output.
        device = buffers[BufferName.NEW_SEQ_LENS].device
        self._seq_lens, self._bonus_tokens = torch.zeros((2, shape.num_slots), dtype=torch.int64, device=device)
        if is_debug:
            self._seq_lens.fill_(POISON)
            buffers[BufferName.NEW_SEQ_LENS].fill_(POISON)

    def publish(self, step: StepNumber, rows: torch.Tensor, result: VerifyResult) -> None:
        """Writes what the scheduler consumes, and keeps what the next forward needs. `rows`: [B] int64 slots."""
        places = rows + step.ring_row * self._shape.num_slots if isinstance(step, CapturedStep) else rows
        num_accepted = _published(result).to(torch.int32)
        self._ring_write(BufferName.NEW_SEQ_LENS, step).index_copy_(0, places, result.seq_lens)
        self._ring_write(BufferName.NUM_ACCEPTED, step).index_copy_(0, places, num_accepted)
        copy_rows(self._ring_write(BufferName.OUTPUT_TOKENS, step), places, result.tokens)
        if result.logprobs is not None:
            self._publish_logprobs(step, places, result.logprobs)
        if self._is_debug and not isinstance(step, CapturedStep):
            # The row of step - ring + 1 is consumed by now, or this step would not have been sent.
            self._ring_write(BufferName.NEW_SEQ_LENS, step, offset=1).fill_(POISON)
        self._seq_lens.index_copy_(0, rows, result.seq_lens)
        self._bonus_tokens.index_copy_(0, rows, result.tokens.gather(1, result.num_accepted[:, None])[:, 0])

    def ends(self, step: StepNumber, rows: torch.Tensor, limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the sequences of B slots end: their lengths and bonus tokens, each [B] int64.

        `rows`: [B] int64; `limits`: [slots] int64, lengths are clamped to them. Raises FutureMapError in debug mode
        when no step ended there yet.
        """
        stamp_start(step)
        seq_lens = self._seq_lens.index_select(0, rows)
        if self._is_debug:
            check_stashed(seq_lens, rows, step)
        return torch.minimum(seq_lens, limits.index_select(0, rows)), self._bonus_tokens.index_select(0, rows)

    def forget(self, slots: Sequence[int]) -> None:
        """In debug mode: poisons slots that another request takes, as nothing of the last one may be read."""
        self._seq_lens[list(slots)] = POISON

    def copy_in(self, step: int, region: Region, slots: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Returns a private copy of the draft tokens of B slots, and copies the draft's stamps to the results.

        `rows`: [B] int64, the slots on the device, perhaps with padding behind them. Returns [B, K] int64: the tokens
        are in range, whatever the draft wrote; the stamps may be any numbers.
        """
        self.log_copy_in(step, region, slots)
        return self._copied(step % self._ring, region, rows)

    def log_copy_in(self, step: int, region: Region, slots: Sequence[int]) -> None:
        """Logs what a copy reads and writes."""
        if self._log.is_enabled:
            region.access(BufferName.DRAFT_TOKENS, slots, step, is_write=False)
            self._log_copied_stamps(step, region)

    def copy_stamps(self, step: int, region: Region) -> None:
        """Copies the draft's stamps to the results, in a step that copies no draft tokens in."""
        if self._log.is_enabled:
            self._log_copied_stamps(step, region)
        self._copy_stamps(step % self._ring, region)

    def _log_copied_stamps(self, step: int, region: Region) -> None:
        # Of this step's decode part, for which verify has waited, and of the prefill part before it.
        rows = [2 * (step % self._ring) + DECODE_PART, 2 * ((step - 1) % self._ring) + PREFILL_PART]
        region.access(BufferName.DRAFT_STAMPS, rows, step, is_write=False)
        self.access(BufferName.DRAFT_STAMPS, rows, step, is_write=True)

    def _copy_stamps(self, row: int, region: Region) -> None:
        source, target = region.buffer(BufferName.DRAFT_STAMPS), self._buffers[BufferName.DRAFT_STAMPS]
        before = (row - 1) % self._ring
        target[row, DECODE_PART].copy_(source[row, DECODE_PART])
        target[before, PREFILL_PART].copy_(source[before, PREFILL_PART])

    def copy_in_captured(self, step: CapturedStep, rows: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
        """Does what `copy_in` does, from the region that is there at the replay. Returns 0 where there is none."""
        region = self._region_at(step)
        if region is None:
            return rows.new_zeros(len(rows), num_draft_tokens)
        return self._copied(int(step.ring_row), region, rows)

    def stash_captured(self, step: CapturedStep, rows: torch.Tensor, result: VerifyResult) -> None:
        """Does what `Region.stash` does, in the region that is there at the replay, if any; stamps the end."""
        region = self._region_at(step)
        if region is not None:
            region.write_stash(rows, result)
        stamp_end(step)

    def _copied(self, row: int, region: Region, rows: torch.Tensor) -> torch.Tensor:
        self._copy_stamps(row, region)
        return region.buffer(BufferName.DRAFT_TOKENS).index_select(0, rows).clamp_(0, self._vocab_size - 1)

    def _region_at(self, step: CapturedStep) -> Region | None:
        """Where the device is the host."""
        return self._regions.get(int(step.region_words[RegionWord.ATTACHMENT]))

    def _publish_logprobs(self, step: StepNumber, places: torch.Tensor, logprobs: Logprobs) -> None:
        copy_rows(self._ring_write(BufferName.OUTPUT_LOGPROBS, step), places, logprobs.output)
        num_top = logprobs.top.shape[2]
        for name, values in ((BufferName.TOP_TOKENS, logprobs.top_tokens), (BufferName.TOP_LOGPROBS, logprobs.top)):
            copy_rows(self._ring_write(name, step)[:, :, :num_top], places, values)

    def _ring_write(self, name: BufferName, step: StepNumber, offset: int = 0) -> torch.Tensor:
        """The step's own row ([slots, ...]); in a graph, which finds it only later, all rows ([ring * slots, ...])."""
        if isinstance(step, CapturedStep):
            step.accesses.append(CapturedAccess(name, is_write=True))
            return self._flat[name]
        row = (step + offset) % self._ring
        self.access(name, [row], step, is_write=True)
        return self._ring_rows[name][row]


def _published(result: VerifyResult) -> torch.Tensor:
    """[B] int64: the accepted draft tokens, or NOT_FINITE."""
    if result.scores is None:
        return result.num_accepted
    places = torch.arange(result.scores.shape[1], device=result.scores.device)
    is_sound = (result.scores.isfinite() | (places > result.num_accepted[:, None])).all(dim=1)
    return torch.where(is_sound, result.num_accepted, NOT_FINITE)
