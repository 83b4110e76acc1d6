"""Verify's decode steps as graphs: copying in with the forward, then sampling with publish and stash.

Two graphs a step, so that a step whose requests ask for more than the graphs were captured for still has its forward
from one. They find the draft's region by words of each step (`RegionWord`), so that drafts arrive and leave
without a capture, unless one reads other layers or drafts another number of tokens. Where the scheduler chooses the
draft tokens of each step, there are graphs for a few numbers below K, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName, RowTokens, WaitPlace
from slipstream.common.wire.worker import DraftSizes
from slipstream.services.verify.target import TargetForward, merged
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import NO_REGION, CapturedStep, StampPlace, VerifyResult
from slipstream.services.worker.graphs import (
    GRAPHED_MODES,
    GraphedPart,
    Latest,
    batch_buckets,
    capture_buckets,
    few_buckets,
)
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch

    from slipstream.common.wire.step import StepCommand
    from slipstream.services.verify.target import Target
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region
    from slipstream.services.worker.graphs import Buckets, GraphedStep
    from slipstream.services.worker.masks import StepMasks


@dataclass(frozen=True, slots=True)
class _Ending:
    """The graph of a step after its forward."""

    part: GraphedPart
    result: Latest[VerifyResult]
    """In the same memory at each replay."""


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs of one kind of step, for batches up to one size."""

    rows: torch.Tensor
    """[size] int64: the step's slots, then padding."""
    forward: GraphedPart
    result: Latest[TargetForward]
    """In the same memory at each replay."""
    endings: dict[SamplingMode, _Ending]


class _Kind(NamedTuple):
    """The kind of a step's graphs, beside the number of its rows."""

    num_draft_tokens: int
    """Draft tokens of each row; 0 for plain steps."""
    layers: tuple[int, ...]
    """Those whose inputs a draft reads."""
    simulated_tokens: int | None = None
    """K of the draft, where its tokens are accepted by chance; else None."""
    is_few: bool = False
    """True if they are for fewer draft tokens than K: captured for fewer sizes."""


