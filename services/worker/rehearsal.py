"""Takes in prompts before there are any: a GPU compiles and loads a kernel when it is first used, which takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.api.sequence import SamplingParams
from slipstream.common.worker.step import PrefillChunk, SlotUpdate, StepCommand, StepKind

if TYPE_CHECKING:
    from slipstream.services.worker.engine import RoleEngine
    from slipstream.services.worker.epoch import EpochState

_SIZES = (1, 2, 16, 32, *range(64, 1024, 64), *range(1024, 2049, 128))
"""Tokens of steps between which other kernels run: libraries choose theirs by size, and load each for 10 ms or more."""


def rehearse_prompts(role: RoleEngine, state: EpochState) -> None:
    """Runs prefill steps of all kinds, of one prompt and of two, in slots without pages.

    The largest comes first: the others then live in its memory.
    """
    shape = state.attachment.shape
    for size in sorted({min(size, shape.chunk_tokens) for size in (*_SIZES, shape.chunk_tokens)}, reverse=True):
        lengths = (size,) if size == 1 or shape.num_slots == 2 else (1, size - 1)
        chunks = tuple(
            PrefillChunk(slot=slot, start=0, tokens=(0,) * length, is_last=True)
            for slot, length in enumerate(lengths, start=1)
        )
        rehearse(role, state, StepKind.PREFILL, chunks)


def rehearse(role: RoleEngine, state: EpochState, kind: StepKind, chunks: tuple[PrefillChunk, ...] = ()) -> None:
    """Runs a step of new sequences without pages: those of `chunks`, or in slot 1. Nothing is signalled."""
    attachment = state.attachment
    slots = tuple(chunk.slot for chunk in chunks) or (1,)
    limit, sampling = attachment.context_tokens, SamplingParams()
    updates = tuple(SlotUpdate(slot=slot, generation=0, limit_tokens=limit, sampling=sampling) for slot in slots)
    command = StepCommand(epoch=attachment.epoch, step=0, kind=kind, slots=slots, chunks=chunks, updates=updates)
    state.staging.begin(command.step, command.slots)
    changes = state.slots.changes(command.updates, state.staging)
    phases = role.phases(command, state)
    state.staging.flush()
    state.slots.take_over(changes)
    for phase in phases:
        phase.work()
