"""The plain data of the scheduler: sequences, steps and what comes of them, drafts and why they leave.

Nothing here imports another module of the scheduler, so every one of them may import this.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.common.worker.step import PrefillChunk, SlotUpdate, StepCommand, StepKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from slipstream.common.wire.job import TokenLogprobs
    from slipstream.common.wire.sequence import SequenceSpec
    from slipstream.common.worker.step import FenceOps

    Ints = NDArray[np.int64]
    Counts = NDArray[np.int32]
    Bools = NDArray[np.bool_]

NO_LIMIT = 1 << 62
"""More tokens than a sequence has."""
GOES_ON, STOP, LENGTH = 0, 1, 2
"""How a sequence goes on after a step, or why it ends."""
Interval = tuple[int, int]
"""Start and end of a worker's part of a step, in nanoseconds of the clock that all stamps share."""
NO_LOGPROBS: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})
_KEY_BYTES = 16


class RestCause(enum.Enum):
    """Why the draft was put to rest."""

    SLOWER = "slower"
    """Plain steps bring tokens faster."""
    PROBE = "probe"
    """To measure plain steps, which were not faster."""


class LossCause(enum.Enum):
    """Why a draft takes part in no further step."""

    DIED = "died"
    """Its connection ended."""
    TIMEOUT = "timeout"
    """A step waited longer for it than --draft-timeout-ms."""
    REFUSED = "refused"
    """It refused a command."""
    SWAPPED = "swapped"
    """Another one has taken its place."""
    LEFT = "left"
    """It was taken away on request."""


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """The properties of the attached draft that the order of the steps depends on."""

    is_present: bool
    reads_hidden: bool = False
    """True if it reads the target's hidden states."""


class DraftKV(NamedTuple):
    """The draft whose keys and values a page has to have beside the target's, and how far they can go."""

    attachment: int = 0
    """Its number; 0 if none drafts."""
    is_paged: bool = True
    """False if it knows sequences by slot, not by page: then it has to be sent all of their tokens."""
    tokens_ahead: int = 0
    """Of a head: the tokens behind a position that its entry there depends on."""
    context_tokens: int = NO_LIMIT
    """Its context: the longest sequence that it has keys and values for."""


NO_DRAFT = DraftKV()


