"""Verify's decode steps as graphs: the forward, sampling with publish, and the stash.

Three graphs a step, so that the fence of each part is signalled as early as can be, and so that a step whose requests
ask for more than the graphs were captured for still has its forward from one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.verify.target import TargetForward, merged
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import VerifyResult
from slipstream.services.worker.graphs import GraphedPart, Latest, batch_buckets, capture_buckets
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    import torch

    from slipstream.common.worker.step import StepCommand
    from slipstream.services.verify.target import Target
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.graphs import Buckets, GraphedStep

_GRAPHED = (SamplingMode.NOISE, SamplingMode.FILTERS)
"""Adjustments and logprobs come without a graph: they take tables of the vocabulary for each row."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """The graphs of a step behind its forward."""

    publish: GraphedPart
    stash: GraphedPart


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs of one kind of step, for batches up to one size."""

    forward: GraphedPart
    result: Latest[TargetForward]
    """In the same memory at each replay."""
    endings: dict[SamplingMode, _Ending]


class VerifyGraphs:
    """The decode steps of an epoch."""

    def __init__(self, target: Target, state: EpochState, graphed: GraphedStep, *, is_one_size: bool = False) -> None:
        """Captures them. `is_one_size`: every batch is padded to all slots."""
        self._target = target
        self._state = state
        self._graphed = graphed
        shape = state.attachment.shape
        kinds = (StepKind.DECODE, StepKind.PLAIN) if shape.num_draft_tokens else (StepKind.PLAIN,)
        sizes = (shape.num_slots - 1,) if is_one_size else batch_buckets(shape.num_slots - 1)
        # Rows of a forward without a graph: padded, too, if all steps have one size.
        self._eager_size = sizes[0] if is_one_size else None
        self._made: dict[StepKind, Buckets[_Graphs]] = {
            kind: capture_buckets(f"{kind.name.lower()} steps", sizes, partial(self._make, kind)) for kind in kinds
        }

    def phases(self, command: StepCommand) -> list[Phase]:
        """A decode step, with a draft or plain: the work up to publish, then the stash."""
        num_rows = len(command.slots)
        graphs = self._made[command.kind].get(num_rows)
        padded = self._graphed.slots[: self._eager_size or num_rows]
        step = _Step(command, graphs, padded, self._target, self._state, self._graphed)
        return [
            Phase(step.publish, FenceName.VERIFY_PUBLISH, is_stamped=True),
            Phase(step.stash, FenceName.VERIFY_STASH, is_stamped=True),
        ]

    def _make(self, kind: StepKind, size: int) -> _Graphs:
        graphed, target = self._graphed, self._target
        rows = graphed.slots[:size]
        result = Latest[TargetForward]()

        def forward() -> None:
            graphed.stamp_start()
            result.value = target.forward(graphed.step, rows, has_draft=kind is StepKind.DECODE)

        part = graphed.capture_part(forward)
        return _Graphs(part, result, {mode: self._ending(rows, result, mode) for mode in _GRAPHED})

    def _ending(self, rows: torch.Tensor, forward: Latest[TargetForward], mode: SamplingMode) -> _Ending:
        graphed, target, future_map = self._graphed, self._target, self._state.future_map
        result = Latest[VerifyResult]()

        def publish() -> None:
            result.value = target.sample(forward.value, mode)
            future_map.publish(graphed.step, rows, result.value)

        def stash() -> None:
            future_map.stash(graphed.step, rows, result.value)
            graphed.stamp_end()

        return _Ending(graphed.capture_part(publish), graphed.capture_part(stash))


@dataclass(slots=True, eq=False)
class _Step:
    """One step, by graphs as far as there are any for it. Its methods are stream work."""

    command: StepCommand
    graphs: _Graphs | None
    padded: torch.Tensor
    """The slots of a forward without a graph, and perhaps padding."""
    target: Target
    state: EpochState
    graphed: GraphedStep
    ending: _Ending | None = None
    result: VerifyResult | None = None

    @property
    def rows(self) -> torch.Tensor:
        """[B] int64: the command's slots."""
        return self.graphed.slots[: len(self.command.slots)]

    def publish(self) -> None:
        """Computes the step and writes what the scheduler consumes."""
        mode = self.state.slots.sampling_mode(self.command.slots)
        if self.graphs is None:
            self.graphed.stamp_start()
            has_draft = self.command.kind is StepKind.DECODE
            self._sample(self.target.forward(self.command.step, self.padded, has_draft=has_draft), mode)
            return
        self.graphs.forward.replay(self.state.future_map, self.command)
        if self.command.top_logprobs is None:
            self.ending = self.graphs.endings.get(mode)
        if self.ending is not None:
            self.ending.publish.replay(self.state.future_map, self.command)
        else:
            self._sample(self.graphs.result.value, mode)

    def stash(self) -> None:
        """Writes what the next forward reads."""
        if self.ending is not None:
            self.ending.stash.replay(self.state.future_map, self.command)
            return
        assert self.result is not None, "publish comes first"
        self.state.future_map.stash(self.command.step, self.rows, self.result)
        self.target.record_output(self.rows, self.result)
        self.graphed.stamp_end()

    def _sample(self, forward: TargetForward, mode: SamplingMode) -> None:
        result = self.target.sample(forward, mode, self.command.top_logprobs)
        # Rows beyond the command's slots are padding.
        self.result = merged(lambda rows: rows[0][: len(self.command.slots)], result)
        self.state.future_map.publish(self.command.step, self.rows, self.result)
