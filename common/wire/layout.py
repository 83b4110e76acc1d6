"""The layout of the shared memory: the buffers of the FutureMap, their shapes, dtypes and writers.

Each piece has one writer. The *results* are between verify and the scheduler, for a whole epoch of verify. An
attachment of a draft has two more, its *region*: `given` is what verify writes for the draft and never reads back,
`own` what the draft writes. So has an attachment of a grammar worker, which reads the results as well.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from slipstream.common.wire.manifest import BufferSpec
from slipstream.common.wire.sequence import MAX_TOP_LOGPROBS
from slipstream.common.wire.step import DRAFT_FENCES, FenceName, Role

PADDING_SLOT = 0
"""The row of the slot buffers that belongs to no request: any process may write it, and none uses it."""


NOT_FINITE = -1
"""NUM_ACCEPTED of a slot whose step has no tokens, as its logits are NaN or infinite."""
UNMASKED = -2
"""NUM_ACCEPTED of a slot with a constraint whose masks were not there: its step has no tokens."""
UNMATCHED = -3
"""NUM_ACCEPTED of a slot with a constraint whose matcher has failed, so that it never has masks."""


class BufferName(enum.StrEnum):
    """A buffer of the FutureMap. Each has exactly one writer process; `EpochShape` and `DraftShape` have the shapes."""

    # Verify publishes these for the scheduler, in the step's row of the ring; the last three if logprobs are asked for:
    # the output tokens' own, and the most likely tokens at each place with theirs.
    NEW_SEQ_LENS = "new_seq_lens"
    NUM_ACCEPTED = "num_accepted"
    OUTPUT_TOKENS = "output_tokens"
    OUTPUT_LOGPROBS = "output_logprobs"
    TOP_TOKENS = "top_tokens"
    TOP_LOGPROBS = "top_logprobs"
    # Verify stashes these in the slots' rows for the next forward of the draft; its own copies are not shared.
    SEQ_LENS = "seq_lens"
    BONUS_TOKENS = "bonus_tokens"
    NUM_NEW = "num_new"
    LAST_TOKENS = "last_tokens"
    # Verify writes these for a draft that reads hidden states: of a slot's last tokens, and of the chunk of a prefill.
    HIDDEN_STATES = "hidden_states"
    PREFILL_HIDDEN = "prefill_hidden"
    # Draft writes these in the slots' rows; verify copies the tokens in.
    DRAFT_TOKENS = "draft_tokens"
    NUM_PROPOSED = "num_proposed"
    # Start and end of the workers' work, in the step's row of the ring, for the scheduler. Verify copies the draft's,
    # of which each row has those of the decode part and those of the prefill part.
    DRAFT_STAMPS = "draft_stamps"
    VERIFY_STAMPS = "verify_stamps"
    # Verify writes a clamped copy of the draft tokens for the grammar worker, and that writes the masks and, after a
    # slot's masks, the step that they are for.
    COPIED_TOKENS = "copied_tokens"
    MASKS = "masks"
    MASK_STAMPS = "mask_stamps"
    # The target's weights, which verify lends to a draft and nobody writes while it does.
    EMBEDDING = "embedding"
    OUTPUT = "output"


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


SLOT_BUFFERS = frozenset(
    {
        BufferName.SEQ_LENS,
        BufferName.BONUS_TOKENS,
        BufferName.NUM_NEW,
        BufferName.LAST_TOKENS,
        BufferName.HIDDEN_STATES,
        BufferName.DRAFT_TOKENS,
        BufferName.NUM_PROPOSED,
        BufferName.COPIED_TOKENS,
        BufferName.MASKS,
        BufferName.MASK_STAMPS,
    }
)
"""The buffers whose rows are slots."""
LENT_WEIGHTS = (BufferName.EMBEDDING, BufferName.OUTPUT)
"""The buffers of weights, which no step writes."""

DECODE_PART, PREFILL_PART = range(2)
"""The two parts of a draft's work in a step, by their places in its stamps."""
RESULT_FENCES = (FenceName.VERIFY_PUBLISH,)
GIVEN_FENCES = (FenceName.VERIFY_STASH,)
OWN_FENCES = DRAFT_FENCES
"""The fence words beside the results, and in the two pieces of a region."""


GRAMMAR_GIVEN_FENCES = (FenceName.VERIFY_COPIED,)
GRAMMAR_OWN_FENCES = (FenceName.GRAMMAR_READY,)
"""The fence words in the two pieces of a grammar worker's region."""


