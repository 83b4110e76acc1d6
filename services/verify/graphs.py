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
from slipstream.services.worker.graphs import GRAPHED_MODES, GraphedPart, Latest, batch_buckets, capture_buckets

if TYPE_CHECKING:
    import torch

    from slipstream.common.worker.step import StepCommand
    from slipstream.services.verify.target import Target
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.graphs import Buckets, GraphedStep
    from slipstream.services.worker.slots import SamplingMode


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
        """A decode step, by graphs as far as there are any: the work up to publish, then the stash."""
        num_rows = len(command.slots)
        target, future_map, graphed = self._target, self._state.future_map, self._graphed
        graphs, rows = self._made[command.kind].get(num_rows), graphed.slots[:num_rows]
        endings: list[_Ending | VerifyResult] = []

        def publish() -> None:
            mode = self._state.slots.sampling_mode(command.slots)
            if graphs is None:
                graphed.stamp_start()
                padded = graphed.slots[: self._eager_size or num_rows]
                forward = target.forward(command.step, padded, has_draft=command.kind is StepKind.DECODE)
            else:
                graphs.forward.replay(future_map, command)
                forward = graphs.result.value
                if command.top_logprobs is None and mode in graphs.endings:
                    endings.append(graphs.endings[mode])
                    graphs.endings[mode].publish.replay(future_map, command)
                    return
            # Rows beyond the command's slots are padding.
            result = merged(lambda values: values[0][:num_rows], target.sample(forward, mode, command.top_logprobs))
            endings.append(result)
            future_map.publish(command.step, rows, result)

        def stash() -> None:
            (ending,) = endings
            if isinstance(ending, _Ending):
                ending.stash.replay(future_map, command)
                return
            future_map.stash(command.step, rows, ending)
            target.record_output(rows, ending)
            graphed.stamp_end()

        return [
            Phase(publish, FenceName.VERIFY_PUBLISH, is_stamped=True),
            Phase(stash, FenceName.VERIFY_STASH, is_stamped=True),
        ]

    def _make(self, kind: StepKind, size: int) -> _Graphs:
        graphed, target = self._graphed, self._target
        rows = graphed.slots[:size]
        result = Latest[TargetForward]()

        def forward() -> None:
            graphed.stamp_start()
            result.value = target.forward(graphed.step, rows, has_draft=kind is StepKind.DECODE)

        part = graphed.capture_part(forward)
        return _Graphs(part, result, {mode: self._ending(rows, result, mode) for mode in GRAPHED_MODES})

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
