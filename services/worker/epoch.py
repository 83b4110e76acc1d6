"""A worker's epoch: the memory and the fences that it shares with other processes, and what a role works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.device.manifest import DTYPES
from slipstream.common.errors import ConfigError, MismatchError, StaleEpochError
from slipstream.common.worker.contract import PROTOCOL_VERSION
from slipstream.common.worker.step import FenceName, Role
from slipstream.services.worker.future_map import CapturedStep, FutureMap
from slipstream.services.worker.graphs import CudaCapture, GraphedStep, HostCapture
from slipstream.services.worker.slots import SlotTable
from slipstream.services.worker.staging import HostStaging, PinnedStaging, staged_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from slipstream.common.device.interface import Arena, Device, Fence, Stream
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.contract import Attachment, WorkerDescription
    from slipstream.common.worker.step import FencePoint
    from slipstream.services.worker.staging import Staging

RELEASED_TIMEOUT_S = 60.0
"""For work that is enqueued behind a released wait."""
HOPELESS_TIMEOUT_S = 5.0
"""For a stream that may wait for a dead producer with fences that cannot be released."""


@dataclass(frozen=True, slots=True)
class EpochState:
    """The part of an epoch that a role works with, between attach and detach."""

    attachment: Attachment
    future_map: FutureMap
    slots: SlotTable
    staging: Staging = field(default_factory=HostStaging)
    graphs: GraphedStep | None = None
    """For capturing steps; None where steps run without graphs."""


class Epoch:
    """An open epoch."""

    def __init__(self, state: EpochState, arena: Arena) -> None:
        self.state = state
        self._arena = arena
        self._fences = {name: arena.fence(name) for name in FenceName}
        # The largest value of each fence that the stream waits for: released when its producer is gone.
        self._waited: dict[Fence, int] = {}

    def wait(self, stream: Stream, point: FencePoint) -> None:
        fence = self._fences[point.fence]
        self._waited[fence] = max(point.value, self._waited.get(fence, 0))
        fence.wait(stream, point.value)

    def signal(self, stream: Stream, point: FencePoint) -> None:
        self._fences[point.fence].signal(stream, point.value)

    def release(self) -> None:
        """Signals in the producers' place what the stream waits for, as far as that can be done. Raises DeviceError."""
        for fence, value in self._waited.items():
            fence.release(value)

    @property
    def release_timeout_s(self) -> float:
        """Time for the stream to come to its end once its producer is gone."""
        return RELEASED_TIMEOUT_S if all(fence.is_releasable for fence in self._waited) else HOPELESS_TIMEOUT_S

    def close(self) -> None:
        """Closes the shared memory."""
        self._arena.close()


def make_state(
    attachment: Attachment,
    arena: Arena,
    description: WorkerDescription,
    device: Device,
    stream: Stream,
    log: AccessLog,
    *,
    blocked: Callable[[], AbstractContextManager[None]],
) -> EpochState:
    """Allocates the state that all roles need. `blocked`: see `PinnedStaging`."""
    future_map = _future_map_class(device)(
        attachment.shape,
        arena,
        role=description.role,
        vocab_size=description.vocab_size,
        log=log,
        is_debug=attachment.is_debug,
    )
    slots = SlotTable(attachment, description.vocab_size, device.torch_device)
    if device.has_stream_threads:
        return EpochState(attachment, future_map, slots, HostStaging())
    staging = PinnedStaging(
        num_slots=attachment.shape.num_slots,
        num_bytes=staged_bytes(attachment),
        depth=attachment.shape.ring,
        device=device.torch_device,
        fetch=partial(device.fetch, stream),
        blocked=blocked,
    )
    # In debug mode rows are looked at on the host, which a graph cannot.
    if attachment.is_debug:
        return EpochState(attachment, future_map, slots, staging)
    start, end = future_map.stamp_columns(description.role)
    graphed = GraphedStep(
        capture=CudaCapture() if device.torch_device.type == "cuda" else HostCapture(),
        slots=staging.slots,
        step=CapturedStep(staging.ring_row),
        stamp_start=partial(device.stamp_row, stream, start, staging.ring_row),
        stamp_end=partial(device.stamp_row, stream, end, staging.ring_row),
    )
    return EpochState(attachment, future_map, slots, staging, graphed)


def _future_map_class(device: Device) -> type[FutureMap]:
    if device.torch_device.type == "cpu":
        return FutureMap
    # Imported here, as there is no triton where there is no GPU.
    from slipstream.services.worker.fused_future_map import FusedFutureMap

    return FusedFutureMap


def check_attachment(attachment: Attachment, own: WorkerDescription, last_epoch: int) -> None:
    """Raises MismatchError, StaleEpochError or ConfigError for an attachment that does not fit this worker.

    `last_epoch`: the largest that it was attached in.
    """
    if attachment.protocol_version != PROTOCOL_VERSION:
        given = attachment.protocol_version
        raise MismatchError([f"protocol version: scheduler has {given}, this worker has {PROTOCOL_VERSION}"])
    if attachment.epoch <= last_epoch:
        raise StaleEpochError(f"epoch {attachment.epoch}: this worker was attached to {last_epoch} before")
    if attachment.peer is not None:
        own.check_fits(attachment.peer)
    if own.role is Role.DRAFT and not attachment.shape.num_draft_tokens:
        raise ConfigError("attach.num_draft_tokens", 0, "at least 1, for a draft")
    shape = attachment.shape
    if own.role is Role.DRAFT and shape.hidden_width != own.hidden_width:
        width = shape.hidden_width
        raise MismatchError([f"width of the hidden states: arena has {width}, draft reads {own.hidden_width}"])
    if shape.hidden_width and shape.hidden_dtype is not DTYPES.get(own.dtype):
        raise MismatchError([f"dtype of the hidden states: arena has {shape.hidden_dtype}, model has {own.dtype}"])
    longest = own.max_context_tokens
    if attachment.context_tokens > longest:
        given = attachment.context_tokens
        raise MismatchError([f"context: scheduler has {given} tokens, this model was made for {longest}"])