class Prefix:
    """The pages of one sequence as the cache knows them."""

    __slots__ = ("_keys", "_page_tokens", "_salt", "draft", "num_kept")

    def __init__(self, salt: str, page_tokens: int) -> None:
        self.draft = NO_DRAFT
        """Has taken part in all steps of the sequence."""
        self.num_kept = 0
        """Pages that the sequence has put into the cache, or has from there."""
        self._salt = blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()
        self._page_tokens = page_tokens
        self._keys: list[bytes] = []

    def keys(self, tokens: NDArray[np.int32], num_pages: int) -> list[bytes]:
        """Returns the keys of the first `num_pages` pages. `tokens`: the sequence's, at least as many as they hold."""
        page_tokens, keys = self._page_tokens, self._keys
        content = tokens[len(keys) * page_tokens : num_pages * page_tokens].tobytes()
        size, before = tokens.itemsize * page_tokens, keys[-1] if keys else self._salt
        for start in range(0, len(content), size):
            before = blake2b(before + content[start : start + size], digest_size=_KEY_BYTES).digest()
            keys.append(before)
        return keys[:num_pages]

    @property
    def filling(self) -> list[bytes]:
        """Keys of the pages that others wait for while the sequence takes in its prompt."""
        return self._keys[self.num_kept :]


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A slot, a row of every shared buffer, for as long as one sequence has it."""

    slot: int
    generation: int
    """Unique among the leases of a slot: a result of another generation belongs to another sequence."""


NO_SLOT = SlotLease(0, 0)
"""The lease of a sequence that has no slot: of `PADDING_SLOT`, whose module imports torch."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence from its submission to its end. Its lengths while it runs are in `SlotAccounts`."""

    spec: SequenceSpec
    id: int = 0
    """Chosen by its gateway."""
    stream: int = 0
    """Number of the gateway's stream."""
    rank: tuple[int, int, int] = (0, 0, 0)
    """Its place in the queue's order, the lowest first, chosen by the queue: negative priority, arrival, number."""
    num_overtaken: int = 0
    """Sequences of a higher rank that were started before it. Belongs to the queue's lock."""
    is_queued: bool = False
    """True while it is in the queue. Belongs to the queue's lock."""
    is_over: bool = False
    """True if no more output comes. This and the rest belong to the loop's thread."""
    was_preempted: bool = False
    """True once it has given its slot and its pages back for another one's sake; it waits again then."""
    lease: SlotLease = NO_SLOT
    """Its slot, from its admission on."""
    pages: list[int] = field(default_factory=list)
    turn: tuple[int, int] = (0, 0)
    """Its place among the prompts that are taken in, the lowest first: see `Prompts.add`."""
    num_cached: int = 0
    """Of `tokens`, how many the prefix cache had when it began."""
    is_beyond_draft: bool = False
    """True if it is too long for the draft that took part last, so that verify accepts no draft tokens of it."""
    num_prefilled: int = 0
    """Of `tokens`, how many were sent to the workers, or the prefix cache had."""
    was_looked_up: bool = False
    """True once what the prefix cache had was counted."""
    prefix: Prefix = field(init=False)
    """Its pages as the prefix cache knows them."""
    tokens: tuple[int, ...] = field(init=False)
    """The tokens to prefill: the prompt, and the output that it came with."""

    def __post_init__(self) -> None:
        self.tokens = self.spec.prompt + self.spec.output

    @property
    def key(self) -> tuple[int, int]:
        """Stream and id."""
        return self.stream, self.id

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.spec.prompt) + self.spec.max_new_tokens

    @property
    def is_prefilling(self) -> bool:
        """True if some of its tokens were not sent yet."""
        return self.num_prefilled < len(self.tokens)

    def preempt(self, output: tuple[int, ...]) -> None:
        """Goes back to where it has no slot, with the output that it has."""
        self.spec = replace(self.spec, output=output)
        self.tokens = self.spec.prompt + output
        self.was_preempted, self.lease, self.num_prefilled = True, NO_SLOT, 0

    @property
    def max_draft_tokens(self) -> int | None:
        """Draft tokens that verify may accept in a step; None is all of them."""
        return 0 if self.is_beyond_draft else self.spec.max_draft_tokens

    def num_drafted(self, num_draft_tokens: int) -> int:
        """How many of the K tokens drafted in a step are for this sequence."""
        most = self.max_draft_tokens
        return num_draft_tokens if most is None else min(num_draft_tokens, most)

    def slot_update(self) -> SlotUpdate:
        """The parameters that the workers get before its first step."""
        spec = self.spec
        return SlotUpdate(
            slot=self.lease.slot,
            generation=self.lease.generation,
            pages=tuple(self.pages),
            limit_tokens=self.num_tokens_at_most,
            sampling=spec.sampling,
            max_draft_tokens=self.max_draft_tokens,
            prompt_tokens=len(spec.prompt) if spec.output else None,
            cached_tokens=self.num_cached,
            has_cache_salt=bool(spec.cache_salt),
        )

    def update_of_running(self, *, history_from: int) -> SlotUpdate:
        """The same for a draft that comes while it runs. `history_from`: see `SlotUpdate`."""
        prompt_tokens = len(self.spec.prompt)
        return replace(self.slot_update(), prompt_tokens=prompt_tokens, history_from=history_from, cached_tokens=0)

    def page_update(self, first: int) -> SlotUpdate:
        """Its pages from index `first` on, for a worker that has those before, and what may change while it runs."""
        return SlotUpdate(
            slot=self.lease.slot,
            generation=self.lease.generation,
            first_page_index=first,
            pages=tuple(self.pages[first:]),
            limit_tokens=self.num_tokens_at_most,
            max_draft_tokens=self.max_draft_tokens,
            prompt_tokens=len(self.spec.prompt),
        )

    def next_chunk(self, max_tokens: int) -> PrefillChunk:
        """Takes the next of its tokens to prefill, `max_tokens` at most."""
        start = self.num_prefilled
        tokens = self.tokens[start : start + max_tokens]
        self.num_prefilled += len(tokens)
        is_last = self.num_prefilled == len(self.tokens)
        return PrefillChunk(slot=self.lease.slot, start=start, tokens=tokens, is_last=is_last)


