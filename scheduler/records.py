"""The plain data of the scheduler: sequences, steps and their outcomes, drafts and why they leave.

Nothing here imports another module of the scheduler, so every one of them may import this.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from slipstream.common.wire.step import PrefillChunk, RowTokens, SlotUpdate, StepCommand

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from slipstream.common.wire.job import TokenLogprobs
    from slipstream.common.wire.sequence import SequenceSpec
    from slipstream.common.wire.step import FenceOps

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


class DraftTarget(NamedTuple):
    """The draft that is wanted."""

    address: str
    num_draft_tokens: int | None
    """K. None: the configuration's."""


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """The properties of the attached draft that its steps and their order depend on."""

    is_present: bool
    reads_hidden: bool = False
    """True if it reads the target's hidden states."""
    row_tokens: RowTokens = RowTokens.WHOLE
    """How the numbers of its draft tokens in a step's rows may differ."""


class DraftKV(NamedTuple):
    """The draft whose keys and values a page has to have beside the target's, and how far they can go."""

    attachment: int = 0
    """Its number; 0 if none drafts."""
    is_paged: bool = True
    """False if it knows sequences by slot, not by page: then it has to be sent all of their tokens."""
    tokens_ahead: int = 0
    """Of a head: the tokens after a position that its entry there depends on."""
    context_tokens: int = NO_LIMIT
    """Its context: the longest sequence that it has keys and values for."""

    def room_for(self, sequence: Sequence, num_draft_tokens: int) -> int:
        """Returns how long the output may be for a step to draft `num_draft_tokens` for it."""
        if sequence.num_tokens_at_most <= self.context_tokens:
            return NO_LIMIT
        return self.context_tokens - num_draft_tokens - len(sequence.spec.prompt)


NO_DRAFT = DraftKV()


class Prefix:
    """The pages of one sequence as the cache knows them."""

    __slots__ = ("_keys", "_page_tokens", "_salt", "draft", "is_salted", "num_kept")

    def __init__(self, salt: str, page_tokens: int) -> None:
        self.draft = NO_DRAFT
        """Has taken part in all steps of the sequence."""
        self.num_kept = 0
        """Pages that the sequence has put into the cache, or has from there."""
        self.is_salted = bool(salt)
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
    num_lost: int = 0
    """Grammar workers that were lost in a row while it ran, without a token of it."""
    is_queued: bool = False
    """True while it is in the queue. Belongs to the queue's lock."""
    is_over: bool = False
    """True if no more output follows. This and the rest belong to the loop's thread."""
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
    """The tokens to prefill: the prompt, and the output that it was submitted with."""

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
        """Draft tokens that verify may accept in a step; None: all."""
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
        """The same for a draft that arrives while it runs. `history_from`: see `SlotUpdate`."""
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
    def _arrays(self) -> tuple[Ints, Ints]:
        return self.rows, self.generations


NO_SLOTS = StepSlots.of(())


