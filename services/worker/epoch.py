"""A worker's epoch: the memory and the fences that it shares with other processes, and what a role works with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ManifestError,
    MismatchError,
    SlipstreamError,
    StaleEpochError,
)
from slipstream.common.wire.layout import (
    GIVEN_FENCES,
    GRAMMAR_GIVEN_FENCES,
    GRAMMAR_OWN_FENCES,
    LENT_WEIGHTS,
    OWN_FENCES,
    RESULT_FENCES,
    BufferName,
    DraftShape,
    GrammarShape,
)
from slipstream.common.wire.manifest import DTYPES
from slipstream.common.wire.step import PROTOCOL_VERSION, FenceName, Role
from slipstream.common.wire.worker import DraftSizes, hidden_of
from slipstream.services.models.config import MAX_VOCAB_SIZE
from slipstream.services.worker.future_map import NO_REGION, CapturedStep, FutureMap, Region, StampPlace
from slipstream.services.worker.graphs import CudaCapture, GraphedStep, HostCapture
from slipstream.services.worker.masks import GrammarMasks
from slipstream.services.worker.slots import PinnedStaging, SlotTable, Staging, staged_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from slipstream.common.device.interface import Arena, Device, Fence, Stream
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.layout import StepShape
    from slipstream.common.wire.manifest import Manifest
    from slipstream.common.wire.step import FencePoint, FenceWait, StepCommand
    from slipstream.common.wire.worker import Attachment, OfferedRegion, WorkerDescription
    from slipstream.services.worker.masks import StepMasks

RELEASED_TIMEOUT_S = 60.0
"""For work that is enqueued after a released wait."""
GRAMMAR_FENCES = (*GRAMMAR_GIVEN_FENCES, *GRAMMAR_OWN_FENCES)
HOPELESS_TIMEOUT_S = 5.0
"""For a stream that may wait for a dead producer with fences that cannot be released."""


@dataclass(frozen=True, slots=True)
class EpochState:
    """The part of an epoch that a role works with, between attach and detach."""

    attachment: Attachment
    memory: FutureMap | Region
    """The worker's stamps go here: a FutureMap for verify, the only region for a draft."""
    make_region: type[Region]
    slots: SlotTable
    make_masks: type[GrammarMasks] = GrammarMasks
    staging: Staging = field(default_factory=Staging)
    graphs: GraphedStep | None = None
    """For capturing steps; None where steps run without graphs."""
    regions: dict[int, Region] = field(default_factory=dict)
    """Regions that verify has mapped, by attachment; where steps are graphs, by its negative `Region.with_own_tokens`,
    for steps that copy draft tokens out before their graph."""
    grammars: dict[int, GrammarMasks] = field(default_factory=dict)
    """The memory with grammar workers that verify has mapped, by attachment."""
    weights: Mapping[BufferName, torch.Tensor] = field(default_factory=dict)
    """A draft's: the target's weights that verify lends, to be read only."""

    @property
    def future_map(self) -> FutureMap:
        """The FutureMap of verify."""
        assert isinstance(self.memory, FutureMap), "a draft has none"
        return self.memory

    @property
    def region(self) -> Region:
        """A draft's."""
        assert isinstance(self.memory, Region), "verify has several"
        return self.memory

    def stage(self, command: StepCommand) -> None:
        """Begins the staging of a step."""
        number = -command.attachment if command.copies_tokens and self.graphs is not None else command.attachment
        region = self.regions.get(number)
        words = NO_REGION if region is None else region.words
        self.staging.begin(command.step, command.slots, words)

    def region_of(self, command: StepCommand) -> Region | None:
        """The region of the draft that takes part in a step of verify; None if none does."""
        return self.regions[command.attachment] if command.attachment else None

    def grammar_shape(self, vocab_size: int) -> GrammarShape:
        """The sizes of the memory between verify, with such a vocabulary, and a grammar worker."""
        shape = self.attachment.shape
        return GrammarShape(num_slots=shape.num_slots, num_draft_tokens=shape.num_draft_tokens, vocab_size=vocab_size)

    def masks_of(self, command: StepCommand) -> StepMasks | None:
        """The masks of a step that is being staged; None if no slot has a constraint."""
        return self.grammars[command.grammar].of_step(command, self.staging) if command.constrained else None

    def add_region(self, number: int, region: Region) -> None:
        """Lets steps name a draft's attachment."""
        self.regions[number] = region
        if self.graphs is not None:
            self.regions[-number] = region.with_own_tokens()

    def remove_region(self, number: int) -> None:
        """Lets no step name it any more."""
        for key in (number, -number):
            self.regions.pop(key, None)


