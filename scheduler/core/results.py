"""A step as the loop sends it, and the copy of its result from the FutureMap to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slipstream.common.api.output_chunk import TokenLogprobs
from slipstream.common.errors import FutureMapError
from slipstream.common.worker.access_log import LogOp
from slipstream.common.worker.layout import NOT_FINITE, BufferName
from slipstream.common.worker.step import FenceName, StepCommand, StepKind
from slipstream.scheduler.core.plan import OrderedStep, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from numpy.typing import NDArray

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.layout import EpochShape
    from slipstream.common.worker.step import FenceOps, PrefillChunk, SlotUpdate
    from slipstream.scheduler.core.allocators import SlotLease
    from slipstream.scheduler.core.plan import PlannedStep

_PUBLISHED = (BufferName.NEW_SEQ_LENS, BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS)
_LOGPROBS = (BufferName.OUTPUT_LOGPROBS, BufferName.TOP_TOKENS, BufferName.TOP_LOGPROBS)

Interval = tuple[int, int]
"""Start and end of a worker's part of a step, in nanoseconds of the clock that all stamps share."""
_NO_LOGPROBS: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Some slots that take part in a step, with the leases that they have then."""

    slots: tuple[int, ...]
    rows: NDArray[np.int64]
    """The same numbers."""
    generations: NDArray[np.int64]
    """Of the leases: a result for another lease belongs to another sequence."""
    mask: int
    """The same slots as a mask of rows."""

    @classmethod
    def of(cls, leases: Iterable[SlotLease]) -> StepSlots:
        """Those of these leases, in their order."""
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
    """Of a mixed step: how it decodes."""
    members: StepSlots
    """The slots that decode; in a prefill, those that take in prompts."""
    yielding: StepSlots
    """The slots that the step brings tokens for: those that decode first."""
    num_draft_tokens: int = 0
    """K of the draft that takes part, in a decode step; else 0."""
    most_more: NDArray[np.int32] | None = None
    """The most tokens that it brings to each of `yielding`; None is one."""
    is_beyond_draft: NDArray[np.bool_] | None = None
    """For each of `yielding`, whether it is decoded plainly as it is too long for the draft; None if none is."""
    top_logprobs: Mapping[int, int] = MappingProxyType({})
    """By place in `yielding`: how many of the most likely tokens a sequence asked for that asked for logprobs."""
    chunks: tuple[PrefillChunk, ...] = ()
    updates: tuple[SlotUpdate, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """True if it decodes and takes in prompts."""
        return bool(self.chunks) and self.kind is not StepKind.PREFILL

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that it takes in."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def ordered(self) -> OrderedStep:
        """The step as the plan sees it."""
        prompts = mask_of(chunk.slot for chunk in self.chunks) if self.is_mixed else 0
        if prompts and self.kind is StepKind.PLAIN:
            return OrderedStep(self.number, StepKind.PREFILL, self.members.mask | prompts)
        return OrderedStep(self.number, self.kind, self.members.mask, prompts)

    def command(self, ops: FenceOps, epoch: int, attachment: int = 0) -> StepCommand:
        """What verify gets. `attachment`: of the draft that takes part; 0 for none."""
        return StepCommand(
            epoch=epoch,
            step=self.number,
            kind=self.kind,
            slots=self.members.slots,
            ops=ops,
            chunks=self.chunks,
            updates=self.updates,
            top_logprobs=self.most_top_logprobs,
            attachment=attachment,
        )

    def commands_to_draft(self, planned: PlannedStep, attachment: int) -> list[StepCommand]:
        """What a draft gets: one command, none, or two in a mixed step, the first of which drafts."""
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
            replace(taking_in, ops=planned.draft_prompts, updates=()),
        ]

    @property
    def most_top_logprobs(self) -> int | None:
        """The most top logprobs that a sequence asked for; None if none asked for logprobs."""
        return max(self.top_logprobs.values(), default=None)


class StepResult(NamedTuple):
    """The result of a step, on the host: one row for each of the step's `yielding`, in order."""

    num_accepted: NDArray[np.int32]
    """[rows]: accepted draft tokens."""
    tokens: NDArray[np.int64]
    """[rows, K + 1]: those, then the target's own; the rest of a row means nothing."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = _NO_LOGPROBS
    """By row, for its tokens, of sequences that asked for them."""
    not_finite: tuple[int, ...] = ()
    """Rows without tokens, because the model's logits are NaN or infinite there."""
    stamps_before: tuple[Interval, ...] = ()
    """Stamps of the step before, as of this step's publication: verify's and draft's. Draft's may be any numbers."""


