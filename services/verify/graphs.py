"""Verify's decode steps as graphs: the forward, then sampling with publish.

Two graphs a step, so that a step whose requests ask for more than the graphs were captured for still has its forward
from one. They touch what is private to verify, and the results: what a draft gives and is given is copied outside of
them, so that drafts come and go without a capture, unless one reads other layers or drafts another number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from slipstream.common.worker.access_log import AccessLog
from slipstream.common.worker.contract import DraftSizes
from slipstream.common.worker.layout import BufferName
from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.verify.target import TargetForward, merged
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import StampPlace, VerifyResult
from slipstream.services.worker.graphs import GRAPHED_MODES, GraphedPart, Latest, batch_buckets, capture_buckets

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from slipstream.common.worker.step import StepCommand
    from slipstream.services.verify.target import Target
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region
    from slipstream.services.worker.graphs import Buckets, GraphedStep
    from slipstream.services.worker.slots import SamplingMode


@dataclass(frozen=True, slots=True)
class _Ending:
    """The graph of a step behind its forward."""

    publish: GraphedPart
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


class VerifyGraphs:
    """The decode steps of an epoch."""

    def __init__(self, target: Target, state: EpochState, graphed: GraphedStep, *, is_one_size: bool = False) -> None:
        """`is_one_size`: every batch is padded to all slots."""
        self._target = target
        self._state = state
        self._graphed = graphed
        self._num_slots = state.attachment.shape.num_slots
        self._sizes = (self._num_slots - 1,) if is_one_size else batch_buckets(self._num_slots - 1)
        # Rows of a forward without a graph: padded, too, if all steps have one size.
        self._eager_size = self._sizes[0] if is_one_size else None
        self._made: dict[tuple[int, tuple[int, ...]], Buckets[_Graphs]] = {}
        """By the number of draft tokens, 0 for plain steps, and the layers whose inputs a draft reads."""
        self._plain_layers: tuple[int, ...] = ()
        """The layers of plain steps that no draft reads from: as they were captured first."""
        self._draft_tokens: dict[int, torch.Tensor] = {}
        """[num_slots, K] int64 by K: the copy of a step's draft tokens."""

    def capture(self, draft: DraftSizes | None, layers: tuple[int, ...]) -> Generator[None, None, None]:
        """Stream work: makes the graphs of steps with such a draft, as far as they are not there.

        `draft`: None for plain steps alone. `layers`: those whose inputs it reads. Other work may be done between two
        items.
        """
        if not self._made:
            self._plain_layers = layers
            self._warm_up_for_drafts()
        if draft is not None:
            num_tokens = draft.num_draft_tokens
            shape = (self._num_slots, num_tokens)
            self._draft_tokens.setdefault(num_tokens, self._graphed.slots.new_zeros(shape))
            yield from self._capture(num_tokens, layers)
        yield from self._capture(0, layers or self._plain_layers)

    def private_region(self, draft: DraftSizes, chunk_tokens: int) -> Region:
        """Makes memory such as a draft's, which no draft shares."""
        shape = replace(draft.shape(self._state.attachment.shape, self._target.dtype), chunk_tokens=chunk_tokens)
        specs, slots = (*shape.given_specs(), *shape.own_specs()), self._graphed.slots
        buffers = {BufferName(spec.name): slots.new_zeros(spec.shape, dtype=spec.dtype) for spec in specs}
        return self._state.make_region(shape, draft, buffers, number=0, vocab_size=1, log=AccessLog())

    def phases(self, command: StepCommand, region: Region | None, layers: tuple[int, ...]) -> list[Phase]:
        """A decode step, by graphs as far as there are any: the work up to publish, then the stash."""
        num_rows = len(command.slots)
        has_draft = command.kind is StepKind.DECODE
        num_draft_tokens = region.sizes.num_draft_tokens if region is not None and has_draft else 0
        layers = layers if num_draft_tokens else layers or self._plain_layers
        graphs = self._made[num_draft_tokens, layers].get(num_rows)
        target, future_map, graphed = self._target, self._state.future_map, self._graphed
        rows = graphed.slots[: self._eager_size or num_rows] if graphs is None else graphs.rows
        results: list[VerifyResult] = []

        def publish() -> None:
            mode, draft_tokens = self._state.slots.sampling_mode(command.slots), None
            if region is not None and num_draft_tokens:
                draft_tokens = self._draft_tokens[num_draft_tokens][: len(rows)]
                future_map.copy_in(command.step, region, command.slots, rows, draft_tokens)
            if graphs is None:
                graphed.stamp_start()
                forward = target.forward(command.step, rows, draft_tokens, layers)
            else:
                graphs.forward.replay(future_map, command)
                forward = graphs.result.value
                if command.top_logprobs is None and mode in graphs.endings:
                    graphs.endings[mode].publish.replay(future_map, command)
                    results.append(graphs.endings[mode].result.value)
                    return
            # Rows beyond the command's slots are padding.
            result = merged(lambda values: values[0][:num_rows], target.sample(forward, mode, command.top_logprobs))
            results.append(result)
            future_map.publish(command.step, rows[:num_rows], result)
            target.record_output(rows[:num_rows], result)

        def stash() -> None:
            (result,) = results
            if region is None:
                graphed.stamp_end()
            else:
                region.stash(command.step, command.slots, rows[: len(result.seq_lens)], result, graphed.step.end)

        return [
            Phase(publish, FenceName.VERIFY_PUBLISH, is_stamped=True),
            Phase(stash, FenceName.VERIFY_STASH, is_stamped=True),
        ]

    def _capture(self, num_draft_tokens: int, layers: tuple[int, ...]) -> Generator[None, None, None]:
        key = (num_draft_tokens, layers)
        if key not in self._made:
            what = f"steps with {num_draft_tokens} draft tokens" if num_draft_tokens else "plain steps"
            self._made[key] = yield from capture_buckets(what, self._sizes, partial(self._make, *key))

    def _make(self, num_draft_tokens: int, layers: tuple[int, ...], size: int) -> _Graphs:
        graphed, target = self._graphed, self._target
        rows = graphed.slots[:size]
        draft_tokens = self._draft_tokens[num_draft_tokens][:size] if num_draft_tokens else None
        result = Latest[TargetForward]()

        def forward() -> None:
            result.value = target.forward(graphed.step, rows, draft_tokens, layers)

        part = graphed.capture_part(forward)
        return _Graphs(rows, part, result, {mode: self._ending(rows, result, mode) for mode in GRAPHED_MODES})

    def _ending(self, rows: torch.Tensor, forward: Latest[TargetForward], mode: SamplingMode) -> _Ending:
        result = Latest[VerifyResult]()

        def publish() -> None:
            result.value = self._target.sample(forward.value, mode)
            self._state.future_map.publish(self._graphed.step, rows, result.value)

        return _Ending(self._graphed.capture_part(publish), result)

    def _warm_up_for_drafts(self) -> None:
        """Compiles what steps with any draft do outside of graphs, before sequences run that would wait for it."""
        if most := self._state.attachment.shape.num_draft_tokens:
            for num_tokens, hidden_width in product({1, most}, (0, self._target.hidden_size)):
                self._warm_up(DraftSizes(num_draft_tokens=num_tokens, hidden_width=hidden_width))

    def _warm_up(self, draft: DraftSizes) -> None:
        """Does on memory of its own what steps with a draft do outside of graphs, so that it is compiled."""
        # Not the slots of the last step: its numbers would be indices here.
        rows, region = self._graphed.slots.new_zeros(1), self.private_region(draft, 1)
        self._state.future_map.copy_in(0, region, (), rows, rows.new_zeros(1, draft.num_draft_tokens))
        for num_tokens in (1, draft.num_draft_tokens + 1):
            result = VerifyResult(
                seq_lens=rows,
                num_accepted=rows,
                tokens=rows.new_zeros(1, num_tokens),
                hidden_states=rows.new_zeros((1, num_tokens, draft.hidden_width), dtype=self._target.dtype),
            )
            for end in (None, StampPlace(rows.new_zeros(1), rows)):
                region.stash(0, (), rows, result, end)
