"""Draft: proposes K tokens a slot, continuing what verify stashed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.draft.graphs import DraftGraphs, propose
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.padded_chunks import PaddedChunks, alike

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.draft.drafter import Drafter
    from slipstream.services.worker.engine import EpochState


class DraftEngine:
    """Implements `RoleEngine` with a drafter."""

    def __init__(self, drafter: Drafter, description: WorkerDescription) -> None:
        self._drafter = drafter
        self._description = description
        self._graphs: DraftGraphs | None = None

    def describe(self) -> WorkerDescription:
        """See `RoleEngine.describe`."""
        return self._description

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        self._drafter.open(state)
        if state.graphs is not None:
            self._graphs = DraftGraphs(self._drafter, state, state.graphs)

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self._graphs = None
        self._drafter.close()

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`. Raises InvalidArgumentError for a plain step, which has no draft."""
        if command.kind is StepKind.PLAIN:
            raise InvalidArgumentError("kind", command.kind.name, "PREFILL or DECODE, for a draft")
        if command.kind is StepKind.DECODE and command.slots and self._graphs is not None:
            return [Phase(partial(self._graphs.propose, command), FenceName.DRAFT_DONE, is_stamped=True)]
        work: Callable[[], None] = _do_nothing
        if command.slots and command.kind is StepKind.PREFILL:
            # Where padding costs more than another forward does.
            groups = [list(command.chunks)] if state.graphs is None else alike(command.chunks)
            padded = [PaddedChunks.of(group, state.staging) for group in groups]
            work = partial(self._prefill, state, command.step, padded)
        elif command.slots:
            rows = state.staging.put(torch.tensor(command.slots, dtype=torch.int64))
            work = partial(self._propose, state, command, rows)
        return [Phase(work, FenceName.DRAFT_DONE)]

    def _prefill(self, state: EpochState, step: int, groups: list[PaddedChunks]) -> None:
        sizes = [len(chunks.places) for chunks in groups]
        if not state.attachment.shape.hidden_width:
            for chunks in groups:
                self._drafter.prefill(chunks, None)
            return
        hidden = state.future_map.gather_prefill(step, sum(sizes))
        for chunks, states in zip(groups, torch.split(hidden, sizes), strict=True):
            self._drafter.prefill(chunks, states)

    def _propose(self, state: EpochState, command: StepCommand, rows: torch.Tensor) -> None:
        propose(self._drafter, state, command.step, rows, state.slots.needs(command.slots))


def _do_nothing() -> None:
    """The work of a step in which no slot takes part: its fence is signalled all the same."""
