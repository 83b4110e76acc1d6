"""One step as the scheduler orders it and a worker carries it out, as plain data (`wire.py` encodes it)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.common.wire.sequence import SamplingParams

FINAL_NORM = 2**32 - 1
"""Among the layers whose inputs a draft reads: the output of the target's final norm."""


class Role(enum.Enum):
    """The role of a worker."""

    DRAFT = "draft"
    VERIFY = "verify"


class FenceName(enum.IntEnum):
    """The fences between the processes; each is signalled by one stream, with growing values."""

    DRAFT_DONE = 1
    """Draft's stream: the draft tokens of step `value` are written. One word for each attachment of a draft."""
    VERIFY_PUBLISH = 2
    """Verify's stream: what the scheduler consumes of step `value` is written."""
    VERIFY_STASH = 3
    """Verify's stream: what draft's next forward needs of step `value` is written. One word for each attachment."""


class StepKind(enum.IntEnum):
    """The work of a step."""

    PREFILL = 1
    """Run chunks of prompts through both models."""
    DECODE = 2
    """Draft K tokens a slot, verify them, accept a prefix and sample one more."""
    PLAIN = 3
    """Decode one token a slot without a draft. With chunks, it and DECODE are mixed steps: verify runs them, too."""
    CATCH_UP = 4
    """Draft alone, attached beside running sequences: take in chunks of their tokens, which are known."""


class FencePoint(NamedTuple):
    """A fence and the value that is signalled, or waited for (`>= value`)."""

    fence: FenceName
    value: int


class FenceOps(NamedTuple):
    """The points that a command waits for before its work, and signals during it, each at its own place."""

    waits: tuple[FencePoint, ...] = ()
    signals: tuple[FencePoint, ...] = ()

    def waits_for(self, fence: FenceName) -> int:
        """The value of a fence that the command waits for; 0 for none."""
        for point in self.waits:
            if point.fence is fence:
                return point.value
        return 0

    def without(self, fence: FenceName) -> FenceOps:
        """The same without the waits for a fence."""
        return FenceOps(tuple(point for point in self.waits if point.fence is not fence), self.signals)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens `[start, start + len(tokens))` of a slot's prompt, and of the output that its sequence came with."""

    slot: int
    start: int
    """Position of the first token of the chunk."""
    tokens: tuple[int, ...]
    is_last: bool
    """True if they end here: verify samples the first token after them."""


# Not frozen, here and below: the scheduler's loop makes some in each step, and a frozen one takes longer to make.
@dataclass(slots=True, kw_only=True)
class SlotUpdate:
    """A change of a slot before the step that it comes with; a worker keeps it until the next change."""

    slot: int
    generation: int
    """Grows each time the slot is given to another request."""
    first_page_index: int = 0
    """Index in the slot's page list of the first of `pages`; 0 replaces the list from its start."""
    pages: tuple[int, ...] = ()
    limit_tokens: int = 0
    """Positions from here on are never read: their KV goes to the padding page."""
    sampling: SamplingParams | None = None
    """Set when a request takes the slot; None leaves the slot's parameters as they are."""
    max_draft_tokens: int | None = None
    """Most draft tokens of the slot that verify accepts in a step; None is all."""
    prompt_tokens: int | None = None
    """Set for a sequence that comes with output: chunks hold both, and positions from here on are its output."""
    history_from: int = 0
    """Counts where `sampling` is set: position from which on the draft has the slot's history (keys and values, or a
    head's entries, each of the state at its position and the token behind it); its attention masks the rest."""
    cached_tokens: int = 0
    """Counts where `sampling` is set: tokens whose keys and values another sequence has left in `pages`. Chunks begin
    behind them, and nothing is written before."""
    has_cache_salt: bool = False
    """Counts where `sampling` is set: nothing of the request serves another one, nor anything of another one it."""


@dataclass(slots=True, kw_only=True)
class StepCommand:
    """The work of one worker in one step. Steps are numbered from 1 in each epoch of verify."""

    epoch: int
    """For a draft, its attachment."""
    step: int
    kind: StepKind
    slots: tuple[int, ...]
    """The slots that decode, without repetition; for PREFILL and CATCH_UP those of `chunks`, in their order."""
    ops: FenceOps = field(default_factory=FenceOps)
    chunks: tuple[PrefillChunk, ...] = ()
    """For verify, DECODE and PLAIN may have some as well, of other slots."""
    updates: tuple[SlotUpdate, ...] = ()
    wants_acknowledgement: bool = False
    """True if the worker is to say when the step is enqueued."""
    top_logprobs: int | None = None
    """Number of most likely tokens that verify publishes with each token's own logprob; None publishes no logprobs."""
    attachment: int = 0
    """For verify: the attachment of the draft that takes part; 0 for none."""
    drafts_none: bool = False
    """Only in a mixed DECODE, and in draft's part of it: draft takes in the stash alone, and verify decodes plainly."""

    @property
    def is_mixed(self) -> bool:
        """True if it decodes and takes in prompts."""
        return bool(self.chunks) and self.kind in (StepKind.DECODE, StepKind.PLAIN)
