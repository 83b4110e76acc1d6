"""Workers for tests: real engines on real streams in this process, and what attaches to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device, Fence
from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.events import EventLog, StreamName
from slipstream.common.wire.layout import (
    GIVEN_FENCES,
    OWN_FENCES,
    RESULT_FENCES,
    BufferName,
    DraftShape,
    EpochShape,
)
from slipstream.common.wire.step import DRAFT_FENCES, FenceName, FenceOps, FencePoint, FenceWait, Role, StepCommand
from slipstream.common.wire.trace import HostRecords
from slipstream.common.wire.worker import (
    Attachment,
    DraftSizes,
    Measurements,
    OfferedRegion,
    WorkerDescription,
    attachment_from_pb,
    attachment_to_pb,
    command_from_pb,
    command_to_pb,
    region_from_pb,
    region_to_pb,
)
from slipstream.scheduler.link import failure_of
from slipstream.services.worker.engine import Engine, RoleEngine

ChangeCommand = Callable[[StepCommand], StepCommand]

VOCAB_SIZE = 272


def describe(role: Role, **changes: object) -> WorkerDescription:
    """A worker that fits every other one of these."""
    description = WorkerDescription(
        role=role,
        device="cpu",
        vocab_size=VOCAB_SIZE,
        tokenizer_sha256="0" * 64,
        dtype="float32",
        max_context_tokens=512,
        kv_bytes_per_token=64,
        model=f"a-{role.value}",
        pid=1,
        algorithm="standalone" if role is Role.DRAFT else "",
        protocol_version=role.protocol_version,
    )
    return replace(description, **changes)  # type: ignore[arg-type]


class LocalWorker:
    """A worker in this process, and the scheduler's link to it: all of `Link` but gRPC."""

    def __init__(
        self,
        role_engine: RoleEngine,
        log: EventLog | None = None,
        *,
        before_send: ChangeCommand | None = None,
        device: Device | None = None,
    ) -> None:
        """`before_send` is called by the scheduler's thread with each command, and may change it.

        `device`: the role engine's; None is the CPU.
        """
        self.role = role_engine.description.role
        self.failure: SlipstreamError | None = None
        self.has_refused = False
        self.failures: list[BaseException] = []
        """The errors that broke the stream."""
        device = device or HostDevice()
        self.stream = device.create_stream(self.role.value, self.failures.append)
        self.engine = Engine(role_engine, device, self.stream, log or EventLog())
        self._epoch = 0
        self._before_send = before_send

    def describe(self) -> WorkerDescription:
        """See `Link.describe`."""
        return self.engine.describe()

    def attach(self, attachment: Attachment) -> Measurements | None:
        """See `Link.attach`."""
        measured = self.engine.attach(attachment_from_pb(attachment_to_pb(attachment)))
        self._epoch = attachment.epoch
        return measured

    def attach_region(self, region: OfferedRegion) -> None:
        """See `Link.attach_region`."""
        for _ in self.engine.attach_region(region_from_pb(region_to_pb(region))):
            pass

    def release_draft(self, epoch: int, attachment: int) -> None:
        """See `Link.release_draft`."""
        self.engine.release_draft(epoch, attachment)

    def detach_draft(self, epoch: int, attachment: int) -> None:
        """See `Link.detach_draft`. Blocks until the stream is past the last use of the memory."""
        for _ in self.engine.detach_draft(epoch, attachment):
            threading.Event().wait(0.001)

    def send(self, command: StepCommand) -> None:
        """See `Link.send`. The command is enqueued when this returns."""
        if self.failure is not None:
            raise failure_of(self)
        if self._before_send is not None:
            command = self._before_send(command)
        self.engine.enqueue(command_from_pb(command_to_pb(command)))

    def wait_for_acknowledgement(self, step: int, timeout_s: float) -> bool:
        """See `Link.wait_for_acknowledgement`."""
        return True

    def read_records(self, from_step: int) -> HostRecords:
        """See `Link.read_records`."""
        return HostRecords(self.engine.log.epoch, tuple(self.engine.log.since(from_step)), None)

    def detach(self, *, drain: bool) -> bool:
        """See `Link.detach`."""
        if drain:
            self.engine.drain(self._epoch)
        self.engine.abandon(self._epoch)
        return drain

    def close(self) -> None:
        """The process ends."""
        self.engine.close()
        self.stream.close()


class MakeWorker(Protocol):
    """Makes a worker in this process; `LocalWorker` and its subclasses do."""

    def __call__(
        self,
        role_engine: RoleEngine,
        log: EventLog | None,
        *,
        before_send: ChangeCommand | None,
        device: Device | None,
    ) -> LocalWorker:
        """See `LocalWorker`."""


