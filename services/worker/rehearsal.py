"""Runs steps before there are any: a GPU compiles and loads a kernel when it is first used, which takes long."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, PrefillChunk, SlotUpdate, StepCommand
from slipstream.services.worker.graphs import batch_buckets, sizes_up_to

if TYPE_CHECKING:
    from slipstream.services.worker.engine import RoleEngine
    from slipstream.services.worker.epoch import EpochState

_MIXED_SIZES = (1, 16, 128, 512, 1024)
"""Prompt tokens of mixed steps: what differs only by their number, prompts have rehearsed."""
_FEW_TOKENS = 8
_PLAIN = SamplingParams()
_MODES = (SamplingParams(temperature=1.0, repetition_penalty=1.1), SamplingParams(temperature=1.0, top_p=0.9), _PLAIN)
"""A request for each way to sample. The last one leaves nothing over."""


def rehearse_prompts(role: RoleEngine, state: EpochState) -> None:
    """Runs prefill steps of all kinds, of one prompt and of two, in slots without pages.

    The largest is first: the others then live in its memory.
    """
    shape = state.attachment.shape
    for size in sorted({*sizes_up_to(shape.chunk_tokens), 1}, reverse=True):
        lengths = (size,) if size == 1 or shape.num_slots == 2 else (1, size - 1)
        rehearse(role, state, _chunks(1, *lengths))


def rehearse_mixed(
    role: RoleEngine, state: EpochState, num_draft_tokens: int = 0, attachment: int = 0, *, grammar: int = 0
) -> None:
    """Verify: runs steps that decode and take in chunks of all sizes, in every way to sample, in slots without pages.

    `num_draft_tokens`: of each row; `attachment`: of the draft that takes part; `grammar`: of a grammar worker, for
    further steps. The largest is first.
    """
    shape = state.attachment.shape
    most_rows, most_tokens = shape.num_slots - 2, shape.chunk_tokens
    width = num_draft_tokens + 1
    if most_rows < 1:
        return  # the only slot cannot do both

    least_room = -(-most_tokens // 4)

    def run(
        num_rows: int,
        num_tokens: int,
        sampling: SamplingParams = _PLAIN,
        top_logprobs: int | None = None,
        *,
        grammar: int = 0,
    ) -> None:
        # As many as beside these rows in one step; see `BatchSizes.room_for_prompts`.
        room = max(most_tokens - num_rows * width, least_room)
        rehearse(
            role,
            state,
            _chunks(shape.num_slots - 1, min(num_tokens, room)),
            slots=tuple(range(1, num_rows + 1)),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            top_logprobs=top_logprobs,
            attachment=attachment,
            grammar=grammar,
        )

    run(most_rows, most_tokens)
    for size in sizes_up_to(most_rows * width + least_room):
        if size > most_tokens:  # Smaller ones, prompts have rehearsed.
            run((size - least_room) // width, least_room)
    for size in reversed((*_MIXED_SIZES, most_tokens)):
        run(1, size)
    for num_rows in reversed(batch_buckets(most_rows)):
        run(num_rows, _FEW_TOKENS)
    for num_rows, sampling in product((most_rows, 1), _MODES):
        for top_logprobs in (0, None):
            run(num_rows, _FEW_TOKENS, sampling, top_logprobs)
            if grammar:
                run(num_rows, _FEW_TOKENS, sampling, top_logprobs, grammar=grammar)


def rehearse_masked(
    role: RoleEngine, state: EpochState, num_draft_tokens: int = 0, attachment: int = 0, *, grammar: int
) -> None:
    """Verify: runs steps that decode in which all slots have a constraint, and prompts with one.

    `num_draft_tokens`, `attachment`: as in `rehearse_mixed`, with graphs; `grammar`: the grammar worker's attachment.
    """
    most_rows = state.attachment.shape.num_slots - 1
    step = partial(rehearse, role, state, grammar=grammar)
    drafts = [(0, 0)] if not num_draft_tokens else [(num_draft_tokens, attachment), (0, 0)]
    for (most, number), num_rows in product(drafts, reversed(batch_buckets(most_rows))):
        step(slots=tuple(range(1, num_rows + 1)), num_draft_tokens=most, attachment=number)
    (most, number), *_ = drafts
    for num_rows, sampling, top_logprobs in product((most_rows, 1), _MODES, (0, None)):
        slots = tuple(range(1, num_rows + 1))
        step(slots=slots, num_draft_tokens=most, attachment=number, sampling=sampling, top_logprobs=top_logprobs)
    for num_prompts in {1, min(2, most_rows)}:
        step(_chunks(1, *num_prompts * (1,)))


def rehearse_even(
    role: RoleEngine, state: EpochState, counts: tuple[int, ...], attachment: int, *, grammar: int
) -> None:
    """Verify: runs steps with each of these numbers of draft tokens, with a chunk of a prompt and without.

    `attachment`, `grammar`: as in `rehearse_mixed`.
    """
    last_slot = state.attachment.shape.num_slots - 1
    if last_slot < 2:
        return
    beside = (_chunks(last_slot, _FEW_TOKENS), ())
    step = partial(rehearse, role, state, attachment=attachment)
    for count, num_rows, chunks, sampling in product(counts, (last_slot - 1, 1), beside, _MODES):
        slots = tuple(range(1, num_rows + 1))
        for constrained in sorted({0, grammar}):
            step(chunks, slots=slots, num_draft_tokens=count, sampling=sampling, grammar=constrained)


def rehearse_drafting(role: RoleEngine, state: EpochState) -> None:
    """A draft: runs decode steps, those too that no graph takes, in slots without pages.

    Of an odd number of rows as well: kernels differ by how what they read is aligned.
    """
    sizes, most = batch_buckets(state.attachment.shape.num_slots - 1), state.attachment.shape.num_draft_tokens
    for num_rows in sorted({*sizes, *(size - 1 for size in sizes if size > 1)}, reverse=True):
        rehearse(role, state, slots=tuple(range(1, num_rows + 1)), num_draft_tokens=most, sampling=_MODES[0])
    rehearse(role, state, slots=tuple(range(1, max(sizes) + 1)), num_draft_tokens=most)  # leaves no penalties


def rehearse(
    role: RoleEngine,
    state: EpochState,
    chunks: tuple[PrefillChunk, ...] = (),
    *,
    slots: tuple[int, ...] = (),
    num_draft_tokens: int = 0,
    sampling: SamplingParams = _PLAIN,
    top_logprobs: int | None = None,
    attachment: int = 0,
    grammar: int = 0,
) -> None:
    """Runs a step of new sequences without pages: those of `chunks`, and `slots` that decode.

    `num_draft_tokens`: of each of these. `grammar`: the attachment of a grammar worker; with one all slots have a
    constraint. Nothing is signalled.
    """
    epoch, taking_in = state.attachment, tuple(chunk.slot for chunk in chunks)
    updates = tuple(
        SlotUpdate(slot=slot, generation=0, limit_tokens=epoch.context_tokens, sampling=sampling)
        for slot in sorted({*slots, *taking_in})
    )
    command = StepCommand(
        epoch=epoch.epoch,
        step=0,
        slots=slots,
        num_draft_tokens=(num_draft_tokens,) * len(slots) if num_draft_tokens else (),
        chunks=chunks,
        updates=updates,
        top_logprobs=top_logprobs,
        attachment=attachment,
        grammar=grammar,
        constrained=(*slots, *taking_in) if grammar else (),
        ops=FenceOps(signals=(FencePoint(FenceName.VERIFY_COPIED, 0),)) if grammar and num_draft_tokens else FenceOps(),
    )
    state.stage(command)
    changes = state.slots.changes(command.updates, state.staging)
    phases = role.phases(command, state)
    state.staging.flush()
    state.slots.take_over(changes)
    for phase in phases:
        phase.work()


def _chunks(first_slot: int, *lengths: int) -> tuple[PrefillChunk, ...]:
    """Whole prompts of these lengths, in slots one after the other."""
    return tuple(
        PrefillChunk(slot=slot, start=0, tokens=(0,) * length, is_last=True)
        for slot, length in enumerate(lengths, start=first_slot)
    )
