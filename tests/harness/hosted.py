"""A worker for tests that play a scheduler who means no good."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from slipstream.common.errors import InternalError, SlipstreamError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.layout import (
    GIVEN_FENCES,
    OWN_FENCES,
    RESULT_FENCES,
    SLOT_BUFFERS,
    BufferName,
    DraftShape,
)
from slipstream.common.wire.step import (
    FenceName,
    FenceOps,
    FencePoint,
    Role,
    StepCommand,
)
from slipstream.common.wire.worker import (
    Attachment,
    DraftSizes,
    OfferedRegion,
    attachment_to_pb,
    command_to_pb,
    region_to_pb,
)
from slipstream.protos import worker_pb2 as pb
from slipstream.services.worker.engine import RoleEngine
from tests.harness.guarded_arena import GuardedArena
from tests.harness.hostile_messages import decodes, methods, wire
from tests.harness.leaks import Held
from tests.harness.sampling import examples
from tests.harness.served_worker import ServedWorker
from tests.harness.workers import epoch_shape

NUM_SLOTS, NUM_PAGES, PAGE_TOKENS, CONTEXT_TOKENS = 4, 9, 4, 64
SLOT_PAGES = 18
ATTACHMENT = 2**40
"""Stands for the draft's attachment, until that has a number."""
TIMEOUT_S = 20.0
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
EPOCHS = itertools.count(1)
"""A worker takes each once."""
FUZZ = settings(max_examples=examples(45), suppress_health_check=list(HealthCheck))


@dataclass(frozen=True, slots=True)
class Hosted:
    """A worker and its engine."""

    worker: ServedWorker
    role: RoleEngine

    @property
    def is_draft(self) -> bool:
        """Which of the two it is."""
        return self.worker.description.role is Role.DRAFT

    def shape(self) -> DraftShape:
        """The shape of the memory between this worker and the other one."""
        width = self.worker.description.hidden_width
        return DraftShape(num_slots=NUM_SLOTS, run_ahead=1, num_draft_tokens=2, chunk_tokens=8, hidden_width=width)

    def attach_request(self, memory: GuardedMemory) -> pb.AttachRequest:
        """Makes an attach request as a scheduler would."""
        is_draft, shape = self.is_draft, memory.shape
        attachment = Attachment(
            epoch=next(EPOCHS),
            manifest=memory.main.manifest,
            given=memory.given.manifest if is_draft else None,
            shape=shape if is_draft else epoch_shape(shape),
            page_tokens=PAGE_TOKENS,
            num_pages=NUM_PAGES,
            slot_pages=SLOT_PAGES,
            context_tokens=CONTEXT_TOKENS,
            peer=replace(self.worker.description, role=Role.VERIFY) if is_draft else None,
        )
        return attachment_to_pb(attachment)

    def region_request(self, memory: GuardedMemory, epoch: int) -> pb.AttachDraftRequest:
        """Makes a request to attach a draft to this verify as a scheduler would."""
        shape = memory.shape
        sizes = DraftSizes(num_draft_tokens=shape.num_draft_tokens, hidden_width=shape.hidden_width)
        own, given = memory.own.manifest, memory.given.manifest
        return region_to_pb(OfferedRegion(epoch=epoch, attachment=next(EPOCHS), own=own, given=given, draft=sizes))

    def attach(self, memory: GuardedMemory, request: pb.AttachRequest) -> int:
        """Attaches it, and a draft to a verify. Returns the number of the draft's attachment; 0 for a draft."""
        self.worker.stub.Attach(request, timeout=TIMEOUT_S)
        if self.is_draft:
            return 0
        region = self.region_request(memory, request.epoch)
        self.worker.stub.AttachDraft(region, timeout=TIMEOUT_S)
        return region.attachment

    @contextmanager
    def memory(self, seed: int = 0, shape: DraftShape | None = None) -> Iterator[GuardedMemory]:
        """Memory for it, or of another shape; at the end, nothing has changed that may not."""
        memory = GuardedMemory(shape or self.shape(), seed=seed, is_draft=self.is_draft)
        try:
            yield memory
            assert memory.changed() == []
        finally:
            memory.close()

    def check_it_works(self) -> None:
        """It can be attached, and carries out a step."""
        with self.memory() as memory:
            request = self.attach_request(memory)
            attachment = self.attach(memory, request)
            command = replace(decode(1, self.is_draft), epoch=request.epoch, attachment=attachment)
            memory.allow_step(command)
            acks = list(self.worker.stub.Execute(iter([command_to_pb(command)]), timeout=TIMEOUT_S))
            assert [ack.step for ack in acks] == [1]
            self.worker.until_free()
        assert self.worker.failures == []


