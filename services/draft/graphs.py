"""Draft's decode steps as graphs: from the stash to the tokens, the whole chain in one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from slipstream.services.worker.graphs import batch_buckets, capture_buckets
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    import torch

    from slipstream.common.worker.captured_step import CapturedAccess
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.draft.drafter import Drafter
    from slipstream.services.worker.engine import EpochState
    from slipstream.services.worker.future_map import StepNumber
    from slipstream.services.worker.graphed_step import GraphedStep
    from slipstream.services.worker.graphs import Buckets, Replay

_GRAPHED = (SamplingMode.NOISE, SamplingMode.FILTERS)
"""Adjustments come without a graph: they take tables of the vocabulary for each row."""


@dataclass(frozen=True, slots=True)
class _Made:
    replay: Replay
    accesses: tuple[CapturedAccess, ...]


class DraftGraphs:
    """Belongs to one epoch."""

    def __init__(self, drafter: Drafter, state: EpochState, graphed: GraphedStep) -> None:
        """Captures."""
        self._drafter = drafter
        self._state = state
        self._graphed = graphed
        sizes = batch_buckets(state.attachment.shape.num_slots - 1)
        self._made: dict[SamplingMode, Buckets[_Made]] = {
            needs: capture_buckets(f"draft, {needs.name.lower()}", sizes, partial(self._make, needs))
            for needs in _GRAPHED
        }

    def propose(self, command: StepCommand) -> None:
        """Stream work: a decode step, its stamps included."""
        needs, num_rows = self._state.slots.needs(command.slots), len(command.slots)
        made = self._made[needs].get(num_rows) if needs in self._made else None
        if made is not None:
            made.replay()
            self._state.future_map.log_replay(made.accesses, command.step, command.slots)
            return
        self._graphed.stamp_start()
        propose(self._drafter, self._state, command.step, self._graphed.slots[:num_rows], needs)
        self._graphed.stamp_end()

    def _make(self, needs: SamplingMode, size: int) -> _Made:
        graphed, rows = self._graphed, self._graphed.slots[:size]

        def work() -> None:
            graphed.stamp_start()
            propose(self._drafter, self._state, graphed.step, rows, needs)
            graphed.stamp_end()

        graphed.step.take_accesses()
        replay = graphed.capture.capture(work)
        return _Made(replay, graphed.step.take_accesses())


def propose(drafter: Drafter, state: EpochState, step: StepNumber, rows: torch.Tensor, needs: SamplingMode) -> None:
    """Stream work: guesses for B slots, from the stash to the arena. `rows`: [B] int64."""
    stash = state.future_map.gather(step, rows, state.slots.limits_of(rows))
    tokens = drafter.propose(rows, stash, state.attachment.shape.num_draft_tokens, needs)
    state.future_map.propose(step, rows, tokens)
