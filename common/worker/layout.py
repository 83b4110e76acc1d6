"""The layout of the shared memory: the buffers of the FutureMap, their shapes, dtypes and writers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from slipstream.common.api.sampling import MAX_TOP_LOGPROBS
from slipstream.common.device.manifest import BufferSpec
from slipstream.common.worker.step import Role

PADDING_SLOT = 0
"""The row of the slot buffers that belongs to no request: any process may write it, and none uses it."""


class BufferName(enum.StrEnum):
    """A buffer of the FutureMap. Each has exactly one writer process; `FutureMapShape.specs` has the shapes."""

    # Verify publishes these for the scheduler, in the step's row of the ring; the last three if logprobs are asked for:
    # the output tokens' own, and the most likely tokens at each place with theirs.
    NEW_SEQ_LENS = "new_seq_lens"
    NUM_ACCEPTED = "num_accepted"
    OUTPUT_TOKENS = "output_tokens"
    OUTPUT_LOGPROBS = "output_logprobs"
    TOP_TOKENS = "top_tokens"
    TOP_LOGPROBS = "top_logprobs"
    # Verify stashes these in the slots' rows for the next forward of either worker.
    SEQ_LENS = "seq_lens"
    BONUS_TOKENS = "bonus_tokens"
    NUM_NEW = "num_new"
    LAST_TOKENS = "last_tokens"
    # Verify writes these for a draft that reads hidden states: of a slot's last tokens, and of the chunk of a prefill.
    HIDDEN_STATES = "hidden_states"
    PREFILL_HIDDEN = "prefill_hidden"
    # Draft writes these in the slots' rows; verify copies them in.
    DRAFT_TOKENS = "draft_tokens"
    # Start and end of the workers' work, in the step's row of the ring, for the scheduler.
    DRAFT_STAMPS = "draft_stamps"
    VERIFY_STAMPS = "verify_stamps"


SLOT_BUFFERS = frozenset(
    {
        BufferName.SEQ_LENS,
        BufferName.BONUS_TOKENS,
        BufferName.NUM_NEW,
        BufferName.LAST_TOKENS,
        BufferName.HIDDEN_STATES,
        BufferName.DRAFT_TOKENS,
    }
)
"""The buffers whose rows are slots."""


def ring_rows(run_ahead: int) -> int:
    """Returns the number of rows of buffers that are indexed by `step % ring_rows`.

    One row for each step that may be unfinished (`run_ahead + 1`), and a spare one: the writer of a
    step may poison the next step's row, and a step's stamps are read when the step after it is consumed.
    """
    return run_ahead + 2


def last_consumed(step: int, run_ahead: int) -> int:
    """Returns the step that must have been consumed before `step` is sent; 0 or less if there is none."""
    return step - run_ahead - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureMapShape:
    """The sizes of the FutureMap, the same in all three processes."""

    num_slots: int
    """Rows of the slot buffers, row 0 (padding) included."""
    run_ahead: int
    num_draft_tokens: int
    """K; 0 when nothing drafts."""
    chunk_tokens: int
    hidden_width: int = 0
    """Width of the hidden states that the draft reads; 0 if it reads none."""
    hidden_dtype: torch.dtype = torch.float32

    @property
    def ring(self) -> int:
        """Rows of the ring buffers."""
        return ring_rows(self.run_ahead)

    def specs(self) -> list[BufferSpec]:
        """Returns the buffers, without those that no process would read."""
        ring, slots, width = self.ring, self.num_slots, self.num_draft_tokens + 1
        verify, draft = Role.VERIFY.value, Role.DRAFT.value
        specs = [
            BufferSpec(BufferName.NEW_SEQ_LENS, (ring, slots), torch.int64, verify),
            BufferSpec(BufferName.NUM_ACCEPTED, (ring, slots), torch.int32, verify),
            BufferSpec(BufferName.OUTPUT_TOKENS, (ring, slots, width), torch.int64, verify),
            BufferSpec(BufferName.VERIFY_STAMPS, (ring, 2), torch.int64, verify),
            BufferSpec(BufferName.SEQ_LENS, (slots,), torch.int64, verify),
            BufferSpec(BufferName.BONUS_TOKENS, (slots,), torch.int64, verify),
            BufferSpec(BufferName.NUM_NEW, (slots,), torch.int64, verify),
            BufferSpec(BufferName.LAST_TOKENS, (slots, width), torch.int64, verify),
        ]
        if self.num_draft_tokens:
            specs.append(BufferSpec(BufferName.DRAFT_TOKENS, (slots, self.num_draft_tokens), torch.int64, draft))
            specs.append(BufferSpec(BufferName.DRAFT_STAMPS, (ring, 2), torch.int64, draft))
        if self.hidden_width:
            hidden, dtype = self.hidden_width, self.hidden_dtype
            specs.append(BufferSpec(BufferName.HIDDEN_STATES, (slots, width, hidden), dtype, verify))
            specs.append(BufferSpec(BufferName.PREFILL_HIDDEN, (self.chunk_tokens, hidden), dtype, verify))
        top = (ring, slots, width, MAX_TOP_LOGPROBS)
        specs.append(BufferSpec(BufferName.OUTPUT_LOGPROBS, (ring, slots, width), torch.float32, verify))
        specs.append(BufferSpec(BufferName.TOP_TOKENS, top, torch.int32, verify))
        specs.append(BufferSpec(BufferName.TOP_LOGPROBS, top, torch.float32, verify))
        return specs
