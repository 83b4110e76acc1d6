"""Verify's decode steps as graphs: the forward, sampling with publish, and the stash.

Three graphs a step, so that the fence of each part is signalled as early as can be, and so that a step whose requests
ask for more than the graphs were captured for still has its forward from one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.verify.target import TargetForward
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


class _Step:
    """One step, by graphs as far as there are any for it. Its methods are stream work."""

    def __init__(
        self,
        command: StepCommand,
        graphs: _Graphs | None,
        padded: torch.Tensor,
        target: Target,
        state: EpochState,
        graphed: GraphedStep,
    ) -> None:
        """`padded`: the slots of a forward without a graph, and perhaps padding."""
        self._command = command
        self._graphs = graphs
        self._padded = padded
        self._target = target
        self._state = state
        self._graphed = graphed
        self._rows = graphed.slots[: len(command.slots)]
        self._ending: _Ending | None = None
        self._result: VerifyResult | None = None

    def publish(self) -> None:
        """Computes the step and writes what the scheduler consumes."""
        mode = self._state.slots.sampling_mode(self._command.slots)
        if self._graphs is None:
            self._graphed.stamp_start()
            has_draft = self._command.kind is StepKind.DECODE
            self._sample(self._target.forward(self._command.step, self._padded, has_draft=has_draft), mode)
            return
        self._graphs.forward.replay(self._state.future_map, self._command)
        if self._command.top_logprobs is None:
            self._ending = self._graphs.endings.get(mode)
        if self._ending is not None:
            self._ending.publish.replay(self._state.future_map, self._command)
        else:
            self._sample(self._graphs.result.value, mode)

    def stash(self) -> None:
        """Writes what the next forward reads."""
        if self._ending is not None:
            self._ending.stash.replay(self._state.future_map, self._command)
            return
        assert self._result is not None, "publish comes first"
        self._state.future_map.stash(self._command.step, self._rows, self._result)
        self._target.record_output(self._rows, self._result)
        self._graphed.stamp_end()

    def _sample(self, forward: TargetForward, mode: SamplingMode) -> None:
        result = self._target.sample(forward, mode, self._command.top_logprobs)
        self._result = _without_padding(result, len(self._command.slots))
        self._state.future_map.publish(self._command.step, self._rows, self._result)


def _without_padding(result: VerifyResult, num_rows: int) -> VerifyResult:
    """Returns the first rows."""
    logprobs = result.logprobs
    if logprobs is not None:
        logprobs = type(logprobs)(
            **{field.name: getattr(logprobs, field.name)[:num_rows] for field in fields(logprobs)}
        )
    return VerifyResult(
        seq_lens=result.seq_lens[:num_rows],
        num_accepted=result.num_accepted[:num_rows],
        tokens=result.tokens[:num_rows],
        hidden_states=None if result.hidden_states is None else result.hidden_states[:num_rows],
        logprobs=logprobs,
    )
