"""One step as the scheduler orders it and a worker carries it out, as plain data (`worker.py` encodes it)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.common.wire.sequence import SamplingParams

PROTOCOL_VERSION = 4
"""Grows when a message of the worker contract to draft or verify changes its meaning."""
GRAMMAR_PROTOCOL_VERSION = 5
"""Grows when a message of the worker contract to a grammar worker changes its meaning: drafts need no change then."""
FINAL_NORM = 2**32 - 1
"""Among the layers whose inputs a draft reads: the output of the target's final norm."""


EVEN_DRAFT_TOKENS = (1, 2, 4, 7)
"""Numbers of draft tokens for which workers have graphs beside those for K: few, as each takes memory and time."""


class Role(enum.Enum):
    """The role of a worker."""

    DRAFT = "draft"
    VERIFY = "verify"
    GRAMMAR = "grammar"

    @property
    def protocol_version(self) -> int:
        """The version of the contract that such a worker and this release speak."""
        return GRAMMAR_PROTOCOL_VERSION if self is Role.GRAMMAR else PROTOCOL_VERSION


class RowTokens(enum.IntEnum):
    """How the numbers of draft tokens of a step's rows may differ, the least first."""

    WHOLE = 1
    """All rows have K, or all have 0."""
    EVEN = 2
    """All rows have as many: K, 0, or one of EVEN_DRAFT_TOKENS below K."""
    RAGGED = 3
    """Each row has its own number, 0 to K."""

    def evens(self, num_draft_tokens: int) -> tuple[int, ...]:
        """The numbers above 0 that all rows of a step may have, K the last of them; empty where each has its own."""
        if self is RowTokens.RAGGED:
            return ()
        few = EVEN_DRAFT_TOKENS if self is RowTokens.EVEN else ()
        return (*(number for number in few if number < num_draft_tokens), num_draft_tokens)


class FenceName(enum.IntEnum):
    """The fences between the processes; each is signalled by one stream, with growing values."""

    DRAFT_PROPOSED = 1
    """Draft's stream: its decode part of step `value` is done, the stash read and the draft tokens written. This word,
    DRAFT_PREFILLED's and VERIFY_STASH's belong to an attachment of a draft."""
    VERIFY_PUBLISH = 2
    """Verify's stream: what the scheduler consumes of step `value` is written."""
    VERIFY_STASH = 3
    """Verify's stream: what draft's next forward needs of step `value` is written."""
    DRAFT_PREFILLED = 4
    """Draft's stream: its prefill part of step `value` is done, and the chunks' hidden states are read."""
    VERIFY_COPIED = 5
    """Verify's stream: the draft tokens of step `value` are copied in, and a clamped copy is there for the grammar
    worker. This word and GRAMMAR_READY's belong to an attachment of a grammar worker."""
    GRAMMAR_READY = 6
    """The grammar worker: the masks of step `value` are written, and what it reads of verify is read."""


DRAFT_FENCES = (FenceName.DRAFT_PROPOSED, FenceName.DRAFT_PREFILLED)
"""The fences that a draft signals: in a step that has both parts in this order."""


class WaitPlace(enum.IntEnum):
    """Where in a step's work a wait stands, in the order of the work."""

    START = 1
    """Before all of it: draft's decode part reads the stash, verify copies draft tokens in."""
    PREFILL_HIDDEN = 2
    """Before `prefill_hidden` is written by verify, or read by draft in its prefill part."""
    SAMPLING = 3
    """Before verify samples, publishes and stashes."""


class FencePoint(NamedTuple):
    """A fence and the value that it is signalled with."""

    fence: FenceName
    value: int


class FenceWait(NamedTuple):
    """A wait of a command, for a fence to reach at least a value."""

    fence: FenceName
    value: int
    place: WaitPlace = WaitPlace.START


