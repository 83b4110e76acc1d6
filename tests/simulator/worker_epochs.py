"""A simulated worker's part of an epoch: its memory, the memory of drafts, and how well a draft guesses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import GIVEN_FENCES, OWN_FENCES, BufferName, DraftShape, EpochShape
from slipstream.common.wire.step import FenceName
from slipstream.common.wire.worker import Attachment, DraftSizes
from slipstream.services.worker.future_map import FutureMap, Region
from slipstream.services.worker.masks import GrammarMasks
from tests.harness.workers import VOCAB_SIZE
from tests.simulator.memory import SimulatedArena, SimulatedDevice, SimulatedFence
from tests.simulator.model import PagedTokens
from tests.simulator.world import Process


@dataclass(frozen=True, kw_only=True)
class DraftSkill:
    """How a draft guesses."""

    reads_hidden: bool = False
    quality: float = 0.8
    """Share of the guesses that are right."""
    is_paged: bool = True
    """False if sequences come to it whole, though others have computed their beginnings."""
    context_tokens: int = 512
    """A drafted token past this is wrong."""
    is_watched: bool = False
    """True if a wrong guess of a draft of quality 1 is a finding: no fault excuses it."""


class Piece:
    """The memory of an attachment of a draft, as one side of it sees it."""

    def __init__(self, region: Region, own: SimulatedArena, given: SimulatedArena) -> None:
        self.region = region
        self.shared = own.shared, given.shared
        self.is_given_up = False
        """True once verify waits for the draft no more."""
        self.fences = {name: own.fence(name) for name in OWN_FENCES}
        self.fences |= {name: given.fence(name) for name in GIVEN_FENCES}

    @property
    def is_undisturbed(self) -> bool:
        """True until a wait was released."""
        return not any(shared.is_released for shared in self.shared)

    def check(self, process: Process) -> None:
        """Called with each access."""
        for shared in self.shared:
            shared.check(process)


class GrammarPiece:
    """The memory of an attachment of a grammar worker, as verify sees it."""

    def __init__(self, masks: GrammarMasks, own: SimulatedArena, given: SimulatedArena) -> None:
        self.masks = masks
        self.is_given_up = False
        """True once verify waits for it no more."""
        self.fences = {
            FenceName.GRAMMAR_READY: own.fence(FenceName.GRAMMAR_READY),
            FenceName.VERIFY_COPIED: given.fence(FenceName.VERIFY_COPIED),
        }


class Epoch:
    """A worker's part of an epoch or, for a draft, of its attachment."""

    def __init__(self, attachment: Attachment, device: SimulatedDevice) -> None:
        self.number = attachment.epoch
        self.attachment = attachment
        self.tokens = PagedTokens.of(attachment.num_pages, attachment.page_tokens)
        self.pieces: dict[int, Piece] = {}
        """By attachment; a draft has one."""
        self.grammars: dict[int, GrammarPiece] = {}
        """By attachment."""
        self.fences: dict[FenceName, SimulatedFence] = {}
        """Of the results."""
        self.waited: dict[SimulatedFence, int] = {}
        self.last_step = 0
        self.is_ending = False
        """True once it takes no more commands."""
        self.is_abandoned = False
        if isinstance(attachment.shape, EpochShape):
            arena = device.open_arena(attachment.manifest)
            self.fences[FenceName.VERIFY_PUBLISH] = arena.fence(FenceName.VERIFY_PUBLISH)
            self._map = FutureMap(
                attachment.shape,
                {BufferName(spec.name): arena.tensor(spec.name) for spec in attachment.shape.specs()},
                vocab_size=VOCAB_SIZE,
                log=EventLog(),
                is_debug=attachment.is_debug,
            )
        else:
            assert attachment.given is not None, "a draft is given something"
            own = device.open_arena(attachment.manifest)
            given = device.open_arena(attachment.given, read_only=True)
            width = attachment.shape.hidden_width
            sizes = DraftSizes(num_draft_tokens=attachment.shape.num_draft_tokens, hidden_width=width)
            self.add(self.number, attachment.shape, sizes, own, given)

    def add(
        self, number: int, shape: DraftShape, sizes: DraftSizes, own: SimulatedArena, given: SimulatedArena
    ) -> Piece:
        """Adds the memory of an attachment."""
        buffers = {BufferName(spec.name): own.tensor(spec.name) for spec in shape.own_specs()}
        buffers |= {BufferName(spec.name): given.tensor(spec.name) for spec in shape.given_specs()}
        debug = self.attachment.is_debug
        region = Region(shape, sizes, buffers, number=number, vocab_size=VOCAB_SIZE, log=EventLog(), is_debug=debug)
        piece = self.pieces[number] = Piece(region, own, given)
        return piece

    @property
    def map(self) -> FutureMap:
        """Verify's results."""
        return self._map

    @property
    def own(self) -> Piece:
        """A draft's memory."""
        return self.pieces[self.number]

    @property
    def is_released(self) -> bool:
        """True if what is done now may be behind a wait that was released."""
        return self.is_ending or not all(piece.is_undisturbed for piece in self.pieces.values())

    def limits(self, slots: tuple[int, ...]) -> torch.Tensor:
        """[slots] int64: the limits of these slots, 0 for others."""
        limits = torch.zeros(self.attachment.shape.num_slots, dtype=torch.int64)
        limits[list(slots)] = torch.tensor([self.tokens.slots[slot].limit_tokens for slot in slots])
        return limits
