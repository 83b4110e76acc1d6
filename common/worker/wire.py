"""Encodes the worker contract as protobuf, and decodes and checks it."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from slipstream.common.api.sampling import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.common.device.manifest import DTYPE_NAMES, DTYPES, BufferSpec, FenceWord, Manifest, Placed
from slipstream.common.errors import InvalidArgumentError, ManifestError
from slipstream.common.messages import decode, encode
from slipstream.common.worker.contract import Attachment, DeviceMemory, WorkerDescription
from slipstream.common.worker.layout import BufferName, FutureMapShape
from slipstream.common.worker.step import (
    FenceName,
    FenceOps,
    FencePoint,
    PrefillChunk,
    Role,
    SlotUpdate,
    StepCommand,
    StepKind,
)
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

_Enum = TypeVar("_Enum", bound=Enum)

_SHAPE_FIELDS = ("num_slots", "num_draft_tokens", "run_ahead", "chunk_tokens")


def _enum(kind: type[_Enum], value: object, field: str, accepted: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(field, value, accepted) from None


def description_to_pb(description: WorkerDescription) -> pb.DescribeResponse:
    memory = encode(pb.DeviceMemory, description.memory) if description.memory.total else None
    return encode(pb.DescribeResponse, description, role=description.role.value, memory=memory)


def description_from_pb(message: pb.DescribeResponse) -> WorkerDescription:
    """Decodes a worker's description. Raises InvalidArgumentError for a role that does not exist."""
    role = _enum(Role, message.role, "role", "draft or verify")
    return decode(WorkerDescription, message, role=role, memory=decode(DeviceMemory, message.memory))


def manifest_to_pb(manifest: Manifest) -> pb.Manifest:
    buffers = [
        encode(pb.Buffer, placed.spec, offset=placed.offset, dtype=DTYPE_NAMES[placed.spec.dtype])
        for placed in manifest.buffers
    ]
    return encode(pb.Manifest, manifest, buffers=buffers)


def manifest_from_pb(message: pb.Manifest) -> Manifest:
    """Decodes and checks a manifest. Raises ManifestError."""
    buffers = []
    for buffer in message.buffers:
        if buffer.dtype not in DTYPES:
            raise ManifestError(f"buffer {buffer.name}: dtype {buffer.dtype!r}, accepted: {', '.join(DTYPES)}")
        spec = decode(BufferSpec, buffer, dtype=DTYPES[buffer.dtype])
        buffers.append(Placed(spec, buffer.offset))
    manifest = decode(Manifest, message, {"fences": _word_from_pb}, buffers=tuple(buffers))
    manifest.check()
    return manifest


def _word_from_pb(message: pb.FenceWord) -> FenceWord:
    try:
        return decode(FenceWord, message, {"fence": FenceName})
    except ValueError:
        raise ManifestError(f"fence {message.fence}: there is no such fence") from None


def attachment_to_pb(attachment: Attachment) -> pb.AttachRequest:
    return encode(
        pb.AttachRequest,
        attachment,
        peer=None if attachment.peer is None else description_to_pb(attachment.peer),
        manifest=manifest_to_pb(attachment.manifest),
        debug=attachment.is_debug,
        **{name: getattr(attachment.shape, name) for name in _SHAPE_FIELDS},
    )


def attachment_from_pb(message: pb.AttachRequest) -> Attachment:
    """Decodes and checks an attachment. Raises ManifestError, ConfigError or InvalidArgumentError."""
    manifest = manifest_from_pb(message.manifest)
    hidden = next((placed.spec for placed in manifest.buffers if placed.spec.name == BufferName.HIDDEN_STATES), None)
    shape = decode(
        FutureMapShape,
        message,
        hidden_width=0 if hidden is None else hidden.shape[-1],
        hidden_dtype=torch.float32 if hidden is None else hidden.dtype,
    )
    readers = {"peer": description_from_pb}
    attachment = decode(Attachment, message, readers, manifest=manifest, shape=shape, is_debug=message.debug)
    if [placed.spec for placed in manifest.buffers] != shape.specs():
        raise ManifestError("the buffers of the manifest are not those that the sizes ask for")
    return attachment


def command_to_pb(command: StepCommand) -> pb.StepCommand:
    """Encodes a step. By hand, because the loop does it for each worker in each step."""
    message = pb.StepCommand(
        epoch=command.epoch,
        step=command.step,
        kind=cast("pb.StepKind", command.kind),
        slots=command.slots,
        acknowledge=command.wants_acknowledgement,
        top_logprobs=command.top_logprobs,
    )
    # Made in their place: what the constructor is given, it copies.
    for points, target in ((command.ops.waits, message.waits), (command.ops.signals, message.signals)):
        for point in points:
            target.add(fence=cast("pb.Fence", point.fence), value=point.value)
    message.chunks.extend([encode(pb.PromptChunk, chunk) for chunk in command.chunks])
    message.updates.extend([encode(pb.SlotUpdate, update) for update in command.updates])
    return message


def command_from_pb(message: pb.StepCommand) -> StepCommand:
    """Decodes a step. Raises InvalidArgumentError for an impossible kind, fence or number."""
    if message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgumentError("top_logprobs", message.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    return decode(
        StepCommand,
        message,
        {"chunks": partial(decode, PrefillChunk), "updates": _update_from_pb},
        kind=_enum(StepKind, message.kind, "kind", "a step kind"),
        ops=FenceOps(_points_from_pb(message.waits), _points_from_pb(message.signals)),
        wants_acknowledgement=message.acknowledge,
    )


def _update_from_pb(message: pb.SlotUpdate) -> SlotUpdate:
    return decode(SlotUpdate, message, {"sampling": SamplingParams.from_pb})


def _points_from_pb(messages: Iterable[pb.FencePoint]) -> tuple[FencePoint, ...]:
    return tuple(FencePoint(_enum(FenceName, message.fence, "fence", "a fence"), message.value) for message in messages)