class Step(NamedTuple):
    """A step: rows that decode, each with its own number of draft tokens, and chunks of prompts."""

    number: int
    decoded: StepSlots
    """The slots that decode."""
    yielding: StepSlots
    """The slots that the step brings tokens for: those that decode, then those whose prompts end."""
    most_more: Counts
    """[yielding]: the most tokens that it brings to each."""
    is_bounded: bool = False
    """True if some of these are less than `most_draft_tokens` + 1."""
    num_draft_tokens: tuple[int, ...] = ()
    """For each of `decoded`; empty where it is 0 for all."""
    most_draft_tokens: int = 0
    """The largest of these."""
    is_kept: bool = False
    """True if draft's decode part has these slots: it takes in their stash, also where it drafts nothing."""
    is_beyond_draft: Bools | None = None
    """[yielding]: whether it is decoded plainly as it is too long for the draft; None if none is."""
    top_logprobs: Mapping[int, int] = MappingProxyType({})
    """By place in `yielding`: how many of the most likely tokens a sequence asked for that asked for logprobs."""
    constrained: tuple[int, ...] = ()
    """Those of `yielding` whose sequences have a constraint."""
    chunks: tuple[PrefillChunk, ...] = ()
    """Of slots that do not decode."""
    num_prompt_tokens: int = 0
    """Tokens of `chunks`."""
    updates: tuple[SlotUpdate, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """True if it takes in prompts and decodes nothing."""
        return bool(self.chunks) and not self.decoded.slots

    @property
    def prompts(self) -> int:
        """Mask of the slots of `chunks`."""
        return mask_of(chunk.slot for chunk in self.chunks)

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens of the rows that decode, with their draft tokens."""
        return len(self.decoded.slots) + sum(self.num_draft_tokens)

    @property
    def kept(self) -> int:
        """Mask of the slots of draft's decode part."""
        return self.decoded.mask if self.is_kept else 0

    def with_draft_tokens(self, counts: Counts, *, evens: tuple[int, ...] = ()) -> Step:
        """The same step with so many draft tokens for each that decodes. Without any, draft only takes in the stash.

        `evens`: see `ChooseDraftTokens`; as many are drafted for all, and as many as are its own may be accepted.
        """
        most = int(counts.max(initial=0))
        if most and evens:
            most = next(even for even in evens if even >= most)
        drafted = [most] * len(counts) if evens else counts.tolist()
        return self._replace(
            num_draft_tokens=tuple(drafted) if most else (),
            most_draft_tokens=most,
            most_more=counts + 1,
            is_bounded=bool((counts < most).any()),
        )

    @property
    def copies_tokens(self) -> bool:
        """True if a row with a constraint has draft tokens, which verify copies out to the grammar worker."""
        return self.most_draft_tokens > 0 and any(slot in self.decoded.slots for slot in self.constrained)

    def command(self, ops: FenceOps, epoch: int, attachment: int = 0, grammar: int = 0) -> StepCommand:
        """Makes the command for verify. `attachment`, `grammar`: numbers of those of the draft that takes part and of
        the grammar worker; 0 for none."""
        return StepCommand(
            epoch=epoch,
            step=self.number,
            slots=self.decoded.slots,
            num_draft_tokens=self.num_draft_tokens,
            ops=ops,
            chunks=self.chunks,
            updates=self.updates,
            top_logprobs=max(self.top_logprobs.values()) if self.top_logprobs else None,
            attachment=attachment,
            grammar=grammar if self.constrained else 0,
            constrained=self.constrained,
        )

    def command_to_draft(self, ops: FenceOps, attachment: int) -> StepCommand:
        """Makes the command for a draft."""
        return StepCommand(
            epoch=attachment,
            step=self.number,
            slots=self.decoded.slots if self.is_kept else (),
            num_draft_tokens=self.num_draft_tokens,
            ops=ops,
            chunks=self.chunks,
            updates=self.updates,
        )


class ChooseDraftTokens(Protocol):
    """Chooses the numbers of draft tokens of a step that a draft takes part in."""

    def __call__(self, slots: StepSlots, most: Counts, *, evens: tuple[int, ...]) -> Counts:
        """Returns the number for each of `slots`, from 0 to its `most`: [slots] each; an array that does not change.

        `evens`: all rows of a step have 0 or one of these, of which each slot has up to its `most`; empty where each
        may have its own number.
        """
        ...


def most_tokens(slots: StepSlots, most: Counts, *, evens: tuple[int, ...]) -> Counts:
    """Implements `ChooseDraftTokens`: as many as there may be."""
    return most


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
    unmasked: tuple[int, ...] = ()
    """Rows without tokens, because the masks of their constraints were not there."""
    unmatched: tuple[int, ...] = ()
    """Rows without tokens, because the grammar worker has no masks for them."""
    stamps_before: tuple[Interval, ...] = ()
    """Stamps of the step before, as of this step's publication: verify's, and those of draft's decode part and of its
    prefill part, which may be any numbers."""


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
    num_drafted: Counts
    """Draft tokens that verify could accept."""
    is_beyond_draft: Bools
    """True if none was because the sequence is too long for it."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    """By sequence's place in these arrays, as many as it has new tokens."""

    @property
    def is_speculating(self) -> Bools:
        """[rows]: True if a draft was checked for the sequence."""
        is_speculating: Bools = self.num_drafted > 0
        return is_speculating

    @property
    def is_new(self) -> Bools:
        """[rows, K + 1]: True for the tokens that count."""
        is_new: Bools = np.arange(self.tokens.shape[1]) < self.num_tokens[:, None]
        return is_new


NO_OUTCOME = StepOutcome(
    rows=np.zeros(0, np.int64),
    streams=np.zeros(0, np.int64),
    ids=np.zeros(0, np.uint64),
    num_tokens=np.zeros(0, np.int32),
    num_accepted=np.zeros(0, np.uint32),
    reasons=np.zeros(0, np.int8),
    tokens=np.zeros((0, 1), np.int64),
    num_drafted=np.zeros(0, np.int32),
    is_beyond_draft=np.zeros(0, np.bool_),
    logprobs=NO_LOGPROBS,
)
"""The outcome of a step for no sequence."""
