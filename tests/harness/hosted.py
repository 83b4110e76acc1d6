"""A worker for tests that play a scheduler who means no good."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from slipstream.common.errors import InternalError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.worker.contract import Attachment
from slipstream.common.worker.layout import SLOT_BUFFERS, BufferName, FutureMapShape
from slipstream.common.worker.step import (
    FenceName,
    FenceOps,
    FencePoint,
    Role,
    StepCommand,
    StepKind,
)
from slipstream.common.worker.wire import attachment_to_pb, command_to_pb
from slipstream.protos import worker_pb2 as pb
from tests.harness.guarded_arena import GuardedArena
from tests.harness.hostile_messages import decodes, methods, wire
from tests.harness.leaks import Held
from tests.harness.sampling import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.common.errors import SlipstreamError
    from slipstream.services.worker.engine import RoleEngine
    from tests.harness.served_worker import ServedWorker

NUM_SLOTS, NUM_PAGES, PAGE_TOKENS, CONTEXT_TOKENS = 4, 9, 4, 64
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

    def shape(self) -> FutureMapShape:
        """The shape of the arena that this worker is attached to."""
        width = self.worker.description.hidden_width
        return FutureMapShape(num_slots=NUM_SLOTS, run_ahead=1, num_draft_tokens=2, chunk_tokens=8, hidden_width=width)

    def attach_request(self, arena: GuardedArena, shape: FutureMapShape | None = None) -> pb.AttachRequest:
        """Makes an attach request as a scheduler would; `shape` is the arena's, if it is not this worker's."""
        own = self.worker.description
        attachment = Attachment(
            epoch=next(EPOCHS),
            manifest=arena.manifest,
            shape=shape or self.shape(),
            page_tokens=PAGE_TOKENS,
            num_pages=NUM_PAGES,
            context_tokens=CONTEXT_TOKENS,
            peer=replace(own, role=Role.VERIFY if self.is_draft else Role.DRAFT),
        )
        return attachment_to_pb(attachment)

    @contextmanager
    def arena(self, seed: int = 0, shape: FutureMapShape | None = None) -> Iterator[GuardedArena]:
        """An arena for it, or of another shape; at the end, nothing has changed that may not."""
        arena = GuardedArena(shape or self.shape(), seed=seed)
        arena.allow_fences()
        try:
            yield arena
            assert arena.changed() == []
        finally:
            arena.close()

    def check_it_works(self) -> None:
        """It can be attached, and carries out a step."""
        with self.arena() as arena:
            request = self.attach_request(arena)
            self.worker.stub.Attach(request, timeout=TIMEOUT_S)
            command = replace(decode(1, self.is_draft), epoch=request.epoch)
            allow(arena, command, is_draft=self.is_draft)
            acks = list(self.worker.stub.Execute(iter([command_to_pb(command)]), timeout=TIMEOUT_S))
            assert [ack.step for ack in acks] == [1]
            self.worker.until_free()
        assert self.worker.failures == []


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
    signals = (FenceName.DRAFT_DONE,) if is_draft else (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH)
    return StepCommand(
        epoch=1,
        step=step,
        kind=StepKind.DECODE,
        slots=slots or (1, 3),
        ops=FenceOps((), tuple(FencePoint(name, step) for name in signals)),
        wants_acknowledgement=True,
    )


def allow(arena: GuardedArena, command: StepCommand | pb.StepCommand, *, is_draft: bool) -> None:
    """Allows what a step may write: its own slots' rows, and the padding row."""
    rows, row = [0, *command.slots], command.step % 3
    if is_draft:
        arena.allow(BufferName.DRAFT_STAMPS, row)
        arena.allow(BufferName.DRAFT_TOKENS, rows)
        return
    for placed in arena.manifest.buffers:
        name = placed.spec.name
        if placed.spec.writer != Role.VERIFY.value:
            continue
        if name == BufferName.PREFILL_HIDDEN:
            arena.allow(name, slice(0, sum(len(chunk.tokens) for chunk in command.chunks)))
        elif name == BufferName.VERIFY_STAMPS:
            arena.allow(name, row)
        elif name in SLOT_BUFFERS:
            arena.allow(name, rows)
        else:
            arena.allow(name, row, rows)


def send_bytes(data: st.DataObject, channel: grpc.Channel) -> tuple[bool, grpc.RpcError | None]:
    """Sends one of a worker's methods what is a message, or nearly one. Returns whether it was one, and the error."""
    service = pb.DESCRIPTOR.services_by_name["Worker"]
    name, kind, is_stream = data.draw(st.sampled_from(list(methods(service))))
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
