"""The names of the shared buffers, one for each row of the FutureMap's table."""

from __future__ import annotations

import enum

PADDING_SLOT = 0
"""The row of the slot buffers that stands for no request: anyone may write it, and nobody uses it."""


class BufferName(enum.StrEnum):
    """A buffer of the FutureMap. Each has exactly one writer process."""

    NEW_SEQ_LENS = "new_seq_lens"
    """[ring, slots]. Verify publishes it for the scheduler."""
    NUM_ACCEPTED = "num_accepted"
    """[ring, slots]. Verify publishes it for the scheduler."""
    OUTPUT_TOKENS = "output_tokens"
    """[ring, slots, K+1]. Verify publishes it for the scheduler."""
    OUTPUT_LOGPROBS = "output_logprobs"
    """[ring, slots, K+1]. Verify publishes it for the scheduler in steps that are asked for logprobs."""
    TOP_TOKENS = "top_tokens"
    """[ring, slots, K+1, 20]. As OUTPUT_LOGPROBS: the most likely tokens at each place."""
    TOP_LOGPROBS = "top_logprobs"
    """[ring, slots, K+1, 20]. As OUTPUT_LOGPROBS: those of TOP_TOKENS."""
    SEQ_LENS = "seq_lens"
    """[slots]. Verify stashes it for the next forward of either worker."""
    BONUS_TOKENS = "bonus_tokens"
    """[slots]. Verify stashes it for the next forward of either worker."""
    NUM_NEW = "num_new"
    """[slots]. Verify stashes it for the next forward of either worker."""
    LAST_TOKENS = "last_tokens"
    """[slots, K+1]. Verify stashes it for the next forward of either worker."""
    HIDDEN_STATES = "hidden_states"
    """[slots, K+1, width]. Verify stashes it for a draft that reads hidden states."""
    PREFILL_HIDDEN = "prefill_hidden"
    """[chunk, width], one for all slots. Verify fills it for a draft that reads hidden states."""
    DRAFT_TOKENS = "draft_tokens"
    """[slots, nodes]. Draft writes it, verify copies it in."""
    DRAFT_STAMPS = "draft_stamps"
    """[ring]. Start and end of draft's work, for the scheduler."""
    VERIFY_STAMPS = "verify_stamps"
    """[ring]. Start and end of verify's work, for the scheduler."""


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
    """Rows of the buffers that are indexed by `step % ring_rows`.

    One row for each step that may be unfinished (`run_ahead + 1`), and a spare one: the writer of a
    step may poison the next step's row, and a step's stamps are read when the step after it is consumed.
    """
    return run_ahead + 2


def last_consumed(step: int, run_ahead: int) -> int:
    """The step that must have been consumed before `step` is sent; 0 or less where there is none."""
    return step - run_ahead - 1
