"""Steps of verify with masks, of which a test is the scheduler, the draft and the grammar worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slipstream.common.device.interface import Device
from slipstream.common.wire.events import Site
from slipstream.common.wire.layout import (
    GRAMMAR_GIVEN_FENCES,
    GRAMMAR_OWN_FENCES,
    UNMASKED,
    UNMATCHED,
    BufferName,
    GrammarShape,
)
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import (
    FenceName,
    FenceOps,
    FencePoint,
    FenceWait,
    PrefillChunk,
    SlotUpdate,
    StepCommand,
    WaitPlace,
)
from slipstream.common.wire.worker import DraftSizes, OfferedRegion
from slipstream.services.worker.engine import RoleEngine
from tests.harness.workers import ATTACHMENT, SHAPE, LocalWorker, SharedArenas, attach

GRAMMAR, EPOCH, K = 200, 1, SHAPE.num_draft_tokens
CONSTRAINED, FREE = 1, 2
"""Slots."""
PATIENCE_S = 20.0


class MaskedSteps:
    """Verify with a draft and a grammar worker attached, which do what the test does."""

    def __init__(self, role: RoleEngine, device: Device) -> None:
        self.vocab_size = role.description.vocab_size
        shape = GrammarShape(num_slots=SHAPE.num_slots, num_draft_tokens=K, vocab_size=self.vocab_size)
        self.own = device.create_arena(shape.own_specs(), GRAMMAR_OWN_FENCES, on_host=True)
        self.given = device.create_arena(shape.given_specs(), GRAMMAR_GIVEN_FENCES, on_host=True)
        self.ready, self.copied = self.own.fence(FenceName.GRAMMAR_READY), self.given.fence(FenceName.VERIFY_COPIED)
        self.arenas = SharedArenas(device=device)
        self.worker = LocalWorker(role, device=device)
        attach(self.worker, self.arenas, EPOCH, expected_draft=DraftSizes(num_draft_tokens=K))
        own, given = self.own.manifest, self.given.manifest
        self.worker.attach_region(OfferedRegion(epoch=EPOCH, attachment=GRAMMAR, own=own, given=given))

    def send(self, step: int, *, chunks: tuple[PrefillChunk, ...] = (), sampling: SamplingParams | None = None) -> None:
        """Sends a step: prompts in both slots, or one that decodes them with K draft tokens."""
        slots = () if chunks else (CONSTRAINED, FREE)
        signals = (FenceName.VERIFY_COPIED,) * bool(slots) + (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH)
        updates = [
            SlotUpdate(slot=slot, generation=1, pages=(2 * slot, 2 * slot + 1), limit_tokens=32, sampling=sampling)
            for slot in (CONSTRAINED, FREE)
            if sampling is not None
        ]
        self.worker.send(
            StepCommand(
                epoch=EPOCH,
                step=step,
                slots=slots,
                num_draft_tokens=(K,) * len(slots),
                chunks=chunks,
                updates=tuple(updates),
                attachment=ATTACHMENT,
                grammar=GRAMMAR,
                constrained=(CONSTRAINED,),
                ops=FenceOps(
                    (FenceWait(FenceName.GRAMMAR_READY, step, WaitPlace.SAMPLING),),
                    tuple(FencePoint(fence, step) for fence in signals),
                ),
            )
        )

    def propose(self, *tokens: int) -> None:
        """The draft's tokens of both slots."""
        draft_tokens = self.arenas.tensor(BufferName.DRAFT_TOKENS)
        for slot in (CONSTRAINED, FREE):
            for place, token in enumerate(tokens):
                draft_tokens[slot, place] = token

    def allow(self, *places: int, stamp: int) -> None:
        """The masks of the constrained slot: one token at each place. Stamps them."""
        masks = self.own.tensor(BufferName.MASKS).numpy()[CONSTRAINED]
        masks[:] = 0
        for place, token in enumerate(places):
            masks[place, token // 32] = np.uint32(1 << token % 32).astype(np.int32)
        self.own.tensor(BufferName.MASK_STAMPS)[CONSTRAINED] = stamp

    def result(self, step: int, slot: int) -> tuple[int, list[int]]:
        """What was published: the number of accepted tokens, or a fault, and the tokens."""
        assert self.arenas.fence(FenceName.VERIFY_PUBLISH).wait_on_host(step, PATIENCE_S)
        row = step % SHAPE.ring
        accepted = self.arenas.tensor(BufferName.NUM_ACCEPTED)[row, slot]
        return int(accepted), self.arenas.tensor(BufferName.OUTPUT_TOKENS)[row, slot].tolist()

    def is_published(self, step: int) -> bool:
        """Whether a step's results are there."""
        return self.arenas.fence(FenceName.VERIFY_PUBLISH).poll() >= step


@contextmanager
def masked_steps(role: RoleEngine, device: Device) -> Iterator[MaskedSteps]:
    """Opens and closes it."""
    steps = MaskedSteps(role, device)
    try:
        yield steps
    finally:
        steps.ready.release(1 << 30)
        steps.worker.detach(drain=True)
        steps.worker.close()
        for arena in (steps.arenas, steps.own, steps.given):
            arena.close()
    assert not steps.worker.failures


def check_masked_steps(role: RoleEngine, device: Device, **sampling: Any) -> None:
    """Masks are waited for before sampling and no sooner, decide each token, and are missed where they are missing."""
    with masked_steps(role, device) as steps:
        prompts = tuple(PrefillChunk(slot=slot, start=0, tokens=(5, 6), is_last=True) for slot in (CONSTRAINED, FREE))
        steps.send(1, chunks=prompts, sampling=SamplingParams(**sampling))
        steps.allow(77, stamp=1)
        assert not steps.is_published(1)
        steps.ready.release(1)
        assert (steps.result(1, CONSTRAINED)[0], steps.result(1, CONSTRAINED)[1][0]) == (0, 77)

        steps.propose(88, steps.vocab_size + 5)
        steps.send(2)
        assert steps.copied.wait_on_host(2, PATIENCE_S), "the forward and what comes before it wait for no masks"
        copied = steps.given.tensor(BufferName.COPIED_TOKENS)
        assert copied[CONSTRAINED].tolist() == [88, steps.vocab_size - 1], "as verify uses them"
        steps.propose(3, 4)
        steps.allow(88, steps.vocab_size - 1, 99, stamp=2)
        assert not steps.is_published(2)
        steps.ready.release(2)
        assert steps.result(2, CONSTRAINED) == (2, [88, steps.vocab_size - 1, 99])
        assert steps.result(2, FREE)[0] >= 0

        steps.send(3)
        steps.allow(1, 2, 3, stamp=2)
        steps.ready.release(3)
        assert steps.result(3, CONSTRAINED)[0] == UNMASKED
        assert steps.result(3, FREE)[0] >= 0
        steps.send(4)
        steps.allow(1, 2, 3, stamp=-4)
        steps.ready.release(4)
        assert steps.result(4, CONSTRAINED)[0] == UNMATCHED
        assert steps.result(4, FREE)[0] >= 0
        steps.send(5)
        steps.allow(7, 8, 9, stamp=5)
        steps.ready.release(5)
        accepted, tokens = steps.result(5, CONSTRAINED)
        assert (accepted, tokens[0]) == (0, 7), "a step after one without tokens"
        waits = [event for event in steps.worker.engine.log.since(1) if event.site is Site.MASKS]
        assert [wait.step for wait in waits] == [1, 2, 3, 4], "the last one is timed with the next"
        assert all(wait.end_ns > wait.begin_ns for wait in waits)
