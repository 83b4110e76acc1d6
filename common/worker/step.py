"""One step as the scheduler orders it and a worker carries it out.

Plain data: protobuf is turned into these at the edge (`wire.py`), and neither the scheduler's
loop nor a worker's engine sees anything else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.common.api.sampling import SamplingParams


class Role(enum.Enum):
    """Which of the two workers a process is."""

    DRAFT = "draft"
    VERIFY = "verify"


class FenceName(enum.IntEnum):
    """The fences between the processes; each is signalled by one stream, with growing values."""

    DRAFT_DONE = 1
    """Draft's stream: the draft tokens of step `value` are written."""
    VERIFY_PUBLISH = 2
    """Verify's stream: what the scheduler consumes of step `value` is written."""
    VERIFY_STASH = 3
    """Verify's stream: what the next forward needs of step `value` is written."""


class StepKind(enum.IntEnum):
    """What a step does with its slots."""

    PREFILL = 1
    """Run chunks of prompts through both models."""
    DECODE = 2
    """Draft K tokens a slot, verify them, accept a prefix and sample one more."""
    PLAIN = 3
    """Decode one token a slot without a draft."""


class FencePoint(NamedTuple):
    """A fence and the value it is signalled with, or waited for (`>= value`)."""

    fence: FenceName
    value: int


class FenceOps(NamedTuple):
    """What one command waits for before its work, and signals during it, each at its own place."""

    waits: tuple[FencePoint, ...] = ()
    signals: tuple[FencePoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens `[start, start + len(tokens))` of a slot's prompt."""

    slot: int
    start: int
    """Position of the first token of the chunk."""
    tokens: tuple[int, ...]
    is_last: bool
    """Whether the prompt ends here: verify samples the first token after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUpdate:
    """What changes for a slot before the step it comes with; a worker keeps it until the next change."""

    slot: int
    generation: int
    """Grows each time the slot is given to another request."""
    first_page_index: int = 0
    """Where in the slot's page list `pages` begin; 0 replaces the list from its start."""
    pages: tuple[int, ...] = ()
    limit_tokens: int = 0
    """Positions from here on are never read: their KV goes to the padding page."""
    sampling: SamplingParams | None = None
    """Set when a request takes the slot; None leaves the slot's parameters as they are."""
    max_draft_tokens: int | None = None
    """Draft tokens of the slot that verify accepts in a step at most; None is as many as are drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommand:
    """What one worker does in one step. Steps are numbered from 1 in each epoch."""

    epoch: int
    step: int
    kind: StepKind
    slots: tuple[int, ...]
    """The slots that take part, without repetition; for a prefill those of `chunks`, in their order."""
    ops: FenceOps = field(default_factory=FenceOps)
    chunks: tuple[PrefillChunk, ...] = ()
    updates: tuple[SlotUpdate, ...] = ()
    wants_acknowledgement: bool = False
    """Whether the worker is to say when the step is enqueued."""
    top_logprobs: int | None = None
    """How many of the most likely tokens verify publishes with each token's own logprob; None is no logprobs."""
