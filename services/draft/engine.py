"""Draft: proposes K tokens for each slot, behind the ones that verify stashed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.worker.forward_sizes import with_padding
from slipstream.services.worker.graphs import GRAPHED_MODES, at_once, batch_buckets, capture_buckets
from slipstream.services.worker.rehearsal import rehearse_drafting, rehearse_prompts
from slipstream.services.worker.role import Phase
from slipstream.services.worker.slots import SamplingMode
from slipstream.services.worker.staging import FlatChunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.graphs import Buckets, GraphedPart, GraphedStep
    from slipstream.services.worker.region import NextStepState, Region
    from slipstream.services.worker.shared_buffers import StepNumber


class Drafter(Protocol):
    """A way to guess tokens. All methods but `open` and `close` are stream work."""

    def open(self, state: EpochState) -> None:
        """Allocates what an epoch needs and warms up."""

    def close(self) -> None:
        """Frees it."""

    def prefill(self, chunks: FlatChunks, hidden: torch.Tensor | None) -> None:
        """Takes in parts of sequences.

        `hidden`: [tokens, width], chunk after chunk: the target's states of their tokens, if the draft reads them.
        """

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """Guesses the tokens behind each slot's bonus token: [B, num_tokens] int64, or a few more up to K.

        `rows`: [B] int64 slots; `mode`: how to sample as verify does. Called once for each stash of a slot that
        drafts, with 1 for `num_tokens` where no guess is used. The kernels that it launches depend on shapes and `mode`
        alone.
        """


class DraftEngine:
    """Implements `RoleEngine` with a drafter."""

    def __init__(self, drafter: Drafter, description: WorkerDescription) -> None:
        self._drafter = drafter
        self.description = description
        self._graphs: DraftGraphs | None = None
        self._longest = description.max_context_tokens

    def open(self, state: EpochState) -> None:
        self._drafter.open(state)
        if state.graphs is not None:
            rehearse_prompts(self, state)
            self._graphs = DraftGraphs(self._drafter, state, state.graphs)
            rehearse_drafting(self, state)

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        raise InvalidArgumentError("role", self.description.role.value, "verify, for a draft to attach to")

    def close(self) -> None:
        self._graphs = None
        self._drafter.close()

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`. Raises InvalidArgumentError for a step that is not for this draft."""
        reads_hidden = state.region.shape.hidden_width > 0
        if command.kind is StepKind.PLAIN:
            raise InvalidArgumentError("kind", command.kind.name, "no PLAIN")
        if command.is_mixed:
            raise InvalidArgumentError("chunks", len(command.chunks), "none in a DECODE of a draft")
        if command.kind is StepKind.CATCH_UP and reads_hidden and command.chunks:
            accepted = "none to catch up with, for a draft that reads hidden states"
            raise InvalidArgumentError("chunks", len(command.chunks), accepted)
        # Nothing is drafted behind chunks past the model's context.
        if not command.slots or min((chunk.start for chunk in command.chunks), default=0) >= self._longest:
            return [Phase(lambda: None, (FenceName.DRAFT_DONE,))]
        if command.kind is StepKind.DECODE and self._graphs is not None:
            return [Phase(partial(self._graphs.propose, command), (FenceName.DRAFT_DONE,), is_stamped=True)]
        if command.chunks:
            padded = command.chunks
            if state.graphs is not None:
                padded = with_padding(command.chunks, state.attachment.shape.chunk_tokens)
            chunks = FlatChunks.of(padded, state.staging)
            return [Phase(partial(self._prefill, state, command.step, chunks), (FenceName.DRAFT_DONE,))]
        rows = state.staging.put_integers(command.slots)

        def work() -> None:
            mode = state.slots.sampling_mode(command.slots)
            propose(self._drafter, state, command.step, rows, mode, drafts_none=command.drafts_none)

        return [Phase(work, (FenceName.DRAFT_DONE,))]

    def _prefill(self, state: EpochState, step: int, chunks: FlatChunks) -> None:
        reads_hidden = state.region.shape.hidden_width > 0
        self._drafter.prefill(chunks, state.region.gather_prefill(step, len(chunks.tokens)) if reads_hidden else None)


class DraftGraphs:
    """The decode steps of an epoch as graphs: from the stash to the tokens, the whole chain in one.

    Steps that draft none have graphs of their own. These are for all ways to sample, as no token of theirs is used.
    """

    def __init__(self, drafter: Drafter, state: EpochState, graphed: GraphedStep) -> None:
        self._drafter = drafter
        self._state = state
        self._graphed = graphed
        sizes = batch_buckets(state.attachment.shape.num_slots - 1)
        self._made: dict[SamplingMode, Buckets[GraphedPart]] = {
            mode: at_once(capture_buckets(f"draft, {mode.name.lower()}", sizes, partial(self._make, mode)))
            for mode in GRAPHED_MODES
        }
        make = partial(self._make, SamplingMode.NOISE, drafts_none=True)
        self._taking_in = at_once(capture_buckets("draft, drafting none", sizes, make))

    def propose(self, command: StepCommand) -> None:
        """Stream work: a decode step, its stamps included."""
        mode, num_rows = self._state.slots.sampling_mode(command.slots), len(command.slots)
        graphs = self._made.get(mode)
        if graphs is not None and command.drafts_none:
            graphs = self._taking_in
        made = None if graphs is None else graphs.get(num_rows)
        if made is not None:
            made.replay(self._state.region, command)
            return
        self._graphed.stamp_start()
        rows = self._graphed.slots[:num_rows]
        propose(self._drafter, self._state, command.step, rows, mode, drafts_none=command.drafts_none)
        self._graphed.stamp_end()

    def _make(self, mode: SamplingMode, size: int, *, drafts_none: bool = False) -> GraphedPart:
        graphed, rows = self._graphed, self._graphed.slots[:size]
        work = partial(propose, self._drafter, self._state, graphed.step, rows, mode, drafts_none=drafts_none)
        return graphed.capture_part(work)


def propose(
    drafter: Drafter,
    state: EpochState,
    step: StepNumber,
    rows: torch.Tensor,
    mode: SamplingMode,
    *,
    drafts_none: bool = False,
) -> None:
    """Stream work: drafts for B slots, from the stash to the arena. `rows`: [B] int64."""
    stash = state.region.gather(step, rows, state.slots.limits)
    # Modules that follow one another take in with their guesses; for other drafts a single one costs little.
    num_tokens = 1 if drafts_none else state.attachment.shape.num_draft_tokens
    state.region.propose(step, rows, drafter.propose(rows, stash, num_tokens, mode))
