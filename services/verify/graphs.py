"""Verify's decode steps as graphs: the look at the draft, what is chosen and published, and the stash.

Three graphs a step, so that the fence of each part is signalled as early as can be, and so that a step whose requests
ask for more than the graphs were made for still has its forward from one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.verify.target import Look
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import VerifyResult
from slipstream.services.worker.graphs import Latest, batch_buckets, capture_buckets
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    import torch

    from slipstream.common.worker.captured_step import CapturedAccess
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.verify.target import Target
    from slipstream.services.worker.engine import EpochState
    from slipstream.services.worker.graphed_step import GraphedStep
    from slipstream.services.worker.graphs import Buckets, Replay

_GRAPHED = (SamplingMode.NOISE, SamplingMode.FILTERS)
"""Adjustments and logprobs come without a graph: they take tables of the vocabulary for each row."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph and what it accesses."""

    replay: Replay
    accesses: tuple[CapturedAccess, ...]


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a step goes on behind the look."""

    publish: _Part
    stash: _Part


@dataclass(frozen=True, slots=True)
class _Made:
    """The graphs of one kind of step, for batches up to one size."""

    look: _Part
    looked: Latest[Look]
    """What the look leaves: in a graph, in the same memory each time."""
    endings: dict[SamplingMode, _Ending]


class VerifyGraphs:
    """Belongs to one epoch."""

    def __init__(self, target: Target, state: EpochState, graphed: GraphedStep, *, is_one_size: bool = False) -> None:
        """Captures. `is_one_size`: every batch is padded to all slots."""
        self._target = target
        self._state = state
        self._graphed = graphed
        shape = state.attachment.shape
        kinds = (StepKind.DECODE, StepKind.PLAIN) if shape.num_draft_tokens else (StepKind.PLAIN,)
        sizes = (shape.num_slots - 1,) if is_one_size else batch_buckets(shape.num_slots - 1)
        # Where there is no graph for a batch; of one size, too, if that is asked for.
        self._eager_size = sizes[0] if is_one_size else None
        self._made: dict[StepKind, Buckets[_Made]] = {
            kind: capture_buckets(f"{kind.name.lower()} steps", sizes, partial(self._make, kind)) for kind in kinds
        }

    def phases(self, command: StepCommand) -> list[Phase]:
        """A decode step, with a draft or plain: the work up to publish, then the stash."""
        num_rows = len(command.slots)
        made = self._made[command.kind].get(num_rows)
        padded = self._graphed.slots[: self._eager_size or num_rows]
        step = _Step(command, made, padded, self._target, self._state, self._graphed)
        return [
            Phase(step.publish, FenceName.VERIFY_PUBLISH, is_stamped=True),
            Phase(step.stash, FenceName.VERIFY_STASH, is_stamped=True),
        ]

    def _make(self, kind: StepKind, size: int) -> _Made:
        graphed, target = self._graphed, self._target
        rows = graphed.slots[:size]
        looked = Latest[Look]()

        def look() -> None:
            graphed.stamp_start()
            looked.value = target.look(graphed.step, rows, has_draft=kind is StepKind.DECODE)

        part = self._part(look)
        return _Made(part, looked, {needs: self._ending(rows, looked, needs) for needs in _GRAPHED})

    def _ending(self, rows: torch.Tensor, looked: Latest[Look], needs: SamplingMode) -> _Ending:
        graphed, target, future_map = self._graphed, self._target, self._state.future_map
        chosen = Latest[VerifyResult]()

        def publish() -> None:
            chosen.value = target.choose(looked.value, needs)
            future_map.publish(graphed.step, rows, chosen.value)

        def stash() -> None:
            future_map.stash(graphed.step, rows, chosen.value)
            graphed.stamp_end()

        return _Ending(self._part(publish), self._part(stash))

    def _part(self, work: Replay) -> _Part:
        self._graphed.step.take_accesses()
        replay = self._graphed.capture.capture(work)
        return _Part(replay, self._graphed.step.take_accesses())


class _Step:
    """One step, by graphs as far as there are any for it. Its methods are stream work."""

    def __init__(
        self,
        command: StepCommand,
        made: _Made | None,
        padded: torch.Tensor,
        target: Target,
        state: EpochState,
        graphed: GraphedStep,
    ) -> None:
        """`padded`: the slots that a look without a graph has, and perhaps padding."""
        self._command = command
        self._made = made
        self._padded = padded
        self._target = target
        self._state = state
        self._graphed = graphed
        self._rows = graphed.slots[: len(command.slots)]
        self._ending: _Ending | None = None
        self._outcome: VerifyResult | None = None

    def publish(self) -> None:
        """Up to what the scheduler consumes."""
        needs = self._state.slots.needs(self._command.slots)
        if self._made is None:
            self._graphed.stamp_start()
            has_draft = self._command.kind is StepKind.DECODE
            look = self._target.look(self._command.step, self._padded, has_draft=has_draft)
            self._choose(look, needs)
            return
        self._replay(self._made.look)
        if self._command.top_logprobs is None:
            self._ending = self._made.endings.get(needs)
        if self._ending is not None:
            self._replay(self._ending.publish)
        else:
            self._choose(self._made.looked.value, needs)

    def stash(self) -> None:
        """What the next forward needs."""
        if self._ending is not None:
            self._replay(self._ending.stash)
            return
        assert self._outcome is not None, "publish comes first"
        self._state.future_map.stash(self._command.step, self._rows, self._outcome)
        self._target.remember(self._rows, self._outcome)
        self._graphed.stamp_end()

    def _choose(self, look: Look, needs: SamplingMode) -> None:
        outcome = self._target.choose(look, needs, self._command.top_logprobs)
        self._outcome = _without_padding(outcome, len(self._command.slots))
        self._state.future_map.publish(self._command.step, self._rows, self._outcome)

    def _replay(self, part: _Part) -> None:
        part.replay()
        self._state.future_map.log_replay(part.accesses, self._command.step, self._command.slots)


def _without_padding(outcome: VerifyResult, num_rows: int) -> VerifyResult:
    """The same of the first rows."""
    logprobs = outcome.logprobs
    if logprobs is not None:
        logprobs = type(logprobs)(
            **{field.name: getattr(logprobs, field.name)[:num_rows] for field in fields(logprobs)}
        )
    return VerifyResult(
        seq_lens=outcome.seq_lens[:num_rows],
        num_accepted=outcome.num_accepted[:num_rows],
        tokens=outcome.tokens[:num_rows],
        hidden_states=None if outcome.hidden_states is None else outcome.hidden_states[:num_rows],
        logprobs=logprobs,
    )
