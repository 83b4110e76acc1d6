"""Verify: runs the target model over the draft's tokens, samples, publishes and stashes.

`measure_step_tokens` finds how many tokens a step that takes in prompts may have while sequences decode, which wait for
it: the largest power of two from LEAST to MOST for which a forward over this number of tokens of a prompt takes no
longer than a pause may be:

- On a GPU PAUSE_S. Many tokens take hardly longer there than few, so that smaller steps would be dear.
- On a CPU, where a token takes about as long among few as among many, as long as verify's part of a decode step of one
  sequence: then a stream's steps take about twice as long while a prompt is taken in beside.

On a CPU a long prompt's attention takes longer than all else. So verify measures the same forward after a long
context, too, and answers after which context a step of so many tokens takes twice as long as at the prompt's begin,
with what it decodes. Steps then have fewer tokens of the prompt. A GPU's do not: attention after 2,000 tokens takes
less than a tenth of a step, and small steps are dear.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import InvalidArgumentError, MismatchError
from slipstream.common.wire.step import FINAL_NORM, FenceName, PrefillChunk, SlotUpdate, WaitPlace
from slipstream.common.wire.worker import DraftSizes, Measurements, StepTokens
from slipstream.services.models.sampler import SimulatedAcceptance
from slipstream.services.verify.graphs import VerifyGraphs
from slipstream.services.verify.target import PromptEnds, Target, TargetStep
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.graphs import (
    RankedCapture,
    at_once,
    forward_size,
    padded_to,
    shortest_seconds,
    sizes_up_to,
    with_padding,
)
from slipstream.services.worker.rehearsal import rehearse_even, rehearse_masked, rehearse_mixed, rehearse_prompts
from slipstream.services.worker.slots import FlatChunks, SamplingMode, check_draft_tokens
from slipstream.services.worker.step_costs import measure_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region, VerifyResult
    from slipstream.services.worker.language_model import LanguageModel

logger = logging.getLogger(__name__)

LEAST, MOST = 32, 2048
"""Tokens of a step that `measure_step_tokens` may answer; the most count only where no pause is asked for."""
PAUSE_S = 0.05
"""Longest pause of the sequences that decode on a GPU, in seconds."""
FAR_TOKENS = 4096
"""Longest context of the second measurement, in tokens."""
_MEASURED_SLOT = 1
"""The slot that the measurement uses, which has no pages yet."""
_REHEARSED = -1
"""Stands for an attachment in steps that are only rehearsed."""


class VerifyEngine:
    """Implements `RoleEngine` with a target model."""

    def __init__(
        self,
        model: LanguageModel,
        description: WorkerDescription,
        *,
        simulate_accept_length: float | None = None,
        simulate_accept_by_position: Sequence[float] = (),
        deterministic_width: int | None = None,
    ) -> None:
        """`simulate_accept_length`: accept by chance, so many tokens a step on average; the output is no text then.

        `simulate_accept_by_position`: the same by the share of each place's tokens, the last one for all further ones.

        `deterministic_width`: where steps are graphs, one size for all of them, with rows of so many tokens.
        """
        self._model = model
        self.description = description
        self._simulate_accept_length = simulate_accept_length
        self._shares = tuple(simulate_accept_by_position)
        self._deterministic_width = deterministic_width
        self._simulated: dict[int, SimulatedAcceptance] = {}
        self._target: Target | None = None
        self._graphs: VerifyGraphs | None = None

    def open(self, state: EpochState) -> Measurements:
        attachment, ranks = state.attachment, self._model.decoder.ranks
        if ranks is not None and state.graphs is not None:
            graphs = replace(state.graphs, capture=RankedCapture(state.graphs.capture, ranks))
            state = replace(state, graphs=graphs)
        width = None if state.graphs is None else self._width(attachment.shape.num_draft_tokens)
        simulates = self._simulate_accept_length is not None or bool(self._shares)
        self._target = Target(self._model, state, self._acceptance, simulates=simulates, width=width)
        if width is not None:
            self._model.decoder.enable_batch_invariance()
            if ranks is not None:
                ranks.tell("enable_batch_invariance")
        self._model.open(state)
        if state.graphs is not None:
            self._graphs = VerifyGraphs(self._target, state, state.graphs, is_one_size=width is not None)
            self._make_ready(state, self._graphs)
        tokens = measure_step_tokens(self._model, state) if attachment.measures_step_tokens else None
        if width is not None or not attachment.measures_costs:
            return Measurements(tokens)
        return Measurements(tokens, measure_costs(attachment.shape, self._padding_step, self._model.device))

    def _make_ready(self, state: EpochState, graphs: VerifyGraphs) -> None:
        """Captures and rehearses steps of all kinds."""
        sizes = state.attachment.expected_draft
        try:
            layers = () if sizes is None else self._check_draft(sizes)
        except MismatchError as error:
            # Its attachment will be refused, which this epoch need not wait for.
            logger.warning("no graphs for the draft that is expected: %s", error)
            sizes, layers = None, ()
        at_once(self._capture_prompts(layers))
        rehearse_prompts(self, state)
        at_once(graphs.capture(sizes, layers))
        shape, draft = state.attachment.shape, sizes
        if shape.num_draft_tokens:
            draft = draft or DraftSizes(num_draft_tokens=shape.num_draft_tokens)
            state.add_region(_REHEARSED, graphs.private_region(draft, shape.chunk_tokens))
        if self.description.takes_masks:
            masks = state.grammar_shape(self.description.vocab_size)
            state.grammars[_REHEARSED] = state.make_masks.unshared(masks, self._model.device)
            drafted = (0, 0) if sizes is None else (sizes.num_draft_tokens, _REHEARSED)
            rehearse_masked(self, state, *drafted, grammar=_REHEARSED)
        if self._deterministic_width is None:
            self._rehearse_mixed(state, draft)
        state.remove_region(_REHEARSED)
        state.grammars.clear()

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        layers = self._check_draft(region.sizes)
        if self._graphs is not None:
            yield from self._capture_prompts(layers)
            yield from self._graphs.capture(region.sizes, layers)

    def close(self) -> None:
        self._graphs = self._target = None
        self._model.close()

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`: the work with publish and stash, and then work that no stream waits for.

        Raises InvalidArgumentError.
        """
        assert self._target is not None, "a step belongs into an epoch"
        region = state.region_of(command)
        if command.catches_up:
            raise InvalidArgumentError("catches_up", command.catches_up, "false: it is for drafts")
        most = 0 if region is None else region.sizes.num_draft_tokens
        check_draft_tokens(command, most, self.description.row_tokens)
        if command.chunks and command.slots and self._deterministic_width is not None:
            raise InvalidArgumentError("chunks", len(command.chunks), "none in a step that decodes: all have one size")
        layers = () if region is None else self._layers_of(region.sizes)
        if not {*command.constrained} <= {*command.slots, *(chunk.slot for chunk in command.chunks if chunk.is_last)}:
            raise InvalidArgumentError("constrained", command.constrained, "slots that the step has tokens for")
        if self._graphs is not None and command.slots and not command.chunks:
            return self._graphs.phases(command, region, layers)
        return self._step_phases(command, state, self._target, region, layers)

    def _step_phases(
        self, command: StepCommand, state: EpochState, target: Target, region: Region | None, layers: tuple[int, ...]
    ) -> list[Phase]:
        """The phases of a step without graphs of decode steps."""
        command = _in_order_of_draft_tokens(command)
        ending = tuple(chunk.slot for chunk in command.chunks if chunk.is_last)
        slots = (*command.slots, *ending)
        rows = state.staging.put_integers(slots)
        make = partial(TargetStep, target, self._model, state, command, rows[: len(command.slots)], region=region)
        if not command.chunks:
            return _phases(command, state, target, slots, rows, region, make(aux_layers=layers) if slots else None)
        beside = len(command.slots) * (command.most_draft_tokens + 1)
        chunks = FlatChunks.of(self._padded(command, state, beside=beside), state.staging)
        is_plain_cpu = state.graphs is None and self._model.device.type == "cpu"
        if is_plain_cpu and command.most_draft_tokens and not (ending or layers):
            # Another forward costs a CPU little, and after the stash draft computes at the same time.
            take_in = Phase(partial(target.take_in, chunks))
            return [*_phases(command, state, target, slots, rows, region, make()), take_in]
        is_each_alone = state.graphs is not None and self._deterministic_width is not None
        ends = PromptEnds.of(command.chunks, state.staging, is_each_alone=is_each_alone)
        step = make(chunks=chunks, ends=ends, aux_layers=layers)
        return _phases(command, state, target, slots, rows, region, step)

    def _padding_step(self, num_rows: int, num_draft_tokens: int) -> Callable[[], None] | None:
        """Implements `MakeStep`."""
        if self._graphs is not None:
            return self._graphs.padding_step(num_rows, num_draft_tokens)
        model, rows = self._model, torch.zeros(num_rows, dtype=torch.int64, device=self._model.device)
        tokens = rows[:, None].repeat(1, num_draft_tokens + 1)
        positions = tokens + torch.arange(num_draft_tokens + 1, device=rows.device)

        def work() -> None:
            slots = model.slots.take(rows)
            logits = model.decoder.logits(model.forward(slots, tokens, positions).hidden)
            model.slots.sample(slots, logits, positions, SamplingMode.NOISE)

        return work

    def _capture_prompts(self, layers: tuple[int, ...]) -> Generator[None, None, None]:
        """Makes graphs of chunks, unless all steps have one size."""
        if self._deterministic_width is None:
            yield from self._model.capture_prompts(layers)

    def _padded(self, command: StepCommand, state: EpochState, *, beside: int = 0) -> tuple[PrefillChunk, ...]:
        """The command's chunks; on a GPU with padding. `beside`: tokens of the rows that decode."""
        if state.graphs is None:
            return command.chunks
        if self._deterministic_width is not None:
            return padded_to(state.attachment.shape.chunk_tokens, command.chunks)
        return with_padding(command.chunks, state.attachment.shape.chunk_tokens, beside=beside)

    def _rehearse_mixed(self, state: EpochState, draft: DraftSizes | None) -> None:
        """Runs mixed steps with a draft, the expected one if there is any, and without."""
        shape = state.attachment.shape
        self._rehearse_logits(shape.num_slots * (shape.num_draft_tokens + 1))
        if draft is not None:
            grammar = min(state.grammars, default=0)
            rehearse_mixed(self, state, draft.num_draft_tokens, _REHEARSED, grammar=grammar)
            if state.attachment.chooses_draft_tokens:
                counts = self.description.row_tokens.evens(draft.num_draft_tokens)
                rehearse_even(self, state, counts, _REHEARSED, grammar=grammar)
        rehearse_mixed(self, state)

    def _rehearse_logits(self, most: int) -> None:
        """Loads the kernels for logits of up to `most` tokens."""
        model, width = self._model, self._model.decoder.config.hidden_size
        for size in sizes_up_to(forward_size(most)):
            model.decoder.logits(torch.zeros(size, width, dtype=model.slots.dtype, device=model.device))

    def _width(self, num_draft_tokens: int) -> int | None:
        """Tokens of a row in every decode step; None where that may differ."""
        width = self._deterministic_width
        if width is not None and width <= num_draft_tokens:
            rows = f"a row of a step with {num_draft_tokens} draft tokens has {num_draft_tokens + 1}"
            raise MismatchError([f"deterministic width: verify has {width}, but {rows}"])
        return width

    def _acceptance(self, num_draft_tokens: int) -> SimulatedAcceptance | None:
        """Returns the simulation; None where drafts are accepted by the target's tokens. Raises MismatchError."""
        length = self._simulate_accept_length
        if self._shares:
            shares = (*self._shares, *self._shares[-1:] * num_draft_tokens)[:num_draft_tokens]
            return self._simulated.setdefault(num_draft_tokens, SimulatedAcceptance(shares))
        if length is None:
            return None
        if num_draft_tokens not in self._simulated:
            if length > num_draft_tokens + 1:
                most = f"with {num_draft_tokens} draft tokens a step yields {num_draft_tokens + 1} at most"
                raise MismatchError([f"simulated accept length: verify has {length:g}, but {most}"])
            self._simulated[num_draft_tokens] = SimulatedAcceptance.with_mean(length, num_draft_tokens)
        return self._simulated[num_draft_tokens]

    def _check_draft(self, draft: DraftSizes) -> tuple[int, ...]:
        """Returns the layers whose inputs a draft reads. Raises MismatchError if it does not fit this model."""
        config, layers = self._model.decoder.config, self._layers_of(draft)
        self._acceptance(draft.num_draft_tokens)
        if max((layer for layer in layers if layer != FINAL_NORM), default=0) > config.num_layers:
            raise MismatchError([f"layers to fuse: draft asks for {list(layers)}, verify has {config.num_layers}"])
        if len(layers) * config.hidden_size != draft.hidden_width:
            widths = f"{len(layers)} of {config.hidden_size} are not the {draft.hidden_width} that draft reads"
            raise MismatchError([f"width of the hidden states: {widths}"])
        return layers

    def _layers_of(self, draft: DraftSizes) -> tuple[int, ...]:
        """The layers whose inputs a draft reads: those it names, or the paper's."""
        if not draft.hidden_width:
            return ()
        return draft.hidden_layers or fused_layers(self._model.decoder.config.num_layers)