class SharedMemory:
    """The memory that is shared for an epoch, or between verify and a draft, and the fences in it."""

    def __init__(self, *parts: tuple[Arena, tuple[FenceName, ...]]) -> None:
        """`parts`: arenas and the fences that each has. Raises ManifestError if one is missing."""
        self._arenas = [arena for arena, _ in parts]
        self._fences = {name: arena.fence(name) for arena, names in parts for name in names}
        # The largest value of each fence that the stream waits for: released when its producer is gone.
        self._waited: dict[Fence, int] = {}
        self._is_given_up = False

    @classmethod
    def open(cls, device: Device, *pieces: tuple[Manifest, tuple[FenceName, ...], bool]) -> SharedMemory:
        """Maps pieces: each with its fences, and whether this worker writes to it. Raises ManifestError."""
        with ExitStack() as opened:
            arenas = []
            for manifest, names, is_writable in pieces:
                arenas.append((device.open_arena(manifest, read_only=not is_writable), names))
                opened.callback(arenas[-1][0].close)
            memory = cls(*arenas)
            opened.pop_all()
        return memory

    def buffers(self) -> dict[BufferName, torch.Tensor]:
        """All buffers of the manifests."""
        names = [(arena, placed.spec.name) for arena in self._arenas for placed in arena.manifest.buffers]
        return {BufferName(name): arena.tensor(name) for arena, name in names}

    def __contains__(self, name: FenceName) -> bool:
        return name in self._fences

    def wait(self, stream: Stream, wait: FenceWait) -> None:
        if self._is_given_up:
            return
        fence = self._fences[wait.fence]
        self._waited[fence] = max(wait.value, self._waited.get(fence, 0))
        fence.wait(stream, wait.value)

    def signal(self, stream: Stream, point: FencePoint) -> None:
        self._fences[point.fence].signal(stream, point.value)

    def release(self) -> None:
        """Signals in the producers' place what the stream waits for, as far as that can be done. Raises DeviceError."""
        for fence, value in self._waited.items():
            fence.release(value)

    def unmet(self) -> str:
        """Says what the stream waits for that is not there, to be asked before `release`. Raises DeviceError."""
        found = [(name, self._waited.get(fence, 0), fence.poll()) for name, fence in self._fences.items()]
        return " and ".join(f"{name.name} {value}, which is {now}" for name, value, now in found if now < value)

    def give_up(self) -> None:
        """Waits for nothing from now on. Raises DeviceError."""
        self._is_given_up = True
        self.release()

    @property
    def is_releasable(self) -> bool:
        """True if the stream's waits end once they are released."""
        return all(fence.is_releasable for fence in self._waited)

    def close(self) -> None:
        """Closes it."""
        for arena in self._arenas:
            arena.close()


