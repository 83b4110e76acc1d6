"""Encodes the worker contract as protobuf, and decodes and checks it."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TypeVar, cast

import torch

from slipstream.common.device.manifest import DTYPE_NAMES, DTYPES, BufferSpec, FenceWord, Manifest, Placed
from slipstream.common.errors import InvalidArgumentError, ManifestError
from slipstream.common.wire.messages import decode, encode
from slipstream.common.wire.sequence import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.common.worker.contract import (
    Attachment,
    DeviceMemory,
    DraftRegion,
    DraftSizes,
    StepTokens,
    WorkerDescription,
)
from slipstream.common.worker.layout import LENT_WEIGHTS, BufferName, DraftShape, EpochShape
from slipstream.common.worker.step import (
    FenceName,
    FenceOps,
    FencePoint,
    FenceWait,
    PrefillChunk,
    Role,
    SlotUpdate,
    StepCommand,
    WaitPlace,
)
from slipstream.protos import worker_pb2 as pb

_Enum = TypeVar("_Enum", bound=Enum)

_SHAPE_FIELDS = ("num_slots", "num_draft_tokens", "run_ahead", "chunk_tokens")


def _enum(kind: type[_Enum], value: object, field: str, accepted: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(field, value, accepted) from None


def description_to_pb(description: WorkerDescription) -> pb.DescribeResponse:
    memory = encode(pb.DeviceMemory, description.memory) if description.memory.total else None
    weights = None if description.weights is None else manifest_to_pb(description.weights)
    return encode(pb.DescribeResponse, description, role=description.role.value, memory=memory, weights=weights)


def description_from_pb(message: pb.DescribeResponse) -> WorkerDescription:
    """Decodes a worker's description. Raises InvalidArgumentError for a role that does not exist, ManifestError."""
    role, memory = _enum(Role, message.role, "role", "draft or verify"), decode(DeviceMemory, message.memory)
    return decode(WorkerDescription, message, {"weights": _weights_from_pb}, role=role, memory=memory)


def _weights_from_pb(message: pb.Manifest) -> Manifest:
    weights = manifest_from_pb(message)
    names = [placed.spec.name for placed in weights.buffers]
    if not set(names) <= set(LENT_WEIGHTS) or weights.fences:
        accepted = f"{' and '.join(LENT_WEIGHTS)}, without fences"
        raise ManifestError(f"weights: buffers {', '.join(names)}, {len(weights.fences)} fences, accepted: {accepted}")
    return weights


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
        given=None if attachment.given is None else manifest_to_pb(attachment.given),
        debug=attachment.is_debug,
        **{name: getattr(attachment.shape, name) for name in _SHAPE_FIELDS},
    )


def attachment_from_pb(message: pb.AttachRequest) -> Attachment:
    """Decodes and checks an attachment: of a draft if it has `given`. Raises ManifestError, ConfigError and others."""
    manifest = manifest_from_pb(message.manifest)
    given = manifest_from_pb(message.given) if message.HasField("given") else None
    shape: EpochShape | DraftShape
    if given is None:
        shape = decode(EpochShape, message)
    else:
        width, dtype = hidden_of(given)
        shape = decode(DraftShape, message, hidden_width=width, hidden_dtype=dtype)
    attachment = decode(
        Attachment,
        message,
        {"peer": description_from_pb, "expected_draft": partial(decode, DraftSizes)},
        manifest=manifest,
        given=given,
        shape=shape,
        is_debug=message.debug,
    )
    if isinstance(shape, DraftShape) and given is not None:
        given.check_holds(shape.given_specs())
    manifest.check_holds(shape.own_specs() if isinstance(shape, DraftShape) else shape.specs())
    return attachment


def attached_to_pb(tokens: StepTokens | None, command_socket: str) -> pb.AttachResponse:
    """Encodes the answer to Attach. `tokens`: None if nothing was measured. `command_socket`: empty for none."""
    answer = pb.AttachResponse(command_socket=command_socket)
    if tokens is not None:
        answer.step_tokens, answer.step_doubling_context = tokens.num_tokens, tokens.doubling_context or 0
    return answer