def _phases(
    command: StepCommand,
    state: EpochState,
    target: Target,
    slots: tuple[int, ...],
    rows: torch.Tensor,
    region: Region | None,
    step: TargetStep | None,
) -> list[Phase]:
    """Publishes and stashes the result of a step, if it has one, for `slots`; `rows` are the same on the device.

    `step`: None for a step of no slot.
    """
    results: list[VerifyResult] = []
    copies_stamps = command.waits_for_stash_read

    def publish() -> None:
        if copies_stamps and region is not None:
            state.future_map.copy_stamps(command.step, region)
        result = None if step is None else step.sample()
        if result is not None:
            results.append(result)
            state.future_map.publish(command.step, rows, result)

    def stash() -> None:
        for result in results:
            if region is not None:
                region.stash(command.step, slots, rows, result)
            target.record_output(rows, result)

    phases = [Phase(_nothing if step is None else step.forward, place=WaitPlace.START)]
    if step is not None and command.copies_tokens:
        phases = [Phase(step.copy_in, (FenceName.VERIFY_COPIED,), WaitPlace.START), Phase(step.forward)]
    if step is not None and command.chunks and region is not None and region.shape.hidden_width:
        phases.append(Phase(step.leave_states, place=WaitPlace.PREFILL_HIDDEN))
    phases.append(Phase(publish, (FenceName.VERIFY_PUBLISH,), WaitPlace.SAMPLING))
    return [*phases, Phase(stash, (FenceName.VERIFY_STASH,))]