class Epoch:
    """An open epoch."""

    def __init__(self, state: EpochState, memory: SharedMemory) -> None:
        self.state = state
        self.attachments = {state.attachment.epoch}
        """The numbers of the epoch and of all attachments that were here."""
        self._own = memory
        self._drafts: dict[int, SharedMemory] = {}
        """The memory with drafts, and with grammar workers, by attachment."""

    def memory_of(self, command: StepCommand, fence: FenceName) -> SharedMemory:
        """The memory that a fence of a command is in. Raises InvalidArgumentError if there is none."""
        number = command.grammar if fence in GRAMMAR_FENCES else command.attachment
        memory = self._own if fence in self._own else self._drafts.get(number)
        if memory is None or fence not in memory:
            where = f"one of attachment {number}" if number else "one without an attachment"
            raise InvalidArgumentError("fence", fence.name, where)
        return memory

    def check(self, command: StepCommand) -> None:
        """Raises FailedPreconditionError for an attachment that is not here, InvalidArgumentError for its points."""
        if command.attachment and command.attachment not in self.state.regions:
            raise FailedPreconditionError(f"attachment {command.attachment} is not there")
        if command.constrained and command.grammar not in self.state.grammars:
            raise FailedPreconditionError(f"attachment {command.grammar} of a grammar worker is not there")
        for points in command.ops:
            for fence, *_ in points:
                self.memory_of(command, fence)

    def number_of(self, memory: SharedMemory, command: StepCommand) -> int:
        """The attachment that a memory belongs to, for logs; 0 for the results."""
        if memory is self._own:
            return self.state.memory.attachment
        return command.attachment if memory is self._drafts.get(command.attachment) else command.grammar

    def add_draft(self, region: Region, memory: SharedMemory) -> None:
        """Lets commands name an attachment."""
        self.attachments.add(region.attachment)
        self._drafts[region.attachment] = memory
        self.state.add_region(region.attachment, region)

    def add_grammar(self, number: int, masks: GrammarMasks, memory: SharedMemory) -> None:
        """Lets commands name the attachment of a grammar worker."""
        self.attachments.add(number)
        self._drafts[number] = memory
        self.state.grammars[number] = masks

    def release_draft(self, attachment: int) -> None:
        """Waits for a draft no more, if it is there. Raises DeviceError."""
        if memory := self._drafts.get(attachment):
            memory.give_up()

    def retire_draft(self, attachment: int) -> SharedMemory | None:
        """Lets no further command name an attachment, and returns its memory; None if there is none."""
        self.state.remove_region(attachment)
        self.state.grammars.pop(attachment, None)
        return self._drafts.get(attachment)

    def close_draft(self, attachment: int) -> None:
        """Closes the memory of an attachment, which the stream does not use any more."""
        if memory := self._drafts.pop(attachment, None):
            memory.close()

    def release(self) -> None:
        """Signals in the producers' place what the stream waits for, as far as that can be done. Raises DeviceError."""
        for memory in (self._own, *self._drafts.values()):
            memory.release()

    def unmet(self) -> str:
        """Says what the stream waits for that is not there, to be asked before `release`."""
        memories = {self.state.memory.attachment: self._own, **self._drafts}
        try:
            found = [(number, unmet) for number, memory in memories.items() if (unmet := memory.unmet())]
        except SlipstreamError as error:
            return f"what cannot be read: {error}"
        return "; ".join(f"of attachment {number}: {unmet}" for number, unmet in found) or "nothing but its own work"

    @property
    def release_timeout_s(self) -> float:
        """Seconds for the stream to end once its producers are gone."""
        is_releasable = all(memory.is_releasable for memory in (self._own, *self._drafts.values()))
        return RELEASED_TIMEOUT_S if is_releasable else HOPELESS_TIMEOUT_S

    def close(self) -> None:
        """Closes the shared memory."""
        self.state.regions.clear()
        self.state.grammars.clear()
        for memory in (self._own, *self._drafts.values()):
            memory.close()
        self._drafts.clear()


