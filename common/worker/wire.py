"""Encodes the worker contract as protobuf, and decodes and checks it."""

from __future__ import annotations

from dataclasses import asdict, fields
from enum import Enum
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from slipstream.common.api.sampling import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.common.device.manifest import DTYPE_NAMES, DTYPES, BufferSpec, FenceWord, Manifest, Placed
from slipstream.common.errors import InvalidArgumentError, ManifestError
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

_SAME_FIELDS = tuple(
    field.name
    for field in fields(WorkerDescription)
    if field.name not in ("role", "memory", "eos_token_ids", "hidden_layers")
)
_SAMPLING_NUMBERS = tuple(
    field.name for field in fields(SamplingParams) if field.name not in ("logit_bias", "masked_token_ids")
)


def _enum(kind: type[_Enum], value: object, field: str, accepted: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(field, value, accepted) from None


def description_to_pb(description: WorkerDescription) -> pb.DescribeResponse:
    """Encodes a worker's description."""
    return pb.DescribeResponse(
        role=description.role.value,
        eos_token_ids=description.eos_token_ids,
        hidden_layers=description.hidden_layers,
        memory=pb.DeviceMemory(**asdict(description.memory)) if description.memory.total else None,
        **{name: getattr(description, name) for name in _SAME_FIELDS},
    )


def description_from_pb(message: pb.DescribeResponse) -> WorkerDescription:
    """Decodes a worker's description. Raises InvalidArgumentError for a role that does not exist."""
    return WorkerDescription(
        role=_enum(Role, message.role, "role", "draft or verify"),
        eos_token_ids=tuple(message.eos_token_ids),
        hidden_layers=tuple(message.hidden_layers),
        memory=DeviceMemory(**{field.name: getattr(message.memory, field.name) for field in fields(DeviceMemory)}),
        **{name: getattr(message, name) for name in _SAME_FIELDS},
    )


def manifest_to_pb(manifest: Manifest) -> pb.Manifest:
    """Encodes a manifest."""
    return pb.Manifest(
        kind=manifest.kind,
        path=manifest.path,
        handle=manifest.handle,
        size=manifest.size,
        buffers=[
            pb.Buffer(
                name=placed.spec.name,
                offset=placed.offset,
                shape=placed.spec.shape,
                dtype=DTYPE_NAMES[placed.spec.dtype],
                writer=placed.spec.writer,
            )
            for placed in manifest.buffers
        ],
        fences=[
            pb.FenceWord(fence=cast("pb.Fence", word.fence), kind=word.kind, offset=word.offset, events=word.events)
            for word in manifest.fences
        ],
    )


def manifest_from_pb(message: pb.Manifest) -> Manifest:
    """Decodes and checks a manifest. Raises ManifestError."""
    buffers = []
    for buffer in message.buffers:
        if buffer.dtype not in DTYPES:
            raise ManifestError(f"buffer {buffer.name}: dtype {buffer.dtype!r}, accepted: {', '.join(DTYPES)}")
        spec = BufferSpec(buffer.name, tuple(buffer.shape), DTYPES[buffer.dtype], buffer.writer)
        buffers.append(Placed(spec, buffer.offset))
    words = tuple(_word_from_pb(word) for word in message.fences)
    manifest = Manifest(message.kind, message.path, message.size, tuple(buffers), words, message.handle)
    manifest.check()
    return manifest


def _word_from_pb(message: pb.FenceWord) -> FenceWord:
    try:
        return FenceWord(FenceName(message.fence), message.kind, message.offset, tuple(message.events))
    except ValueError:
        raise ManifestError(f"fence {message.fence}: there is no such fence") from None


def attachment_to_pb(attachment: Attachment) -> pb.AttachRequest:
    """Encodes an attachment."""
    shape = attachment.shape
    return pb.AttachRequest(
        epoch=attachment.epoch,
        peer=None if attachment.peer is None else description_to_pb(attachment.peer),
        manifest=manifest_to_pb(attachment.manifest),
        num_slots=shape.num_slots,
        num_draft_tokens=shape.num_draft_tokens,
        run_ahead=shape.run_ahead,
        chunk_tokens=shape.chunk_tokens,
        page_tokens=attachment.page_tokens,
        num_pages=attachment.num_pages,
        context_tokens=attachment.context_tokens,
        protocol_version=attachment.protocol_version,
        debug=attachment.is_debug,
    )


def attachment_from_pb(message: pb.AttachRequest) -> Attachment:
    """Decodes and checks an attachment. Raises ManifestError, ConfigError or InvalidArgumentError."""
    manifest = manifest_from_pb(message.manifest)
    hidden = next((placed.spec for placed in manifest.buffers if placed.spec.name == BufferName.HIDDEN_STATES), None)
    shape = FutureMapShape(
        num_slots=message.num_slots,
        run_ahead=message.run_ahead,
        num_draft_tokens=message.num_draft_tokens,
        chunk_tokens=message.chunk_tokens,
        hidden_width=0 if hidden is None else hidden.shape[-1],
        hidden_dtype=torch.float32 if hidden is None else hidden.dtype,
    )
    attachment = Attachment(
        epoch=message.epoch,
        manifest=manifest,
        shape=shape,
        page_tokens=message.page_tokens,
        num_pages=message.num_pages,
        context_tokens=message.context_tokens,
        peer=description_from_pb(message.peer) if message.HasField("peer") else None,
        protocol_version=message.protocol_version,
        is_debug=message.debug,
    )
    if [placed.spec for placed in manifest.buffers] != shape.specs():
        raise ManifestError("the buffers of the manifest are not those that the sizes ask for")
    return attachment


def command_to_pb(command: StepCommand) -> pb.StepCommand:
    """Encodes a step."""
    return pb.StepCommand(
        epoch=command.epoch,
        step=command.step,
        kind=cast("pb.StepKind", command.kind),
        slots=command.slots,
        waits=_points_to_pb(command.ops.waits),
        signals=_points_to_pb(command.ops.signals),
        chunks=[
            pb.PromptChunk(slot=chunk.slot, start=chunk.start, tokens=chunk.tokens, is_last=chunk.is_last)
            for chunk in command.chunks
        ],
        updates=[_update_to_pb(update) for update in command.updates],
        acknowledge=command.wants_acknowledgement,
        top_logprobs=command.top_logprobs,
    )


def command_from_pb(message: pb.StepCommand) -> StepCommand:
    """Decodes a step. Raises InvalidArgumentError for an impossible kind, fence or number."""
    return StepCommand(
        epoch=message.epoch,
        step=message.step,
        kind=_enum(StepKind, message.kind, "kind", "a step kind"),
        slots=tuple(message.slots),
        ops=FenceOps(_points_from_pb(message.waits), _points_from_pb(message.signals)),
        chunks=tuple(
            PrefillChunk(slot=chunk.slot, start=chunk.start, tokens=tuple(chunk.tokens), is_last=chunk.is_last)
            for chunk in message.chunks
        ),
        updates=tuple(_update_from_pb(update) for update in message.updates),
        wants_acknowledgement=message.acknowledge,
        top_logprobs=_top_logprobs(message),
    )


def _update_to_pb(update: SlotUpdate) -> pb.SlotUpdate:
    return pb.SlotUpdate(
        slot=update.slot,
        generation=update.generation,
        first_page_index=update.first_page_index,
        pages=update.pages,
        limit_tokens=update.limit_tokens,
        sampling=None if update.sampling is None else _sampling_to_pb(update.sampling),
        max_draft_tokens=update.max_draft_tokens,
    )


def _update_from_pb(message: pb.SlotUpdate) -> SlotUpdate:
    return SlotUpdate(
        slot=message.slot,
        generation=message.generation,
        first_page_index=message.first_page_index,
        pages=tuple(message.pages),
        limit_tokens=message.limit_tokens,
        sampling=_sampling_from_pb(message.sampling) if message.HasField("sampling") else None,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
    )


def _sampling_to_pb(sampling: SamplingParams) -> pb.SlotSampling:
    return pb.SlotSampling(
        logit_bias=[pb.TokenBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        masked_token_ids=sampling.masked_token_ids,
        **{name: getattr(sampling, name) for name in _SAMPLING_NUMBERS},
    )


def _sampling_from_pb(message: pb.SlotSampling) -> SamplingParams:
    return SamplingParams(
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        masked_token_ids=tuple(message.masked_token_ids),
        **{name: getattr(message, name) for name in _SAMPLING_NUMBERS},
    )


def _top_logprobs(message: pb.StepCommand) -> int | None:
    if not message.HasField("top_logprobs"):
        return None
    if message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgumentError("top_logprobs", message.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    return message.top_logprobs


def _points_to_pb(points: Iterable[FencePoint]) -> list[pb.FencePoint]:
    return [pb.FencePoint(fence=cast("pb.Fence", point.fence), value=point.value) for point in points]


def _points_from_pb(messages: Iterable[pb.FencePoint]) -> tuple[FencePoint, ...]:
    return tuple(FencePoint(_enum(FenceName, message.fence, "fence", "a fence"), message.value) for message in messages)