class FenceOps(NamedTuple):
    """The waits and the signals of a command, each at its own place in the work."""

    waits: tuple[FenceWait, ...] = ()
    """In the order of their places."""
    signals: tuple[FencePoint, ...] = ()

    @property
    def last_of_draft(self) -> FencePoint | None:
        """The last point of draft's stream that a command of verify waits for; None if it waits for none."""
        for wait in reversed(self.waits):
            if wait.fence in DRAFT_FENCES:
                return FencePoint(wait.fence, wait.value)
        return None

    def waits_for(self, fence: FenceName, place: WaitPlace) -> int:
        """The value of a fence that the command waits for at a place; 0 for none."""
        return next((wait.value for wait in self.waits if wait.fence is fence and wait.place is place), 0)

    def without(self, *fences: FenceName) -> FenceOps:
        """Returns these operations without the waits for some fences."""
        return FenceOps(tuple(wait for wait in self.waits if wait.fence not in fences), self.signals)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens `[start, start + len(tokens))` of a slot's prompt, and of the output that its sequence arrived with."""

    slot: int
    start: int
    """Position of the first token of the chunk."""
    tokens: tuple[int, ...]
    is_last: bool
    """True if they end here: verify samples the first token after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRow:
    """A slot with a constraint in a step, for the grammar worker."""

    slot: int
    digest: bytes = b""
    """The grammar's, see `grammar_digest`, for a sequence that the worker does not know; else empty."""
    num_known: int = 0
    """Tokens of the output that earlier commands had; 0 for such a sequence."""
    tokens: tuple[int, ...] = ()
    """Tokens of the output after those, as far as they are known."""
    num_draft_tokens: int = 0


# Not frozen, here and below: the scheduler's loop makes some in each step, and a frozen one takes longer to make.
@dataclass(slots=True, kw_only=True)
class SlotUpdate:
    """A change of a slot before the step that it is sent with; a worker keeps it until the next change."""

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
    """Most draft tokens of the slot that verify accepts in a step; None: all."""
    prompt_tokens: int | None = None
    """Set for a sequence that has output already: chunks hold both, and positions from here on are its output."""
    history_from: int = 0
    """Counts where `sampling` is set: position from which on the draft has the slot's history (keys and values, or a
    head's entries, each of the state at its position and the token after it); its attention masks the rest."""
    cached_tokens: int = 0
    """Counts where `sampling` is set: tokens whose keys and values another sequence has left in `pages`. Chunks begin
    after them, and nothing is written before."""
    has_cache_salt: bool = False
    """Counts where `sampling` is set: nothing of the request serves another one, nor anything of another one it."""


@dataclass(slots=True, kw_only=True)
class StepCommand:
    """The work of one worker in one step: rows that decode, and chunks of prompts. Either may be empty.

    Steps are numbered from 1 in each epoch of verify.
    """

    epoch: int
    """For a draft, its attachment."""
    step: int
    slots: tuple[int, ...] = ()
    """The slots that decode, without repetition; for a draft, those of them that it drafts for or takes in."""
    num_draft_tokens: tuple[int, ...] = ()
    """For each of `slots` the number of its draft tokens; empty where that is 0 for all."""
    ops: FenceOps = field(default_factory=FenceOps)
    chunks: tuple[PrefillChunk, ...] = ()
    """Of other slots."""
    updates: tuple[SlotUpdate, ...] = ()
    wants_acknowledgement: bool = False
    """True if the worker is to say when the step is enqueued."""
    top_logprobs: int | None = None
    """Number of most likely tokens that verify publishes with each token's own logprob; None publishes no logprobs."""
    attachment: int = 0
    """For verify: the attachment of the draft that takes part; 0 for none."""
    grammar: int = 0
    """For verify: the attachment of the grammar worker; 0 for none."""
    constrained: tuple[int, ...] = ()
    """For verify: the slots that yield and have a constraint."""
    grammar_rows: tuple[GrammarRow, ...] = ()
    """For the grammar worker: the same slots."""
    consumed: int = 0
    """For the grammar worker: the last step whose tokens are in `grammar_rows`."""
    catches_up: bool = False
    """True for a draft that attached beside running sequences: the chunks are known tokens of theirs, prompt and output
    alike, without hidden states. Its number is that of the last step before it."""

    @property
    def num_grammar_tokens(self) -> int:
        """Tokens of outputs that it brings a grammar worker."""
        return sum(len(row.tokens) for row in self.grammar_rows)

    @property
    def waits_for_stash_read(self) -> bool:
        """True for a step without draft tokens that waits for draft's decode part, which takes in the stash."""
        return self.ops.waits_for(FenceName.DRAFT_PROPOSED, WaitPlace.SAMPLING) > 0

    @property
    def copies_tokens(self) -> bool:
        """True if verify copies the draft tokens out to a grammar worker."""
        return bool(self.constrained) and any(point.fence is FenceName.VERIFY_COPIED for point in self.ops.signals)

    @property
    def most_draft_tokens(self) -> int:
        """The most draft tokens of a row; 0 decodes all of them plainly."""
        return max(self.num_draft_tokens, default=0)