def open_memory(attachment: Attachment, device: Device) -> SharedMemory:
    """Maps the memory of an epoch: verify's results, or a draft's region. Raises ManifestError."""
    if attachment.given is None:
        return SharedMemory.open(device, (attachment.manifest, RESULT_FENCES, True))
    lent = None if attachment.peer is None else attachment.peer.weights
    pieces = [(attachment.manifest, OWN_FENCES, True), (attachment.given, GIVEN_FENCES, False)]
    return SharedMemory.open(device, *pieces, *([] if lent is None else [(lent, (), False)]))


def open_region(
    offered: OfferedRegion,
    draft: DraftSizes,
    state: EpochState,
    description: WorkerDescription,
    device: Device,
    log: EventLog,
) -> tuple[Region, SharedMemory]:
    """Maps the memory between verify and a draft. Raises ManifestError, MismatchError."""
    shape = _shape_of_region(offered, draft, state.attachment.shape, description)
    memory = SharedMemory.open(device, (offered.own, OWN_FENCES, False), (offered.given, GIVEN_FENCES, True))
    region = state.make_region(
        shape,
        draft,
        memory.buffers(),
        number=offered.attachment,
        vocab_size=description.vocab_size,
        log=log,
        is_debug=state.attachment.is_debug,
    )
    if state.attachment.is_debug:
        region.poison()
    return region, memory


def open_grammar(
    offered: OfferedRegion, state: EpochState, description: WorkerDescription, device: Device, log: EventLog
) -> tuple[GrammarMasks, SharedMemory]:
    """Maps the memory between verify and a grammar worker. Raises ManifestError, MismatchError."""
    if not description.takes_masks:
        raise MismatchError(
            [f"masks: streams of this verify wait for none, as its fences are of kind {device.fence_kind!r}"]
        )
    shape = state.grammar_shape(description.vocab_size)
    offered.own.check_holds(shape.own_specs())
    offered.given.check_holds(shape.given_specs())
    pieces = (offered.own, GRAMMAR_OWN_FENCES, False), (offered.given, GRAMMAR_GIVEN_FENCES, True)
    memory = SharedMemory.open(device, *pieces)
    return state.make_masks(shape, memory.buffers(), number=offered.attachment, log=log), memory


def _shape_of_region(offered: OfferedRegion, draft: DraftSizes, epoch: StepShape, own: WorkerDescription) -> DraftShape:
    width, dtype = hidden_of(offered.given)
    if not 1 <= draft.num_draft_tokens <= epoch.num_draft_tokens:
        most = epoch.num_draft_tokens
        raise MismatchError([f"draft tokens: draft has {draft.num_draft_tokens}, this epoch has room for 1 to {most}"])
    if width != draft.hidden_width:
        raise MismatchError([f"width of the hidden states: memory has {width}, draft reads {draft.hidden_width}"])
    _check_dtype(dtype if width else None, own)
    shape = draft.shape(epoch, dtype)
    offered.own.check_holds(shape.own_specs())
    offered.given.check_holds(shape.given_specs())
    return shape