class VerifyGraphs:
    """The decode steps of an epoch."""

    def __init__(self, target: Target, state: EpochState, graphed: GraphedStep, *, is_one_size: bool = False) -> None:
        """`is_one_size`: every batch is padded to all slots."""
        self._target = target
        self._state = state
        self._graphed = graphed
        most_rows = state.attachment.shape.num_slots - 1
        self._sizes = (most_rows,) if is_one_size else batch_buckets(most_rows)
        # Rows of a forward without a graph: padded, too, if all steps have one size.
        self._eager_size = self._sizes[0] if is_one_size else None
        self._few_sizes = self._sizes if is_one_size else few_buckets(most_rows)
        has_even = state.attachment.chooses_draft_tokens and not is_one_size
        self._row_tokens = RowTokens.EVEN if has_even else RowTokens.WHOLE
        self._made: dict[_Kind, Buckets[_Graphs]] = {}
        self._plain_layers: tuple[int, ...] = ()
        """The layers of plain steps that no draft reads from: as they were captured first."""

    def capture(self, draft: DraftSizes | None, layers: tuple[int, ...]) -> Generator[None, None, None]:
        """Stream work: makes the graphs of steps with such a draft, as far as they are not there.

        `draft`: None for plain steps only. `layers`: those whose inputs it reads. Other work may be done between two
        items.
        """
        if not self._made:
            self._plain_layers = layers
            self._warm_up_for_drafts()
        if draft is not None:
            for count in reversed(self._row_tokens.evens(draft.num_draft_tokens)):
                yield from self._capture(self._kind(count, draft, layers))
        yield from self._capture(_Kind(0, layers or self._plain_layers))

    def padding_step(self, num_rows: int, num_draft_tokens: int) -> Callable[[], None] | None:
        """Returns the stream work of a step of padding rows; None if there are no graphs of it. Nothing must run."""
        made = [graphs for kind, graphs in self._made.items() if kind.num_draft_tokens == num_draft_tokens]
        graphs = made[0].get(num_rows) if made else None
        if graphs is None or not (ending := graphs.endings.get(SamplingMode.NOISE)):
            return None
        self._graphed.clear()

        def work() -> None:
            graphs.forward.work()
            ending.part.work()

        return work

    def private_region(self, draft: DraftSizes, chunk_tokens: int) -> Region:
        """Makes memory such as a draft's, which no draft shares."""
        shape = replace(draft.shape(self._state.attachment.shape, self._target.dtype), chunk_tokens=chunk_tokens)
        specs, slots = (*shape.given_specs(), *shape.own_specs()), self._graphed.slots
        buffers = {BufferName(spec.name): slots.new_zeros(spec.shape, dtype=spec.dtype) for spec in specs}
        return self._state.make_region(shape, draft, buffers, number=0, vocab_size=1, log=EventLog())

    def phases(self, command: StepCommand, region: Region | None, layers: tuple[int, ...]) -> list[Phase]:
        """A decode step, by graphs as far as there are any."""
        num_rows = len(command.slots)
        drafted = region if command.most_draft_tokens else None
        kind = _Kind(0, layers or self._plain_layers)
        if drafted is not None:
            kind = self._kind(command.most_draft_tokens, drafted.sizes, layers)
        layers, made = kind.layers, self._made.get(kind)
        graphs = None if made is None else made.get(num_rows)
        target, future_map, graphed = self._target, self._state.future_map, self._graphed
        rows = graphed.slots[: self._eager_size or num_rows] if graphs is None else graphs.rows
        copies_stamps = command.waits_for_stash_read
        masks, source, copy = self._state.masks_of(command), drafted, None
        if masks is not None and drafted is not None and command.copies_tokens:
            source = self._state.regions[-command.attachment]
            copy = partial(self._copy, command, masks, drafted, source, rows[:num_rows])

        forward = Latest[TargetForward]()

        def run() -> None:
            forward.value = self._forward(command, source, graphs, rows, layers)

        def end() -> None:
            if copies_stamps and region is not None:
                future_map.copy_stamps(command.step, region)
            mode = self._state.slots.sampling_mode(command.slots)
            if graphs is not None and command.top_logprobs is None and masks is None and mode in graphs.endings:
                ending = graphs.endings[mode]
                ending.part.replay(future_map, command)
                if region is not None:
                    region.log_stash(command.step, command.slots, ending.result.value)
                return
            # Rows beyond the command's slots are padding.
            allowed = None if masks is None else masks.take(rows, forward.value.tokens.shape[1])
            logits, most = target.logits(forward.value), kind.simulated_tokens
            sampled = target.sample(
                forward.value, logits, mode, command.top_logprobs, num_draft_tokens=most, allowed=allowed
            )
            result = merged(lambda values: values[0][:num_rows], sampled)
            future_map.publish(command.step, rows[:num_rows], result)
            target.record_output(rows[:num_rows], result)
            if region is not None:
                region.stash(command.step, command.slots, rows[:num_rows], result)
            graphed.stamp_end()

        return phases_of_decode(run, end, copy=copy)

    def _copy(self, command: StepCommand, masks: StepMasks, drafted: Region, own: Region, rows: torch.Tensor) -> None:
        """Copies the tokens of `drafted` for a grammar worker, and to `own`, from where the forward copies them in."""
        draft_tokens = self._state.future_map.copy_in(command.step, drafted, command.slots, rows)
        masks.copy_out(rows, draft_tokens)
        own.keep_tokens(rows, draft_tokens)

    def _forward(
        self,
        command: StepCommand,
        region: Region | None,
        graphs: _Graphs | None,
        rows: torch.Tensor,
        layers: tuple[int, ...],
    ) -> TargetForward:
        """Copies in from `region`, if that drafts in this step, and runs the forward."""
        future_map = self._state.future_map
        if graphs is not None:
            if region is not None:
                future_map.log_copy_in(command.step, region, command.slots)
            graphs.forward.replay(future_map, command)
            return graphs.result.value
        draft_tokens = None
        if region is not None:
            copied = future_map.copy_in(command.step, region, command.slots, rows)
            draft_tokens = copied[:, : command.most_draft_tokens]
        self._graphed.stamp_start()
        return self._target.forward(command.step, rows, draft_tokens, layers)

    def _kind(self, num_draft_tokens: int, draft: DraftSizes, layers: tuple[int, ...]) -> _Kind:
        simulated_tokens = draft.num_draft_tokens if self._target.simulates else None
        is_few = num_draft_tokens < draft.num_draft_tokens
        return _Kind(num_draft_tokens, layers, simulated_tokens, is_few=is_few)

    def _capture(self, kind: _Kind) -> Generator[None, None, None]:
        if kind not in self._made:
            what = f"steps with {kind.num_draft_tokens} draft tokens" if kind.num_draft_tokens else "plain steps"
            sizes = self._few_sizes if kind.is_few else self._sizes
            self._made[kind] = yield from capture_buckets(what, sizes, partial(self._make, kind))

    def _make(self, kind: _Kind, size: int) -> _Graphs:
        num_draft_tokens, layers = kind.num_draft_tokens, kind.layers
        graphed, target = self._graphed, self._target
        rows, future_map, result = graphed.slots[:size], self._state.future_map, Latest[TargetForward]()

        def forward() -> None:
            draft_tokens = None
            if num_draft_tokens:
                draft_tokens = future_map.copy_in_captured(graphed.step, rows, num_draft_tokens)
            result.value = target.forward(graphed.step, rows, draft_tokens, layers)

        part = graphed.capture_part(forward)
        return _Graphs(rows, part, result, {mode: self._ending(rows, result, mode, kind) for mode in GRAPHED_MODES})

    def _ending(self, rows: torch.Tensor, forward: Latest[TargetForward], mode: SamplingMode, kind: _Kind) -> _Ending:
        result = Latest[VerifyResult]()

        def work() -> None:
            logits, most = self._target.logits(forward.value), kind.simulated_tokens
            result.value = self._target.sample(forward.value, logits, mode, num_draft_tokens=most)
            self._state.future_map.publish(self._graphed.step, rows, result.value)
            self._state.future_map.stash_captured(self._graphed.step, rows, result.value)

        return _Ending(self._graphed.capture_part(work), result)

    def _warm_up_for_drafts(self) -> None:
        """Compiles what steps with any draft do, and its graphs, before sequences run that would wait for it."""
        if most := self._state.attachment.shape.num_draft_tokens:
            for num_tokens, hidden_width in product({1, most}, (0, self._target.hidden_size)):
                self._warm_up(DraftSizes(num_draft_tokens=num_tokens, hidden_width=hidden_width))

    def _warm_up(self, draft: DraftSizes) -> None:
        """Copies in and stashes on memory of its own, so that it is compiled for steps with graphs and without."""
        # Not the slots of the last step: its numbers would be indices here.
        rows, region = self._graphed.slots.new_zeros(1), self.private_region(draft, 1)
        future_map = self._state.future_map
        step = CapturedStep(rows, rows.new_zeros(len(NO_REGION)), end=StampPlace(rows.new_zeros(1), rows))
        future_map.copy_in(0, region, (), rows)
        future_map.copy_in_captured(step, rows, draft.num_draft_tokens)
        for num_tokens in (1, draft.num_draft_tokens + 1):
            states = rows.new_zeros((1, num_tokens, draft.hidden_width), dtype=self._target.dtype)
            result = VerifyResult(
                seq_lens=rows,
                num_accepted=rows,
                tokens=rows.new_zeros(1, num_tokens),
                hidden_states=states if draft.hidden_width else None,
            )
            region.stash(0, (), rows, result)
            future_map.stash_captured(step, rows, result)


def phases_of_decode(
    run: Callable[[], None], end: Callable[[], None], *, copy: Callable[[], None] | None = None
) -> list[Phase]:
    """The phases of a decode step: its forward, and the rest with publish and stash. They stamp by themselves.

    The stash is signalled first: the draft's stream waits for it. The scheduler polls, and sees it no later.
    `copy`: comes before the forward, where a grammar worker waits for it.
    """
    fences = (FenceName.VERIFY_STASH, FenceName.VERIFY_PUBLISH)
    begin = [] if copy is None else [Phase(copy, (FenceName.VERIFY_COPIED,), WaitPlace.START, is_stamped=True)]
    return [
        *begin,
        Phase(run, place=None if begin else WaitPlace.START, is_stamped=True),
        Phase(end, fences, WaitPlace.SAMPLING, is_stamped=True),
    ]
