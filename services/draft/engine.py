"""Draft: proposes K tokens a slot, continuing what verify stashed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.step import FenceName, StepKind
from slipstream.services.engine import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from slipstream.common.future_map import Stash
    from slipstream.common.step import PromptChunk, StepCommand
    from slipstream.common.worker_contract import WorkerDescription
    from slipstream.services.engine import EpochState


class Drafter(Protocol):
    """A way to guess tokens. All but `open` and `close` is stream work."""

    def open(self, state: EpochState) -> None:
        """Allocates what an epoch needs and warms up."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...

    def index(self, slots: Sequence[int]) -> torch.Tensor:
        """[B] int64 on the drafter's device."""
        ...

    def limits(self, rows: torch.Tensor) -> torch.Tensor:
        """[B] int64: positions from here on have no KV."""
        ...

    def prefill(self, chunks: tuple[PromptChunk, ...], hidden: torch.Tensor | None) -> None:
        """Takes in parts of prompts; `hidden` has the target's states of their tokens, if the draft reads them.

        [tokens, width], chunk after chunk.
        """
        ...

    def propose(self, rows: torch.Tensor, stash: Stash, num_tokens: int) -> torch.Tensor:
        """Guesses the `num_tokens` tokens behind each slot's bonus token: [B, num_tokens] int64.

        Called once for each stash of a slot that drafts.
        """
        ...


class DraftEngine:
    """Implements `RoleEngine` with a drafter."""

    def __init__(self, drafter: Drafter, description: WorkerDescription) -> None:
        self._drafter = drafter
        self._description = description

    def describe(self) -> WorkerDescription:
        """See `RoleEngine.describe`."""
        return self._description

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        self._drafter.open(state)

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self._drafter.close()

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`. Raises InvalidArgumentError for a plain step, which has no draft."""
        if command.kind is StepKind.PLAIN:
            raise InvalidArgumentError("kind", command.kind.name, "PREFILL or DECODE, for a draft")
        work: Callable[[], None] = _do_nothing
        if command.slots and command.kind is StepKind.PREFILL:
            work = partial(self._prefill, state, command.step, command.chunks)
        elif command.slots:
            work = partial(self._propose, state, command.step, self._drafter.index(command.slots))
        return [Phase(work, FenceName.DRAFT_DONE)]

    def _prefill(self, state: EpochState, step: int, chunks: tuple[PromptChunk, ...]) -> None:
        hidden = None
        if state.attachment.shape.hidden_width:
            hidden = state.future_map.gather_prefill(step, sum(len(chunk.tokens) for chunk in chunks))
        self._drafter.prefill(chunks, hidden)

    def _propose(self, state: EpochState, step: int, rows: torch.Tensor) -> None:
        stash = state.future_map.gather(step, rows, self._drafter.limits(rows))
        tokens = self._drafter.propose(rows, stash, state.attachment.shape.num_draft_tokens)
        state.future_map.propose(step, rows, tokens)


def _do_nothing() -> None:
    """The work of a step in which no slot takes part: its fence is signalled all the same."""