def _in_order_of_draft_tokens(command: StepCommand) -> StepCommand:
    """The same step with its rows in the order of their numbers of draft tokens: those of one number are a batch."""
    if len(set(command.num_draft_tokens)) < 2:
        return command
    counts, slots = zip(*sorted(zip(command.num_draft_tokens, command.slots, strict=True)), strict=True)
    return replace(command, slots=slots, num_draft_tokens=counts)


def _nothing() -> None:
    """The work of a step of no slot."""


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head fuses: a low, a middle and a high one (Li et al., 2025)."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))


def measure_step_tokens(model: LanguageModel, state: EpochState) -> StepTokens:
    """Stream work: returns the tokens of a step. Waits for the device. Nothing must run yet."""
    is_cpu, most = model.device.type == "cpu", state.attachment.shape.chunk_tokens
    _put(state, SlotUpdate(slot=_MEASURED_SLOT, generation=0, limit_tokens=state.attachment.context_tokens))
    most_s = state.attachment.longest_pause_ns / 1e9
    if not most_s:
        most = min(MOST, most)
        most_s = shortest_seconds(partial(_decode, model), model.device) if is_cpu else PAUSE_S
    found, found_s, size = LEAST, 0.0, LEAST
    while size <= most:
        seconds = shortest_seconds(partial(_prefill, model, state, size), model.device)
        if size > LEAST and seconds > most_s:
            break
        found, found_s, size = size, seconds, 2 * size
    doubling_context = _doubling_context(model, state, found, found_s, most_s) if is_cpu else None
    logger.info(
        "steps that decode and take in prompts have %d tokens: a prompt's take %.1f ms, a pause may have %.1f ms; "
        "they take twice as long after %s tokens",
        found,
        1e3 * found_s,
        1e3 * most_s,
        "any number of" if doubling_context is None else doubling_context,
    )
    return StepTokens(min(found, state.attachment.shape.chunk_tokens), doubling_context)


