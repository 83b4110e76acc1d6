"""A verify and drafts in this process, told each step by the test: a scheduler without a plan of its own."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.common.device.interface import Device
from slipstream.common.wire.layout import RESULT_FENCES, BufferName, DraftShape
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
from slipstream.common.wire.worker import Attachment, DraftSizes
from slipstream.services.worker.engine import RoleEngine
from tests.harness.workers import LocalWorker, SharedArenas, attachment_to, epoch_shape

TIMEOUT_S = 20.0
MOST_DRAFT_TOKENS = 4
SIZES = {"num_slots": 4, "run_ahead": 1, "chunk_tokens": 16}
PAGES = {"page_tokens": 4, "num_pages": 97, "slot_pages": 24, "context_tokens": 80}
EPOCH = 1


class Draft:
    """A draft and its memory."""

    def __init__(self, role: RoleEngine, device: Device, number: int, num_draft_tokens: int) -> None:
        description = role.description
        self.number = number
        self.reads_hidden = description.hidden_width > 0
        shape = DraftShape(**SIZES, num_draft_tokens=num_draft_tokens, hidden_width=description.hidden_width)
        self.memory = SharedArenas(shape)
        self.worker = LocalWorker(role, device=device)
        self.worker.attach(attachment_to(self.memory, number, **PAGES))
        self.sizes = DraftSizes(
            num_draft_tokens=num_draft_tokens,
            hidden_width=description.hidden_width,
            hidden_layers=description.hidden_layers,
        )

    def proposed(self) -> list[list[int]]:
        """The draft tokens of all slots."""
        return self.memory.tensor(BufferName.DRAFT_TOKENS).tolist()

    def close(self) -> None:
        """The process ends."""
        self.worker.close()
        self.memory.close()


class Driven:
    """An epoch of verify, the sequences in its slots, and drafts that come and go."""

    def __init__(self, verify: RoleEngine, device: Device, *, expected: DraftSizes | None = None) -> None:
        self._device = device
        shape = epoch_shape(DraftShape(**SIZES, num_draft_tokens=MOST_DRAFT_TOKENS))
        self._results = device.create_arena(shape.specs(), RESULT_FENCES)
        self._shape = shape
        self.verify = LocalWorker(verify, device=device)
        self.verify.attach(
            Attachment(epoch=EPOCH, manifest=self._results.manifest, shape=shape, expected_draft=expected, **PAGES)
        )
        self.step = 0
        self.tokens: dict[int, list[int]] = {}
        """By slot: the prompt and all output."""
        self.num_accepted: list[int] = []
        """Of each slot in each step with a draft."""
        self._sampling: dict[int, SamplingParams] = {}
        self._drafts: list[Draft] = []

    def make_draft(self, role: RoleEngine, *, number: int, num_draft_tokens: int = 2) -> Draft:
        """Attaches a draft, and then to verify."""
        draft = Draft(role, self._device, number, num_draft_tokens)
        self._drafts.append(draft)
        self.verify.attach_region(draft.memory.region(number, epoch=EPOCH, draft=draft.sizes))
        return draft

    def prefill(
        self, prompts: dict[int, list[int]], sampling: SamplingParams | None = None, draft: Draft | None = None
    ) -> None:
        """Sequences take slots."""
        self.tokens |= {slot: list(prompt) for slot, prompt in prompts.items()}
        self._sampling |= dict.fromkeys(prompts, sampling or SamplingParams())
        updates = tuple(self._update(slot) for slot in prompts)
        chunks = tuple(
            PrefillChunk(slot=slot, start=0, tokens=tuple(prompt), is_last=True) for slot, prompt in prompts.items()
        )
        self.step += 1
        stash = FenceWait(FenceName.VERIFY_STASH, self.step, WaitPlace.PREFILL_HIDDEN)
        self._to_verify((), draft, chunks=chunks, updates=updates)
        if draft is not None:
            waits = (stash,) if draft.reads_hidden else ()
            self._to_draft(draft, (), waits, chunks=chunks, updates=updates)
        self._take_in(tuple(prompts))

    def plain(self, draft: Draft | None = None) -> None:
        """A token for each sequence; with `draft`, that is told of it."""
        self.step += 1
        self._to_verify(tuple(self.tokens), draft)
        self._take_in(tuple(self.tokens))

    def decode(self, draft: Draft, updates: tuple[SlotUpdate, ...] = ()) -> None:
        """A step with a draft; `updates` are for it alone."""
        self.step += 1
        slots = tuple(self.tokens)
        self._to_draft(draft, slots, (FenceWait(FenceName.VERIFY_STASH, self.step - 1),), updates=updates)
        self._to_verify(slots, draft, is_drafted=True)
        self.num_accepted += self._take_in(slots)

    def catch_up(self, draft: Draft) -> None:
        """A language model takes in all tokens but the last of each sequence, chunk after chunk; then it is told of
        one plain step."""
        for slot, tokens in self.tokens.items():
            for start in range(0, len(tokens), 7):
                chunk = PrefillChunk(slot=slot, start=start, tokens=tuple(tokens[start : start + 7]), is_last=False)
                updates = (self._update(slot),) if start == 0 else ()
                self._to_draft(draft, (), (), chunks=(chunk,), updates=updates, catches_up=True)
                self.plain_without_progress()
        self.plain(draft)

    def plain_without_progress(self) -> None:
        """A step of verify without slots: numbers go on."""
        self.step += 1
        self._to_verify((), None)
        self.verify.stream.synchronize(TIMEOUT_S)

    def join_with_history(self, draft: Draft) -> tuple[SlotUpdate, ...]:
        """A head is told of one plain step; returns the updates of its first step with drafts."""
        self.plain(draft)
        # Of all tokens but the last, the target has states; the last one's entry is at the position before it.
        return tuple(self._update(slot, history_from=len(tokens) - 2) for slot, tokens in self.tokens.items())

    def close(self) -> None:
        """All end."""
        for worker in (self.verify, *(draft.worker for draft in self._drafts)):
            assert worker.failures == []
        self.verify.close()
        for draft in self._drafts:
            draft.close()
        self._results.close()

    def _update(self, slot: int, history_from: int = 0) -> SlotUpdate:
        first = 1 + (slot - 1) * PAGES["slot_pages"]
        return SlotUpdate(
            slot=slot,
            generation=1,
            pages=tuple(range(first, first + PAGES["slot_pages"])),
            limit_tokens=PAGES["context_tokens"],
            sampling=self._sampling[slot],
            history_from=history_from,
        )

    def _to_verify(
        self,
        slots: Sequence[int],
        draft: Draft | None,
        *,
        is_drafted: bool = False,
        chunks: tuple[PrefillChunk, ...] = (),
        updates: tuple[SlotUpdate, ...] = (),
    ) -> None:
        names = (FenceName.VERIFY_PUBLISH,) + (FenceName.VERIFY_STASH,) * (draft is not None)
        waits = (FenceWait(FenceName.DRAFT_PROPOSED, self.step),) if is_drafted else ()
        most = draft.sizes.num_draft_tokens if draft is not None and is_drafted else 0
        self.verify.send(
            StepCommand(
                epoch=EPOCH,
                step=self.step,
                slots=tuple(slots),
                num_draft_tokens=(most,) * len(slots) if most else (),
                ops=FenceOps(waits, tuple(FencePoint(name, self.step) for name in names)),
                chunks=chunks,
                updates=updates,
                attachment=0 if draft is None else draft.number,
            )
        )

    def _to_draft(
        self,
        draft: Draft,
        slots: Sequence[int],
        waits: tuple[FenceWait, ...],
        *,
        chunks: tuple[PrefillChunk, ...] = (),
        updates: tuple[SlotUpdate, ...] = (),
        catches_up: bool = False,
    ) -> None:
        fence = FenceName.DRAFT_PROPOSED if slots else FenceName.DRAFT_PREFILLED
        draft.worker.send(
            StepCommand(
                epoch=draft.number,
                step=self.step,
                slots=tuple(slots),
                num_draft_tokens=(draft.sizes.num_draft_tokens,) * len(slots),
                ops=FenceOps(waits, (FencePoint(fence, self.step),)),
                chunks=chunks,
                updates=updates,
                catches_up=catches_up,
            )
        )

    def _take_in(self, slots: Sequence[int]) -> list[int]:
        """Appends the step's tokens; returns how many draft tokens were accepted in each slot."""
        assert self._results.fence(FenceName.VERIFY_PUBLISH).wait_on_host(self.step, TIMEOUT_S)
        row = self.step % self._shape.ring
        accepted = self._results.tensor(BufferName.NUM_ACCEPTED)[row].tolist()
        output = self._results.tensor(BufferName.OUTPUT_TOKENS)[row].tolist()
        for slot in slots:
            self.tokens[slot] += output[slot][: accepted[slot] + 1]
        return [accepted[slot] for slot in slots]