def ring_rows(run_ahead: int) -> int:
    """Returns the number of rows of buffers that are indexed by `step % ring_rows`.

    One row for each step that may be unfinished (`run_ahead + 1`), and a spare one: the writer of a
    step may poison the next step's row, and a step's stamps are read when the step after it is consumed.
    """
    return run_ahead + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes of a step."""

    num_slots: int
    """Rows of the slot buffers, row 0 (padding) included."""
    run_ahead: int
    num_draft_tokens: int
    """K. Of an epoch of verify: the most that any draft may have; 0 when nothing ever drafts."""
    chunk_tokens: int

    @property
    def ring(self) -> int:
        """Rows of the ring buffers."""
        return ring_rows(self.run_ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochShape(StepShape):
    """The sizes of an epoch of verify, which may outlive drafts."""

    def specs(self) -> list[BufferSpec]:
        """Returns the buffers of the results, only between verify and the scheduler; their fence: RESULT_FENCES."""
        ring, verify = self.ring, Role.VERIFY.value
        places = (ring, self.num_slots, self.num_draft_tokens + 1)
        return [
            BufferSpec(BufferName.NEW_SEQ_LENS, places[:2], torch.int64, verify),
            BufferSpec(BufferName.NUM_ACCEPTED, places[:2], torch.int32, verify),
            BufferSpec(BufferName.OUTPUT_TOKENS, places, torch.int64, verify),
            BufferSpec(BufferName.VERIFY_STAMPS, (ring, 2), torch.int64, verify),
            BufferSpec(BufferName.DRAFT_STAMPS, (ring, 2, 2), torch.int64, verify),
            BufferSpec(BufferName.OUTPUT_LOGPROBS, places, torch.float32, verify),
            BufferSpec(BufferName.TOP_TOKENS, (*places, MAX_TOP_LOGPROBS), torch.int32, verify),
            BufferSpec(BufferName.TOP_LOGPROBS, (*places, MAX_TOP_LOGPROBS), torch.float32, verify),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape(StepShape):
    """The sizes of an attachment of a draft: of the memory between it and verify."""

    hidden_width: int = 0
    """Width of the hidden states that the draft reads; 0 if it reads none."""
    hidden_dtype: torch.dtype = torch.float32

    def given_specs(self) -> list[BufferSpec]:
        """Returns the buffers that verify writes for the draft; their fence: GIVEN_FENCES."""
        slots, width, verify = self.num_slots, self.num_draft_tokens + 1, Role.VERIFY.value
        specs = [
            BufferSpec(BufferName.SEQ_LENS, (slots,), torch.int64, verify),
            BufferSpec(BufferName.BONUS_TOKENS, (slots,), torch.int64, verify),
            BufferSpec(BufferName.NUM_NEW, (slots,), torch.int64, verify),
            BufferSpec(BufferName.LAST_TOKENS, (slots, width), torch.int64, verify),
        ]
        if self.hidden_width:
            hidden, dtype = self.hidden_width, self.hidden_dtype
            specs.append(BufferSpec(BufferName.HIDDEN_STATES, (slots, width, hidden), dtype, verify))
            specs.append(BufferSpec(BufferName.PREFILL_HIDDEN, (self.chunk_tokens, hidden), dtype, verify))
        return specs

    def own_specs(self) -> list[BufferSpec]:
        """Returns the buffers that the draft writes; their fence: OWN_FENCES."""
        draft = Role.DRAFT.value
        return [
            BufferSpec(BufferName.DRAFT_TOKENS, (self.num_slots, self.num_draft_tokens), torch.int64, draft),
            BufferSpec(BufferName.NUM_PROPOSED, (self.num_slots,), torch.int64, draft),
            BufferSpec(BufferName.DRAFT_STAMPS, (self.ring, 2, 2), torch.int64, draft),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarShape:
    """The sizes of the memory between verify and a grammar worker."""

    num_slots: int
    """Row 0 (padding) included."""
    num_draft_tokens: int
    """The most that any draft of the epoch may have."""
    vocab_size: int

    def given_specs(self) -> list[BufferSpec]:
        """Returns the buffers that verify writes for the grammar worker; their fence: GRAMMAR_GIVEN_FENCES."""
        # A buffer without columns could not be mapped.
        places = (self.num_slots, max(self.num_draft_tokens, 1))
        return [BufferSpec(BufferName.COPIED_TOKENS, places, torch.int64, Role.VERIFY.value)]

    def own_specs(self) -> list[BufferSpec]:
        """Returns the buffers that the grammar worker writes; their fence: GRAMMAR_OWN_FENCES."""
        places, num_words = (self.num_slots, self.num_draft_tokens + 1), -(-self.vocab_size // 32)
        return [
            BufferSpec(BufferName.MASKS, (*places, num_words), torch.int32, Role.GRAMMAR.value),
            BufferSpec(BufferName.MASK_STAMPS, places[:1], torch.int64, Role.GRAMMAR.value),
        ]