def step_tokens_from_pb(message: pb.AttachResponse) -> StepTokens | None:
    """Decodes what verify measured; None if it did not."""
    return StepTokens(message.step_tokens, message.step_doubling_context or None) if message.step_tokens else None


def hidden_of(given: Manifest) -> tuple[int, torch.dtype]:
    """Returns width and dtype of the hidden states in `given`; 0 and float32 if it has none."""
    names = (placed.spec for placed in given.buffers)
    hidden = next((spec for spec in names if spec.name == BufferName.HIDDEN_STATES), None)
    return (0, torch.float32) if hidden is None else (hidden.shape[-1], hidden.dtype)


def region_to_pb(region: DraftRegion) -> pb.AttachDraftRequest:
    return encode(pb.AttachDraftRequest, region, own=manifest_to_pb(region.own), given=manifest_to_pb(region.given))


def region_from_pb(message: pb.AttachDraftRequest) -> DraftRegion:
    """Decodes the memory between verify and a draft. Raises ManifestError."""
    return decode(
        DraftRegion,
        message,
        own=manifest_from_pb(message.own),
        given=manifest_from_pb(message.given),
        draft=decode(DraftSizes, message.draft),
    )


def command_to_pb(command: StepCommand) -> pb.StepCommand:
    """Encodes a step. By hand, because it is done for each worker in each step."""
    message = pb.StepCommand(
        epoch=command.epoch,
        step=command.step,
        slots=command.slots,
        num_draft_tokens=command.num_draft_tokens,
        acknowledge=command.wants_acknowledgement,
        top_logprobs=command.top_logprobs,
        attachment=command.attachment,
        catches_up=command.catches_up,
    )
    # Made in their place: what the constructor is given, it copies.
    for fence, value, place in command.ops.waits:
        message.waits.add(fence=cast("pb.Fence", fence), value=value, place=cast("pb.WaitPlace", place))
    for fence, value in command.ops.signals:
        message.signals.add(fence=cast("pb.Fence", fence), value=value)
    message.chunks.extend([encode(pb.PromptChunk, chunk) for chunk in command.chunks])
    for update in command.updates:
        message.updates.add(
            slot=update.slot,
            generation=update.generation,
            first_page_index=update.first_page_index,
            pages=update.pages,
            limit_tokens=update.limit_tokens,
            sampling=None if update.sampling is None else update.sampling.to_pb(),
            max_draft_tokens=update.max_draft_tokens,
            prompt_tokens=update.prompt_tokens,
            history_from=update.history_from,
            cached_tokens=update.cached_tokens,
            has_cache_salt=update.has_cache_salt,
        )
    return message


def command_from_pb(message: pb.StepCommand) -> StepCommand:
    """Decodes a step. Raises InvalidArgumentError for an impossible fence, place or number."""
    if message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgumentError("top_logprobs", message.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    return decode(
        StepCommand,
        message,
        {"chunks": partial(decode, PrefillChunk), "updates": _update_from_pb},
        ops=FenceOps(tuple(map(_wait_from_pb, message.waits)), tuple(map(_point_from_pb, message.signals))),
        wants_acknowledgement=message.acknowledge,
    )


def _update_from_pb(message: pb.SlotUpdate) -> SlotUpdate:
    return decode(SlotUpdate, message, {"sampling": SamplingParams.from_pb})


def _point_from_pb(message: pb.FencePoint) -> FencePoint:
    return FencePoint(_enum(FenceName, message.fence, "fence", "a fence"), message.value)


def _wait_from_pb(message: pb.FenceWait) -> FenceWait:
    """Decodes a wait. Raises InvalidArgumentError for a fence or a place that does not exist."""
    place = _enum(WaitPlace, message.place, "place", "a place in a step")
    return FenceWait(_enum(FenceName, message.fence, "fence", "a fence"), message.value, place)
