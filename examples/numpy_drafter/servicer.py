"""Serves `slipstream.v1.Worker`."""

# ruff: noqa: N802 - a servicer's methods are named as in its proto

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MUST_AGREE = ("protocol_version", "device", "vocab_size", "tokenizer_sha256", "dtype")
_FENCES = (pb.FENCE_DRAFT_PROPOSED, pb.FENCE_DRAFT_PREFILLED)


class Epoch(Protocol):
    """An attachment to verify: carries out steps, one after the other."""

    number: int

    def enqueue(self, command: pb.StepCommand) -> None:
        """Enqueues a step and returns. Raises ValueError for an invalid one."""

    def finish(self) -> None:
        """Returns when every enqueued step is done, or once it is abandoned; the memory is unmapped then."""

    def abandon(self) -> None:
        """Ends without the remaining steps: the signals that they wait for may never come."""


class DraftServicer(pb_grpc.WorkerServicer):
    """Serves one scheduler and one epoch at a time."""

    def __init__(self, description: pb.DescribeResponse, open_epoch: Callable[[pb.AttachRequest], Epoch]) -> None:
        """`open_epoch` begins an attachment; it raises ValueError for memory that it cannot use."""
        self._description = description
        self._open_epoch = open_epoch
        self._num_slots = self._num_draft_tokens = 0
        self._last_step = 0
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        self._last_epoch = 0
        self._has_stream = False

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        """See worker.proto."""
        description = pb.DescribeResponse()
        description.CopyFrom(self._description)
        description.last_epoch = self._last_epoch
        description.has_scheduler = self._has_stream
        return description

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachResponse:
        """See worker.proto."""
        with self._lock:
            if misfit := self._misfit(request):
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, misfit)
            if self._epoch is not None:  # it has no stream: its scheduler was lost between Attach and Execute
                self._epoch.abandon()
                self._epoch = None
            try:
                self._epoch = self._open_epoch(request)
            except ValueError as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            self._last_epoch, self._last_step = request.epoch, 0
            self._num_slots, self._num_draft_tokens = request.num_slots, request.num_draft_tokens
        return pb.AttachResponse()

    def Execute(self, requests: Iterator[pb.StepCommand], context: grpc.ServicerContext) -> Iterator[pb.StepAck]:
        """See worker.proto."""
        with self._lock:
            epoch = self._epoch
            if epoch is None or self._has_stream:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not attached, or another scheduler has the stream")
            self._has_stream = True
        assert epoch is not None, "abort raises"
        try:
            for command in requests:
                self._enqueue(epoch, command, context)
                if command.acknowledge:
                    yield pb.StepAck(epoch=command.epoch, step=command.step)
        finally:
            epoch.abandon()
            with self._lock:
                self._has_stream = False
                if self._epoch is epoch:
                    self._epoch = None

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        """See worker.proto."""
        with self._lock:
            epoch = self._epoch
            if epoch is None or request.epoch not in (0, epoch.number):
                return pb.DrainResponse()
            self._epoch = None
        # Without the lock: if the scheduler is lost meanwhile, the end of its stream abandons the epoch.
        epoch.finish()
        return pb.DrainResponse()

    def _enqueue(self, epoch: Epoch, command: pb.StepCommand, context: grpc.ServicerContext) -> None:
        with self._lock:
            if self._epoch is not epoch or command.epoch != epoch.number:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {command.epoch} is not open")
            try:
                self._check(command)
                epoch.enqueue(command)
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            self._last_step = command.step

    def _check(self, command: pb.StepCommand) -> None:
        """Raises ValueError for a command that makes no sense."""
        slots = [*command.slots, *(chunk.slot for chunk in command.chunks), *(each.slot for each in command.updates)]
        if command.step <= self._last_step:
            raise ValueError(f"step {command.step} after step {self._last_step}")
        if not all(0 < slot < self._num_slots for slot in slots):
            raise ValueError(f"step {command.step}: a slot that is not there")
        given = command.num_draft_tokens
        if given and (len(given) != len(command.slots) or max(given) > self._num_draft_tokens):
            raise ValueError(f"step {command.step}: num_draft_tokens {list(given)} of {len(command.slots)} slots")
        # Each fence has one writer: a drafter that signals another one breaks the order of all processes.
        if any(point.fence not in _FENCES for point in command.signals):
            raise ValueError(f"step {command.step}: a draft signals DRAFT_PROPOSED and DRAFT_PREFILLED only")
        if any(wait.fence != pb.FENCE_VERIFY_STASH for wait in command.waits):
            raise ValueError(f"step {command.step}: a draft waits for VERIFY_STASH only")

    def _misfit(self, request: pb.AttachRequest) -> str:
        """Returns why an attachment does not fit; empty if it fits."""
        own, peer = self._description, request.peer
        if self._has_stream:
            return "another scheduler has the Execute stream of this worker"
        if request.protocol_version != own.protocol_version:
            return f"protocol version {request.protocol_version}: this drafter speaks {own.protocol_version}"
        if request.pid not in (0, own.pid):
            return f"process {request.pid} is meant, and this is process {own.pid}"
        if request.epoch <= self._last_epoch:
            return f"epoch {request.epoch}: this drafter was attached to {self._last_epoch} before"
        if not (1 <= request.num_draft_tokens <= 64 and 2 <= request.num_slots <= 2**16 and request.run_ahead <= 64):
            return "sizes that are out of range"
        differing = [name for name in _MUST_AGREE if _value(own, name) != _value(peer, name)]
        return "; ".join(f"{name}: draft {_value(own, name)}, verify {_value(peer, name)}" for name in differing)


def _value(description: pb.DescribeResponse, name: str) -> Any:
    return getattr(description, name)
