"""Drafts without a model for tests of the scheduler: they keep what they are told, and miss nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

from slipstream.common.device.interface import ANY_TIME, PollTime
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.wire.step import FenceName, FencePoint, Role, SlotUpdate, StepCommand
from slipstream.common.wire.worker import StepCost
from slipstream.scheduler.attachment import DraftAttachment
from slipstream.scheduler.draft import Draft
from slipstream.scheduler.records import NO_LIMIT, DraftKV, DraftTraits
from tests.harness.step_kinds import Kind, kind_to_draft


class FakeFence:
    """A counter in this process."""

    def __init__(self, *, is_releasable: bool = True) -> None:
        self.is_releasable = is_releasable
        self.value = 0
        self.releases: list[int] = []

    def poll(self) -> int:
        """See `Fence.poll`."""
        return self.value

    def wait_on_host(self, value: int, timeout_s: float, poll_time: PollTime = ANY_TIME) -> bool:
        """See `Fence.wait_on_host`; does not wait."""
        return self.value >= value

    def release(self, value: int) -> None:
        """See `Fence.release`."""
        self.releases.append(value)
        self.value = max(self.value, value)


@dataclass
class DraftedSlot:
    """What a draft keeps of a slot."""

    generation: int
    history_from: int = 0
    pages: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    """Taken in, from position 0 on."""
    limit_tokens: int = 0


class FakeDraft:
    """An attachment, its link, and the draft behind it, which does what it was sent when `work` is called."""

    role = Role.DRAFT

    def __init__(
        self,
        number: int,
        num_draft_tokens: int,
        *,
        reads_hidden: bool = False,
        context_tokens: int = NO_LIMIT,
    ) -> None:
        self.number = number
        self.num_draft_tokens = num_draft_tokens
        self.costs: tuple[StepCost, ...] = ()
        self.traits = DraftTraits(is_present=True, reads_hidden=reads_hidden)
        # Not paged: these drafts are to be told every token.
        self.kv = DraftKV(number, is_paged=False, context_tokens=context_tokens)
        self.link = self
        self.failure: SlipstreamError | None = None
        self.has_refused = False
        self.proposed, self.prefilled = FakeFence(), FakeFence()
        self.stash = FakeFence()
        self.is_released = False
        self.draft = Draft(cast("DraftAttachment", self))
        self.slots: dict[int, DraftedSlot] = {}
        self.stashed: dict[int, tuple[int, list[int]]] = {}
        """By slot, as verify wrote it: position of the bonus token, and the tokens of the last step."""
        self.kinds: list[Kind] = []
        self._last_number = 0
        self.undrafted = frozenset[int]()
        """Slots that verify accepts no draft tokens of now. It is not told: plain steps have no command for a draft."""
        self._queue: deque[tuple[StepCommand, frozenset[int]]] = deque()

    def fail(self) -> None:
        """The process dies."""
        self.failure = UnavailableError("the draft service is lost: it was killed")
        self._queue.clear()

    def release(self, step: int) -> None:
        """See `DraftAttachment.release`."""
        self.is_released = True
        self.proposed.release(step)
        self.prefilled.release(step)

    @property
    def fences(self) -> dict[FenceName, FakeFence]:
        """See `DraftAttachment.fences`."""
        return {FenceName.DRAFT_PROPOSED: self.proposed, FenceName.DRAFT_PREFILLED: self.prefilled}

    def send(self, command: StepCommand) -> None:
        """See `Link.send`."""
        if self.failure is not None:
            raise self.failure
        assert command.epoch == self.number
        assert command.step > self._last_number, "numbers grow"
        self._last_number = command.step
        self._queue.append((command, self.undrafted))

    def work(self, up_to: int | None = None) -> None:
        """Does the next command, or all up to a step."""
        while self._queue and (up_to is None or self._queue[0][0].step <= up_to):
            command, undrafted = self._queue.popleft()
            self.kinds.append(kind_to_draft(command))
            self._do(command, undrafted)
            parts = [FenceName.DRAFT_PROPOSED] * bool(command.slots)
            parts += [FenceName.DRAFT_PREFILLED] * bool(command.chunks or command.catches_up)
            assert command.ops.signals == tuple(FencePoint(fence, command.step) for fence in parts)
            for fence in parts:
                self.fences[fence].value = command.step
            if up_to is None:
                return

    def _do(self, command: StepCommand, undrafted: frozenset[int]) -> None:
        assert len(command.num_draft_tokens) in (0, len(command.slots))
        for update in command.updates:
            self._update(update)
        for row in command.slots:
            if row not in undrafted:
                self._take_in_stash(self.slots[row], *self.stashed[row])
        for chunk in command.chunks:
            slot = self.slots[chunk.slot]
            if chunk.slot in undrafted and chunk.start != len(slot.tokens):
                continue  # what is too long was not brought
            if self.traits.reads_hidden and not slot.tokens:
                slot.tokens = [-1] * slot.history_from
            assert chunk.start == len(slot.tokens), "chunks follow each other, from the first token on"
            slot.tokens += chunk.tokens

    def _update(self, update: SlotUpdate) -> None:
        if update.sampling is not None:
            slot = DraftedSlot(update.generation, update.history_from, update.pages)
            slot.limit_tokens = update.limit_tokens
            self.slots[update.slot] = slot
            return
        slot = self.slots[update.slot]
        if update.max_draft_tokens == 0 and update.first_page_index > len(slot.pages):
            return  # plain steps have brought pages meanwhile
        assert slot.generation == update.generation
        assert update.prompt_tokens is not None, "chunks that follow may have output"
        assert 0 < update.first_page_index <= len(slot.pages), "no page is left out"
        assert slot.pages[update.first_page_index :] == update.pages[: len(slot.pages) - update.first_page_index]
        slot.pages = slot.pages[: update.first_page_index] + update.pages

    def _take_in_stash(self, slot: DraftedSlot, position: int, last_tokens: list[int]) -> None:
        first = position + 1 - len(last_tokens)
        end = min(position + 1 + self.num_draft_tokens, slot.limit_tokens)
        assert end <= self.kv.context_tokens, "what it drafts has room in its context"
        if self.traits.reads_hidden and not slot.tokens:
            assert slot.history_from == first - 1, "the first entry pairs the state before the new token with it"
            slot.tokens = [-1] * first
        # A language model has drafted the tokens that were accepted.
        assert len(slot.tokens) >= first, f"tokens {len(slot.tokens)} to {first - 1} were never taken in"
        slot.tokens[first:] = last_tokens