def make_state(
    attachment: Attachment,
    memory: SharedMemory,
    description: WorkerDescription,
    device: Device,
    stream: Stream,
    log: EventLog,
    *,
    blocked: Callable[[int], AbstractContextManager[object]],
) -> EpochState:
    """Allocates the state that all roles need. `blocked`: see `PinnedStaging`."""
    make_future_map, make_region, make_masks = _classes(device)
    shape, shared, is_debug = attachment.shape, memory.buffers(), attachment.is_debug
    weights = {name: shared.pop(name) for name in LENT_WEIGHTS if name in shared}
    # A draft is told, and proposes, ids of the target.
    vocab_size = (attachment.peer or description).vocab_size
    made: FutureMap | Region
    regions: dict[int, Region] = {}
    if isinstance(shape, DraftShape):
        sizes = DraftSizes(num_draft_tokens=shape.num_draft_tokens, hidden_width=shape.hidden_width)
        number = attachment.epoch
        made = make_region(shape, sizes, shared, number=number, vocab_size=vocab_size, log=log, is_debug=is_debug)
    else:
        made = make_future_map(shape, shared, vocab_size=vocab_size, log=log, regions=regions, is_debug=is_debug)
    slots = SlotTable(attachment, vocab_size, device.torch_device, longest=description.max_context_tokens)
    state = EpochState(attachment, made, make_region, slots, make_masks, regions=regions, weights=weights)
    if device.has_stream_threads:
        return state
    staging = PinnedStaging(
        num_slots=attachment.shape.num_slots,
        num_bytes=staged_bytes(attachment),
        depth=attachment.shape.ring,
        device=device.torch_device,
        fetch=partial(device.fetch, stream),
        blocked=blocked,
    )
    # In debug mode rows are looked at on the host, which a graph cannot.
    if is_debug:
        return replace(state, staging=staging)
    start, end = (StampPlace(column, staging.ring_row) for column in made.stamp_columns())
    graphed = GraphedStep(
        capture=CudaCapture() if device.torch_device.type == "cuda" else HostCapture(),
        slots=staging.slots,
        step=CapturedStep(staging.ring_row, staging.region_words, start, end),
        stamp_start=partial(device.stamp_row, stream, start.column, start.ring_row),
        stamp_end=partial(device.stamp_row, stream, end.column, end.ring_row),
    )
    return replace(state, staging=staging, graphs=graphed)


def _classes(device: Device) -> tuple[type[FutureMap], type[Region], type[GrammarMasks]]:
    """The classes of what is shared, for a device."""
    if device.torch_device.type == "cpu":
        return FutureMap, Region, GrammarMasks
    # Imported here, as there is no triton where there is no GPU.
    from slipstream.services.worker.fused_future_map import FusedFutureMap, FusedMasks, FusedRegion

    return FusedFutureMap, FusedRegion, FusedMasks


def check_attachment(attachment: Attachment, own: WorkerDescription, last_epoch: int) -> None:
    """Raises FailedPreconditionError, or a kind of it, or ManifestError for an attachment that does not fit here.

    `last_epoch`: the largest that it was attached in.
    """
    if attachment.protocol_version != PROTOCOL_VERSION:
        given = attachment.protocol_version
        raise MismatchError([f"protocol version: scheduler has {given}, this worker has {PROTOCOL_VERSION}"])
    if attachment.pid not in (0, own.pid):
        raise FailedPreconditionError(f"process {attachment.pid} is meant, and this is process {own.pid}")
    if attachment.epoch <= last_epoch:
        raise StaleEpochError(f"epoch {attachment.epoch}: this worker was attached to {last_epoch} before")
    if attachment.peer is not None:
        own.check_fits(attachment.peer)
        vocab_size = attachment.peer.vocab_size
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise MismatchError([f"vocabulary size: verify has {vocab_size}, not 1 to {MAX_VOCAB_SIZE}"])
    shape, is_draft = attachment.shape, own.role is Role.DRAFT
    if isinstance(shape, DraftShape) is not is_draft:
        raise ManifestError(f"the memory that verify gives is {'missing' if is_draft else 'only for a draft'}")
    if isinstance(shape, DraftShape):
        if shape.hidden_width != own.hidden_width:
            width = shape.hidden_width
            raise MismatchError([f"width of the hidden states: memory has {width}, draft reads {own.hidden_width}"])
        _check_dtype(shape.hidden_dtype if shape.hidden_width else None, own)
    elif attachment.context_tokens > own.max_context_tokens:
        given, longest = attachment.context_tokens, own.max_context_tokens
        raise MismatchError([f"context: scheduler has {given} tokens, this model was made for {longest}"])


def _check_dtype(hidden_dtype: torch.dtype | None, own: WorkerDescription) -> None:
    if hidden_dtype is not None and hidden_dtype is not DTYPES.get(own.dtype):
        raise MismatchError([f"dtype of the hidden states: memory has {hidden_dtype}, model has {own.dtype}"])