class OrderedStep(NamedTuple):
    """A step as the plan sees it."""

    step: int
    kind: StepKind
    rows: int
    """Mask of the slots that take part."""
    prompts: int = 0
    """In a DECODE step: mask of the slots whose prompts it takes in, too, which makes it a mixed one."""

    @property
    def drafted(self) -> int:
        """The number of draft's first command: of two numbers of a mixed step the first."""
        return self.step - 1 if self.prompts else self.step


class PlannedStep(NamedTuple):
    """The waits and signals of a step's commands."""

    draft: FenceOps | None
    """None where the step has no command for draft."""
    verify: FenceOps
    draft_prompts: FenceOps | None = None
    """For draft's second command in a mixed step, which takes in the prompts."""


def mask_of(slots: Iterable[int]) -> int:
    """The slots as a mask of rows."""
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Some slots that take part in a step, with the leases that they have then."""

    slots: tuple[int, ...]
    rows: NDArray[np.int64]
    """The same numbers."""
    generations: NDArray[np.int64]
    """The generation of each slot's lease: a result for another lease belongs to another sequence."""
    mask: int
    """The same slots as a mask of rows."""

    @classmethod
    def of(cls, leases: Iterable[SlotLease]) -> StepSlots:
        """Makes them of the leases of these slots, in their order."""
        leases = list(leases)
        slots = tuple([lease.slot for lease in leases])
        generations = np.array([lease.generation for lease in leases], np.int64)
        return cls(slots, np.array(slots, np.int64), generations, mask_of(slots))

    def __add__(self, other: StepSlots) -> StepSlots:
        """These, then the others."""
        rows, generations = (np.concatenate(pair) for pair in zip(self._arrays, other._arrays, strict=True))
        return StepSlots((*self.slots, *other.slots), rows, generations, self.mask | other.mask)

    @property
    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.rows, self.generations


class Step(NamedTuple):
    """A step: the sequences that take part, and the data that the workers need for it."""

    number: int
    """The last one of its numbers: a mixed step that is drafted has two, the first for the draft's first command."""
    kind: StepKind
    """The kind of the step; a mixed step has that of the step that decodes alike, PLAIN or DECODE."""
    members: StepSlots
    """The slots that decode; in a prefill, those that take in prompts."""
    yielding: StepSlots
    """The slots that the step brings tokens for: those that decode first."""
    most_more: NDArray[np.int32]
    """The most tokens that it brings to each of `yielding`."""
    is_bounded: bool = False
    """True if some of these are less than K + 1."""
    num_draft_tokens: int = 0
    """K of the draft that takes part, in a decode step; 0 in others, and in a mixed one that drafts none."""
    is_beyond_draft: NDArray[np.bool_] | None = None
    """For each of `yielding`, whether it is decoded plainly as it is too long for the draft; None if none is."""
    top_logprobs: Mapping[int, int] = MappingProxyType({})
    """By place in `yielding`: how many of the most likely tokens a sequence asked for that asked for logprobs."""
    chunks: tuple[PrefillChunk, ...] = ()
    num_prompt_tokens: int = 0
    """Tokens of `chunks`."""
    updates: tuple[SlotUpdate, ...] = ()
    is_mixed: bool = False
    """True if it decodes and takes in prompts."""

    @property
    def drafts_none(self) -> bool:
        """True if it decodes plainly though there is a draft, which takes in the stash as in every other step."""
        return self.kind is StepKind.DECODE and not self.num_draft_tokens

    @property
    def ordered(self) -> OrderedStep:
        """The step as the plan sees it."""
        prompts = mask_of(chunk.slot for chunk in self.chunks) if self.is_mixed else 0
        if prompts and self.kind is StepKind.PLAIN:
            return OrderedStep(self.number, StepKind.PREFILL, self.members.mask | prompts)
        return OrderedStep(self.number, self.kind, self.members.mask, prompts)

    def command(self, ops: FenceOps, epoch: int, attachment: int = 0) -> StepCommand:
        """Makes the command for verify. `attachment`: the number of the draft's that takes part; 0 for none."""
        return StepCommand(
            epoch=epoch,
            step=self.number,
            kind=self.kind,
            slots=self.members.slots,
            ops=ops,
            chunks=self.chunks,
            updates=self.updates,
            top_logprobs=max(self.top_logprobs.values()) if self.top_logprobs else None,
            attachment=attachment,
            drafts_none=self.drafts_none,
        )

    def commands_to_draft(self, planned: PlannedStep, attachment: int) -> list[StepCommand]:
        """Makes the commands for a draft: none, one, or two in a mixed step, the first of which drafts."""
        if planned.draft is None:
            return []
        command = self.command(planned.draft, attachment)
        if not self.is_mixed:
            return [command]
        slots = tuple([chunk.slot for chunk in self.chunks])
        taking_in = replace(command, kind=StepKind.PREFILL, slots=slots)
        if planned.draft_prompts is None:
            return [taking_in]
        return [
            replace(command, step=self.ordered.drafted, chunks=()),
            replace(taking_in, ops=planned.draft_prompts, updates=(), drafts_none=False),
        ]