@contextmanager
def local_workers(
    *roles: RoleEngine,
    log_dir: Path | None = None,
    device: Device | None = None,
    before_send: ChangeCommand | None = None,
    make: MakeWorker = LocalWorker,
) -> Iterator[list[LocalWorker]]:
    """Starts workers in this process; they are closed with the context, and none may have failed.

    With `log_dir`, each logs there which shared memory it accesses.
    """
    with ExitStack() as logs:
        workers = []
        for role in roles:
            name, log = role.description.role.value, None
            if log_dir is not None:
                log = EventLog(StreamName(name), log_dir / f"{name}.jsonl")
                logs.callback(log.close)
            workers.append(make(role, log, before_send=before_send, device=device))
        try:
            yield workers
        finally:
            for worker in workers:
                worker.close()
    assert not [error for worker in workers for error in worker.failures]


SHAPE = DraftShape(num_slots=4, run_ahead=1, num_draft_tokens=2, chunk_tokens=16)
ATTACHMENT = 100
"""The draft that is attached to a verify of these tests."""


class SharedArenas:
    """The memory of an epoch of verify and of a draft beside it, as a scheduler makes it."""

    def __init__(self, shape: DraftShape = SHAPE, device: Device | None = None) -> None:
        device = device or HostDevice()
        self.shape = shape
        self.results = device.create_arena(epoch_shape(shape).specs(), RESULT_FENCES)
        self.own = device.create_arena(shape.own_specs(), OWN_FENCES)
        self.given = device.create_arena(shape.given_specs(), GIVEN_FENCES)

    def tensor(self, name: BufferName) -> torch.Tensor:
        """A buffer, a draft's stamps from its own memory."""
        for arena in (self.own, self.given, self.results):
            if any(placed.spec.name == name for placed in arena.manifest.buffers):
                return arena.tensor(name)
        raise AssertionError(f"there is no {name}")

    def fence(self, name: FenceName) -> Fence:
        """A fence."""
        holders = dict.fromkeys(DRAFT_FENCES, self.own) | {FenceName.VERIFY_STASH: self.given}
        return holders.get(name, self.results).fence(name)

    def region(self, attachment: int = ATTACHMENT, *, epoch: int = 1, draft: DraftSizes | None = None) -> OfferedRegion:
        """What verify gets to attach the draft; `draft` as the shape says, if it is not given."""
        width = self.shape.hidden_width
        sizes = draft or DraftSizes(num_draft_tokens=self.shape.num_draft_tokens, hidden_width=width)
        own, given = self.own.manifest, self.given.manifest
        return OfferedRegion(epoch=epoch, attachment=attachment, own=own, given=given, draft=sizes)

    def close(self) -> None:
        """Gives the memory back."""
        for arena in (self.results, self.own, self.given):
            arena.close()


def epoch_shape(shape: DraftShape, num_draft_tokens: int | None = None) -> EpochShape:
    """The shape of an epoch whose drafts have this shape, or fewer draft tokens than it has."""
    most = shape.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    return EpochShape(
        num_slots=shape.num_slots, run_ahead=shape.run_ahead, num_draft_tokens=most, chunk_tokens=shape.chunk_tokens
    )


def attachment_to(arenas: SharedArenas, epoch: int = 1, *, role: Role = Role.DRAFT, **changes: object) -> Attachment:
    """An epoch of a worker in this memory."""
    is_draft = role is Role.DRAFT
    attachment = Attachment(
        epoch=epoch,
        manifest=(arenas.own if is_draft else arenas.results).manifest,
        given=arenas.given.manifest if is_draft else None,
        shape=arenas.shape if is_draft else epoch_shape(arenas.shape),
        page_tokens=16,
        num_pages=9,
        slot_pages=5,
        context_tokens=64,
    )
    return replace(attachment, **changes)  # type: ignore[arg-type]


def attach(worker: LocalWorker, arenas: SharedArenas, epoch: int = 1, **changes: object) -> None:
    """Opens an epoch of a worker, for verify with a draft attached."""
    worker.attach(attachment_to(arenas, epoch, role=worker.role, **changes))
    if worker.role is Role.VERIFY:
        worker.attach_region(arenas.region(epoch=epoch))


def decode(step: int, *slots: int, role: Role = Role.DRAFT, epoch: int = 1, waits: int = 0) -> StepCommand:
    """A decode step as the plan orders it; `waits` is the value to wait for, or 0."""
    is_draft = role is Role.DRAFT
    fence = FenceName.VERIFY_STASH if is_draft else FenceName.DRAFT_PROPOSED
    signals = (FenceName.DRAFT_PROPOSED,) if is_draft else (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH)
    return StepCommand(
        epoch=epoch,
        step=step,
        slots=slots,
        num_draft_tokens=(SHAPE.num_draft_tokens,) * len(slots),
        ops=FenceOps(
            (FenceWait(fence, waits),) if waits else (), tuple(FencePoint(signal, step) for signal in signals)
        ),
        attachment=0 if is_draft else ATTACHMENT,
    )
