"""Draft: proposes K tokens for each slot, after the ones that verify stashed."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.layout import DECODE_PART, PREFILL_PART
from slipstream.common.wire.step import FenceName, RowTokens, WaitPlace
from slipstream.common.wire.worker import Measurements
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import NextStepState
from slipstream.services.worker.graphs import (
    GRAPHED_MODES,
    at_once,
    batch_buckets,
    capture_buckets,
    few_buckets,
    with_padding,
)
from slipstream.services.worker.rehearsal import rehearse_drafting, rehearse_prompts
from slipstream.services.worker.slots import FlatChunks, SamplingMode, check_draft_tokens
from slipstream.services.worker.step_costs import measure_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region, StepNumber
    from slipstream.services.worker.graphs import Buckets, GraphedPart, GraphedStep


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
        """Guesses the tokens after each slot's bonus token: [B, num_tokens] int64, or a few more up to K.

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

    def open(self, state: EpochState) -> Measurements:
        self._drafter.open(state)
        if state.graphs is not None:
            rehearse_prompts(self, state)
            self._graphs = DraftGraphs(self._drafter, state, state.graphs)
            rehearse_drafting(self, state)
        if not state.attachment.measures_costs:
            return Measurements()
        shape, device = state.attachment.shape, state.slots.limits.device
        return Measurements(costs=measure_costs(shape, partial(self._padding_step, state), device))

    def _padding_step(self, state: EpochState, num_rows: int, num_draft_tokens: int) -> Callable[[], None] | None:
        """Implements `MakeStep`."""
        if self._graphs is not None:
            return self._graphs.padding_step(num_rows, num_draft_tokens)
        shape, rows = state.region.shape, state.slots.limits.new_zeros(num_rows)
        hidden = (num_rows, shape.num_draft_tokens + 1, shape.hidden_width)
        stash = NextStepState(
            seq_lens=rows,
            bonus_tokens=rows,
            num_new=rows + 1,
            last_tokens=rows[:, None].repeat(1, shape.num_draft_tokens + 1),
            hidden_states=rows.new_zeros(hidden, dtype=shape.hidden_dtype) if shape.hidden_width else None,
        )

        def work() -> None:
            self._drafter.propose(rows, stash, max(1, num_draft_tokens), SamplingMode.NOISE)

        return work

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        raise InvalidArgumentError("role", self.description.role.value, "verify, for a draft to attach to")

    def close(self) -> None:
        self._graphs = None
        self._drafter.close()

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`: the decode part and the prefill part, as far as the step has them.

        Raises InvalidArgumentError for a step that is not for this draft.
        """
        reads_hidden = state.region.shape.hidden_width > 0
        if command.catches_up and reads_hidden and command.chunks:
            accepted = "none to catch up with, for a draft that reads hidden states"
            raise InvalidArgumentError("chunks", len(command.chunks), accepted)
        check_draft_tokens(command, state.attachment.shape.num_draft_tokens, self.description.row_tokens)
        signals = {point.fence for point in command.ops.signals}
        phases = []
        if command.slots or FenceName.DRAFT_PROPOSED in signals:
            phases.append(self._decode_part(command, state))
        if command.chunks or FenceName.DRAFT_PREFILLED in signals:
            phases.append(self._prefill_part(command, state))
        return phases

    def _decode_part(self, command: StepCommand, state: EpochState) -> Phase:
        fences, place = (FenceName.DRAFT_PROPOSED,), WaitPlace.START
        if not command.slots:
            return Phase(_nothing, fences, place, DECODE_PART)
        if self._graphs is not None:
            return Phase(partial(self._graphs.propose, command), fences, place, DECODE_PART, is_stamped=True)
        rows = state.staging.put_integers(command.slots)

        def work() -> None:
            mode = state.slots.sampling_mode(command.slots)
            propose(self._drafter, state, command.step, rows, mode, command.most_draft_tokens)

        return Phase(work, fences, place, DECODE_PART)

    def _prefill_part(self, command: StepCommand, state: EpochState) -> Phase:
        fences, place = (FenceName.DRAFT_PREFILLED,), WaitPlace.PREFILL_HIDDEN
        # Nothing is drafted after chunks past the model's context.
        if min((chunk.start for chunk in command.chunks), default=self._longest) >= self._longest:
            return Phase(_nothing, fences, place, PREFILL_PART)
        padded = command.chunks
        if state.graphs is not None:
            padded = with_padding(command.chunks, state.attachment.shape.chunk_tokens)
        chunks = FlatChunks.of(padded, state.staging)
        return Phase(partial(self._prefill, state, command.step, chunks), fences, place, PREFILL_PART)

    def _prefill(self, state: EpochState, step: int, chunks: FlatChunks) -> None:
        reads_hidden = state.region.shape.hidden_width > 0
        self._drafter.prefill(chunks, state.region.gather_prefill(step, len(chunks.tokens)) if reads_hidden else None)


def _nothing() -> None:
    """The work of a part without slots."""


class DraftGraphs:
    """The decode parts of an epoch as graphs: from the stash to the tokens, the whole chain in one.

    Those that only take in the stash, with 0 tokens, are for all ways to sample, as no token of theirs is used.
    """

    def __init__(self, drafter: Drafter, state: EpochState, graphed: GraphedStep) -> None:
        self._drafter = drafter
        self._state = state
        self._graphed = graphed
        shape = state.attachment.shape
        row_tokens = RowTokens.EVEN if state.attachment.chooses_draft_tokens else RowTokens.WHOLE
        counts = row_tokens.evens(shape.num_draft_tokens)
        kinds = [*product(reversed(counts), GRAPHED_MODES), (0, SamplingMode.NOISE)]
        self._made = {kind: self._capture(*kind, is_few=0 < kind[0] < shape.num_draft_tokens) for kind in kinds}
        """By the number of draft tokens and the way to sample."""

    def propose(self, command: StepCommand) -> None:
        """Stream work: a decode part, its stamps included."""
        mode, num_rows = self._state.slots.sampling_mode(command.slots), len(command.slots)
        most = command.most_draft_tokens
        takes_in_only = not most and mode in GRAPHED_MODES
        graphs = self._made.get((most, SamplingMode.NOISE if takes_in_only else mode))
        made = None if graphs is None else graphs.get(num_rows)
        if made is not None:
            made.replay(self._state.region, command)
            return
        self._graphed.stamp_start()
        rows = self._graphed.slots[:num_rows]
        propose(self._drafter, self._state, command.step, rows, mode, most)
        self._graphed.stamp_end()

    def padding_step(self, num_rows: int, num_draft_tokens: int) -> Callable[[], None] | None:
        """Returns the stream work of a step of padding rows; None if there are no graphs of it. Nothing must run."""
        graphs = self._made.get((num_draft_tokens, SamplingMode.NOISE))
        made = None if graphs is None else graphs.get(num_rows)
        self._graphed.clear()
        return None if made is None else made.work

    def _capture(self, num_draft_tokens: int, mode: SamplingMode, *, is_few: bool) -> Buckets[GraphedPart]:
        most_rows = self._state.attachment.shape.num_slots - 1
        sizes = few_buckets(most_rows) if is_few else batch_buckets(most_rows)
        what = f"draft, {num_draft_tokens} tokens, {mode.name.lower()}"
        return at_once(capture_buckets(what, sizes, partial(self._make, num_draft_tokens, mode)))

    def _make(self, num_draft_tokens: int, mode: SamplingMode, size: int) -> GraphedPart:
        graphed, rows = self._graphed, self._graphed.slots[:size]
        work = partial(propose, self._drafter, self._state, graphed.step, rows, mode, num_draft_tokens)
        return graphed.capture_part(work)


def propose(
    drafter: Drafter,
    state: EpochState,
    step: StepNumber,
    rows: torch.Tensor,
    mode: SamplingMode,
    num_draft_tokens: int,
) -> None:
    """Stream work: drafts for B slots, from the stash to the arena. `rows`: [B] int64.

    `num_draft_tokens`: the most that a row has in this step; 0 if no guess is used.
    """
    stash = state.region.gather(step, rows, state.slots.limits)
    # Modules that follow one another take in with their guesses; for other drafts a single one costs little.
    state.region.propose(step, rows, drafter.propose(rows, stash, max(1, num_draft_tokens), mode))