class Decoding(NamedTuple):
    """The sequences that decode, the same from step to step until one comes, goes or is sure to end."""

    members: StepSlots
    most_more: NDArray[np.int32]
    """Most tokens that a step brings to each."""
    is_bounded: bool
    """True if some of these are less than K + 1."""
    num_draft_tokens: int
    """The K that it was made for."""
    num_drafted: int
    """K of its steps; 0 if they are plain."""
    is_beyond_draft: NDArray[np.bool_] | None
    """See `DraftReach.is_beyond`."""
    top_logprobs: dict[int, int]
    drafts_none: bool = False
    """See `Step.drafts_none`."""

    def drafting_none(self) -> Decoding:
        """The same in a step that drafts none, though there is a draft."""
        return self._replace(most_more=np.ones_like(self.most_more), is_bounded=False, drafts_none=True)

    def step(self, number: int, updates: tuple[SlotUpdate, ...]) -> Step:
        """A step of these sequences alone."""
        return Step(
            number=number,
            kind=StepKind.DECODE if self.num_drafted else StepKind.PLAIN,
            members=self.members,
            yielding=self.members,
            num_draft_tokens=0 if self.drafts_none else self.num_drafted,
            most_more=self.most_more,
            is_bounded=self.is_bounded,
            is_beyond_draft=self.is_beyond_draft,
            top_logprobs=self.top_logprobs,
            updates=updates,
        )


class StepResult(NamedTuple):
    """The result of a step, on the host: one row for each of the step's `yielding`, in order."""

    num_accepted: NDArray[np.uint32]
    """[rows]: accepted draft tokens."""
    num_tokens: NDArray[np.int32]
    """[rows]: tokens, one more than that."""
    tokens: NDArray[np.int64]
    """[rows, K + 1]: those, then the target's own; the rest of a row means nothing."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = NO_LOGPROBS
    """By row, for its tokens, of sequences that asked for them."""
    not_finite: tuple[int, ...] = ()
    """Rows without tokens, because the model's logits are NaN or infinite there."""
    stamps_before: tuple[Interval, ...] = ()
    """Stamps of the step before, as of this step's publication: verify's and draft's. Draft's may be any numbers."""


class StepOutcome(NamedTuple):
    """The outcome of a step for the sequences that still run, one item for each."""

    rows: Ints
    """Their slots."""
    streams: Ints
    ids: NDArray[np.uint64]
    num_tokens: Counts
    """New tokens, cut where the output ends."""
    num_accepted: NDArray[np.uint32]
    """Accepted draft tokens, before the cut."""
    reasons: NDArray[np.int8]
    """GOES_ON, STOP or LENGTH."""
    tokens: Ints
    """[rows, K + 1], of which the first `num_tokens` count."""
    is_speculating: Bools
    """True if a draft was checked for the sequence."""
    is_beyond_draft: Bools
    """True if none was because the sequence is too long for it."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    """By sequence's place in these arrays, as many as it has new tokens."""

    @property
    def is_new(self) -> Bools:
        """[rows, K + 1]: True for the tokens that count."""
        is_new: Bools = np.arange(self.tokens.shape[1]) < self.num_tokens[:, None]
        return is_new
