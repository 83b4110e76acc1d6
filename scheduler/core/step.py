"""A step as the loop decides and sends it: the slots that take part, and the data that the workers need for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.common.worker.step import StepCommand, StepKind
from slipstream.scheduler.core.plan import OrderedStep, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from slipstream.common.worker.step import FenceOps, PrefillChunk, SlotUpdate
    from slipstream.scheduler.core.plan import PlannedStep
    from slipstream.scheduler.core.sequence import SlotLease


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