class GuardedMemory:
    """The memory of a worker, and of the other one as far as it is shared with it."""

    def __init__(self, shape: DraftShape, *, seed: int, is_draft: bool) -> None:
        """Allows what any step may do: signals, and releases in place of the other worker."""
        self.shape = shape
        self._is_draft = is_draft
        self.own = GuardedArena(shape.own_specs(), OWN_FENCES, seed=seed)
        self.given = GuardedArena(shape.given_specs(), GIVEN_FENCES, seed=seed)
        results = [] if is_draft else [GuardedArena(epoch_shape(shape).specs(), RESULT_FENCES, seed=seed)]
        self.main = (*results, self.own)[0]
        """The arena that the worker is attached to."""
        self._arenas = (*results, self.own, self.given)
        for arena in self._arenas:
            arena.allow_fences()

    def allow_step(self, command: StepCommand | pb.StepCommand) -> None:
        """Allows what a step may write: the rows of the slots that it names and that there are, and the padding row."""
        named = (*command.slots, *(chunk.slot for chunk in command.chunks))
        rows, row = [0, *(slot for slot in named if 0 < slot < NUM_SLOTS)], command.step % 3
        if self._is_draft:
            self.own.allow(BufferName.DRAFT_STAMPS, row)
            self.own.allow(BufferName.DRAFT_TOKENS, rows)
            self.own.allow(BufferName.NUM_PROPOSED, rows)
            return
        for arena in (self.main, self.given):
            for placed in arena.manifest.buffers:
                name = placed.spec.name
                if name == BufferName.PREFILL_HIDDEN:
                    arena.allow(name, slice(0, sum(len(chunk.tokens) for chunk in command.chunks)))
                elif name == BufferName.VERIFY_STAMPS:
                    arena.allow(name, row)
                elif name == BufferName.DRAFT_STAMPS:
                    arena.allow(name)  # the copy of what the draft wrote, of any step that was waited for
                elif name in SLOT_BUFFERS:
                    arena.allow(name, rows)
                else:
                    arena.allow(name, row, rows)

    def changed(self) -> list[str]:
        """Lists bytes that changed without permission."""
        return [found for arena in self._arenas for found in arena.changed()]

    def close(self) -> None:
        """Takes the files away."""
        for arena in self._arenas:
            arena.close()


@contextmanager
def no_arena_left() -> Iterator[None]:
    """Fails if the block leaves an arena mapped."""
    before = Held.now().mappings
    yield
    # A stream that was refused leaves a generator behind that the collector hands to its event loop to be closed.
    for _ in range(500):
        if Held.now().mappings <= before:
            return
        threading.Event().wait(0.01)
    raise AssertionError("an arena is still mapped")


def error_of(call: Callable[[], Any]) -> SlipstreamError | None:
    """Returns the error that the call ends with, if any; asserts that it is a refusal and no internal error."""
    try:
        call()
    except grpc.RpcError as raised:
        error: Any = raised
        assert error.code() in REFUSALS, f"{error.code()}: {error.details()}"
        assert not isinstance(error_from_rpc(error), InternalError)
        return error_from_rpc(error)
    return None


def decode(step: int, is_draft: bool, *slots: int) -> StepCommand:
    """A step that waits for nothing."""
    signals = (FenceName.DRAFT_PROPOSED,) if is_draft else (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH)
    return StepCommand(
        epoch=1,
        step=step,
        slots=slots or (1, 3),
        num_draft_tokens=(2,) * len(slots or (1, 3)),
        ops=FenceOps((), tuple(FencePoint(name, step) for name in signals)),
        wants_acknowledgement=True,
        attachment=0 if is_draft else ATTACHMENT,
    )


NOT_OF_MODELS = ("Prepare",)
"""Methods that only a grammar worker has."""


def send_bytes(data: st.DataObject, channel: grpc.Channel) -> tuple[bool, grpc.RpcError | None]:
    """Sends one of a worker's methods what is a message, or nearly one. Returns whether it was one, and the error."""
    service = pb.DESCRIPTOR.services_by_name["Worker"]
    name, kind, is_stream = data.draw(st.sampled_from([one for one in methods(service) if one[0] not in NOT_OF_MODELS]))
    sent = data.draw(wire(kind))
    path = f"/{service.full_name}/{name}"
    try:
        if is_stream:
            list(channel.stream_stream(path)(iter([sent]), timeout=TIMEOUT_S))
        else:
            channel.unary_unary(path)(sent, timeout=TIMEOUT_S)
    except grpc.RpcError as raised:
        return decodes(kind, sent), raised
    return decodes(kind, sent), None