class ResultReader:
    """Copies results on a private stream that waits for publish alone: other queued work does not delay it."""

    def __init__(self, device: Device, arena: Arena, shape: EpochShape, log: AccessLog) -> None:
        self._shape = shape
        self._log = log
        self._publish = publish = arena.fence(FenceName.VERIFY_PUBLISH)
        stamps = (BufferName.VERIFY_STAMPS, BufferName.DRAFT_STAMPS)
        published = [arena.tensor(name).unbind() for name in _PUBLISHED]
        before = [_row_before(arena.tensor(name).unbind()) for name in stamps]
        self._copy = device.host_copy(publish, [*published, *before])
        self._logprobs = device.host_copy(publish, [arena.tensor(name).unbind() for name in _LOGPROBS])
        self._last_consumed = 0
        self._views: dict[int, tuple[list[torch.Tensor], list[NDArray[Any]]]] = {}
        """By row: the tensors of its copies, and views of them."""

    def start(self, step: Step) -> None:
        """Enqueues the copy of the step's row, which waits for its publication."""
        row = step.number % self._shape.ring
        self._copy.start(step.number, row)
        if step.top_logprobs:
            self._logprobs.start(step.number, row)

    def resolve(self, step: Step, timeout_s: float) -> StepResult | None:
        """Waits for the row; None if the time is over first.

        Raises FutureMapError if the row was consumed before, or if no step published it.
        """
        if step.number <= self._last_consumed:
            raise FutureMapError(f"step {step.number} is consumed again, after step {self._last_consumed}")
        row = step.number % self._shape.ring
        copied = self._copy.finish(step.number, row, timeout_s)
        likely = self._logprobs.finish(step.number, row, timeout_s) if step.top_logprobs else []
        if copied is None or likely is None:
            return None
        self._last_consumed = step.number
        if self._log.is_enabled:
            self._log.fence(LogOp.WAIT, FenceName.VERIFY_PUBLISH, step.number, step=step.number)
            for name in (*_PUBLISHED, *(_LOGPROBS if likely else ())):
                self._log.access(name, [row], is_write=False, step=step.number)
        seq_lens, accepted, output_tokens, verify_stamps, draft_stamps = self._views_of(row, copied)
        num_accepted, tokens, not_finite = self._rows(step, seq_lens, accepted, output_tokens)
        return StepResult(
            num_accepted=num_accepted,
            tokens=tokens,
            not_finite=not_finite,
            stamps_before=(tuple(verify_stamps.tolist()), tuple(draft_stamps.tolist())),
            logprobs=_token_logprobs(step, num_accepted + 1, *likely) if likely else _NO_LOGPROBS,
        )

    @property
    def published(self) -> int:
        """The last step that verify has published."""
        return self._publish.poll()

    def close(self) -> None:
        """Ends the stream without waiting for copies under way."""
        self._copy.close()
        self._logprobs.close()

    def _views_of(self, row: int, copied: list[torch.Tensor]) -> list[NDArray[Any]]:
        known = self._views.get(row)
        if known is None or known[0] is not copied:
            known = self._views[row] = (copied, [column.numpy() for column in copied])
        return known[1]

    def _rows(
        self,
        step: Step,
        seq_lens: NDArray[np.int64],
        num_accepted: NDArray[np.int32],
        output_tokens: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], tuple[int, ...]]:
        """Copies the rows of the step: the next step's result may overwrite the shared ones."""
        rows = step.yielding.rows
        most = step.num_draft_tokens
        accepted, lengths = num_accepted.take(rows), seq_lens.take(rows)
        not_finite: tuple[int, ...] = ()
        # Without their sign, negative numbers are too large as well.
        is_wrong = accepted.view(np.uint32) > most
        is_wrong |= lengths < 0
        if np.count_nonzero(is_wrong):
            is_not_finite = (accepted == NOT_FINITE) & (lengths >= 0)
            not_finite = tuple(is_not_finite.nonzero()[0].tolist())
            accepted[is_not_finite], is_wrong[is_not_finite] = 0, False
            if is_wrong.any():
                at = is_wrong.argmax()
                found = f"length {lengths[at]} and {accepted[at]} accepted tokens"
                raise FutureMapError(f"step {step.number}, slot {rows[at]}: {found} were never published")
        return accepted, output_tokens.take(rows, 0), not_finite


def _row_before(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The row before each row of a ring."""
    return (*rows[-1:], *rows[:-1])


def _token_logprobs(
    step: Step,
    num_tokens: NDArray[np.int32],
    output: torch.Tensor,
    top_tokens: torch.Tensor,
    top: torch.Tensor,
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """`output`: [slots, K+1]; `top_tokens`, `top`: [slots, K+1, 20]."""
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for at, asked in step.top_logprobs.items():
        slot, num_places = step.yielding.slots[at], int(num_tokens[at])
        places = zip(
            output[slot, :num_places].tolist(),
            top_tokens[slot, :num_places, :asked].tolist(),
            top[slot, :num_places, :asked].tolist(),
            strict=True,
        )
        found[at] = tuple(TokenLogprobs(own, tuple(zip(ids, values, strict=True))) for own, ids, values in places)
    return found