def _doubling_context(
    model: LanguageModel, state: EpochState, num_tokens: int, seconds: float, decode_s: float
) -> int | None:
    """The context after which a step with `num_tokens` of a prompt takes twice as long as at its begin.

    None if none does. `seconds`: of the prompt's tokens there; `decode_s`: of the other part of the step.
    """
    context = min(FAR_TOKENS, state.attachment.context_tokens - num_tokens)
    if context <= 0:
        return None
    far_s = shortest_seconds(partial(_prefill, model, state, num_tokens, start=context), model.device)
    more_s = far_s - seconds
    # A hundredth is less than what two measurements of the same differ by.
    return None if more_s < seconds / 100 else max(1, round(context * (seconds + decode_s) / more_s))


def _put(state: EpochState, update: SlotUpdate) -> None:
    state.staging.begin(0, (_MEASURED_SLOT,))
    changes = state.slots.changes((update,), state.staging)
    state.staging.flush()
    state.slots.take_over(changes)


def _decode(model: LanguageModel) -> None:
    """One sequence with as many draft tokens as there may be."""
    *_, (slots, tokens, positions) = model.slots.warm_up()
    model.decoder.logits(model.forward(slots, tokens, positions).hidden)


def _prefill(model: LanguageModel, state: EpochState, num_tokens: int, *, start: int = 0) -> None:
    state.staging.begin(0, (_MEASURED_SLOT,))
    chunk = PrefillChunk(slot=_MEASURED_SLOT, start=start, tokens=(0,) * num_tokens, is_last=True)
    chunks = FlatChunks.of((chunk,), state.staging)
    state.staging.flush()
    model.decoder.logits(model.prefill(chunks, chunks.ragged.begins[1:] - 1).hidden)
