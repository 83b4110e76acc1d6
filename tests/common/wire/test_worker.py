"""Between protobuf and plain data: whatever is sent comes out the same, and what makes no sense does not come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from slipstream.common.errors import ConfigError, InvalidArgumentError, ManifestError
from slipstream.common.wire.layout import (
    GIVEN_FENCES,
    OWN_FENCES,
    RESULT_FENCES,
    DraftShape,
    EpochShape,
)
from slipstream.common.wire.manifest import BufferSpec, FenceWord, Manifest, lay_out
from slipstream.common.wire.step import FenceName, Role, StepCommand
from slipstream.common.wire.worker import (
    LONGEST_COST_NS,
    MOST_COSTS,
    Attachment,
    DraftRegion,
    Measurements,
    StepCost,
    StepTokens,
    WorkerDescription,
    attached_to_pb,
    attachment_from_pb,
    attachment_to_pb,
    command_from_pb,
    command_to_pb,
    description_from_pb,
    description_to_pb,
    manifest_from_pb,
    manifest_to_pb,
    measurements_from_pb,
    region_from_pb,
    region_to_pb,
)
from slipstream.protos import worker_pb2 as pb
from tests.harness.worker_messages import COMMANDS, DESCRIPTIONS, REGIONS, attachments, manifests, weights


@given(REGIONS)
def test_regions_come_out_as_they_went_in(region: DraftRegion) -> None:
    message = pb.AttachDraftRequest.FromString(region_to_pb(region).SerializeToString())
    assert region_from_pb(message) == region


@given(COMMANDS)
def test_commands_come_out_as_they_went_in(command: StepCommand) -> None:
    message = pb.StepCommand.FromString(command_to_pb(command).SerializeToString())
    assert command_from_pb(message) == command


@given(DESCRIPTIONS)
def test_descriptions_come_out_as_they_went_in(description: WorkerDescription) -> None:
    message = pb.DescribeResponse.FromString(description_to_pb(description).SerializeToString())
    assert description_from_pb(message) == description


@given(manifests())
def test_manifests_come_out_as_they_went_in(manifest: Manifest) -> None:
    message = pb.Manifest.FromString(manifest_to_pb(manifest).SerializeToString())
    assert manifest_from_pb(message) == manifest


@given(attachments())
def test_attachments_come_out_as_they_went_in(attachment: Attachment) -> None:
    message = pb.AttachRequest.FromString(attachment_to_pb(attachment).SerializeToString())
    assert attachment_from_pb(message) == attachment


SHAPE = EpochShape(num_slots=3, run_ahead=1, num_draft_tokens=2, chunk_tokens=8)
DRAFT = DraftShape(num_slots=3, run_ahead=1, num_draft_tokens=2, chunk_tokens=8)


def _manifest(specs: list[BufferSpec], fences: tuple[FenceName, ...]) -> Manifest:
    buffers, words, size = lay_out(specs, fences, "host")
    return Manifest("file", "/dev/shm/slipstream-x", size, buffers, words)


def _attach_request(*, is_draft: bool = False) -> pb.AttachRequest:
    own = _manifest(DRAFT.own_specs(), OWN_FENCES) if is_draft else _manifest(SHAPE.specs(), RESULT_FENCES)
    return attachment_to_pb(
        Attachment(
            epoch=1,
            manifest=own,
            given=_manifest(DRAFT.given_specs(), GIVEN_FENCES) if is_draft else None,
            shape=DRAFT if is_draft else SHAPE,
            page_tokens=16,
            num_pages=9,
            slot_pages=5,
            context_tokens=64,
        )
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.ClearField("given"),
        lambda m: m.given.buffers.pop(),
        lambda m: m.given.CopyFrom(m.manifest),
        lambda m: m.manifest.CopyFrom(m.given),
        lambda m: setattr(m.given.buffers[0], "writer", "draft"),
        lambda m: setattr(m, "num_draft_tokens", 3),
    ],
)
def test_a_draft_s_memory_is_as_its_sizes_say(change: Callable[[pb.AttachRequest], None]) -> None:
    request = _attach_request(is_draft=True)
    attachment_from_pb(request)
    change(request)
    with pytest.raises(ManifestError, match="not those that the sizes ask for"):
        attachment_from_pb(request)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: setattr(m, "epoch", 0), ConfigError, r"attach\.epoch: got 0"),
        (lambda m: setattr(m, "num_slots", 1), ConfigError, r"attach\.num_slots"),
        (lambda m: setattr(m, "run_ahead", 65), ConfigError, r"attach\.run_ahead"),
        (lambda m: setattr(m, "num_draft_tokens", 65), ConfigError, r"attach\.num_draft_tokens"),
        (lambda m: setattr(m, "chunk_tokens", 0), ConfigError, r"attach\.chunk_tokens"),
        (lambda m: setattr(m, "page_tokens", 0), ConfigError, r"attach\.page_tokens"),
        (lambda m: setattr(m, "num_pages", 1), ConfigError, r"attach\.num_pages"),
        (lambda m: setattr(m, "slot_pages", 0), ConfigError, r"attach\.slot_pages"),
        (lambda m: setattr(m, "context_tokens", 2**25), ConfigError, r"attach\.context_tokens"),
        (lambda m: setattr(m, "num_slots", 4), ManifestError, "not those that the sizes ask for"),
        (lambda m: setattr(m, "run_ahead", 2), ManifestError, "not those that the sizes ask for"),
        (lambda m: m.manifest.buffers.pop(), ManifestError, "not those that the sizes ask for"),
        (lambda m: setattr(m.manifest.buffers[0], "writer", "draft"), ManifestError, "not those that the sizes ask"),
        (lambda m: setattr(m.manifest.buffers[0], "dtype", "object"), ManifestError, "dtype 'object', accepted: int32"),
        (lambda m: setattr(m.manifest.buffers[0], "offset", 2**63), ManifestError, "not an aligned part"),
        (lambda m: setattr(m.manifest.fences[0], "fence", 9), ManifestError, "fence 9: there is no such"),
        (lambda m: setattr(m.peer, "role", "scheduler"), InvalidArgumentError, "role: got 'scheduler'"),
    ],
)
def test_attachments_that_make_no_sense_are_refused(
    change: Callable[[pb.AttachRequest], None], error: type[Exception], message: str
) -> None:
    request = _attach_request()
    attachment_from_pb(request)
    change(request)
    with pytest.raises(error, match=message):
        attachment_from_pb(request)


def _taken(**changes: object) -> pb.StepCommand:
    """A request takes a slot, with these changes to its sampling."""
    sampling = pb.SlotSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **changes})  # type: ignore[arg-type]
    return pb.StepCommand(updates=[pb.SlotUpdate(sampling=sampling)])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.StepCommand(waits=[pb.FenceWait(value=3, place=pb.WAIT_PLACE_START)]), "fence"),
        (pb.StepCommand(waits=[pb.FenceWait(value=3, fence=pb.FENCE_VERIFY_STASH)]), "place"),
        (pb.StepCommand(waits=[pb.FenceWait(fence=pb.FENCE_VERIFY_STASH, place=4)]), "place"),  # type: ignore[arg-type]
        (pb.StepCommand(signals=[pb.FencePoint(fence=8)]), "fence"),  # type: ignore[arg-type]
        (_taken(temperature=float("nan")), "sampling_params.temperature"),
        (_taken(top_p=0.0), "sampling_params.top_p"),
        (_taken(repetition_penalty=0.0), "sampling_params.repetition_penalty"),
        (_taken(repetition_penalty=2.5), "sampling_params.repetition_penalty"),
        (_taken(frequency_penalty=-2.5), "sampling_params.frequency_penalty"),
        (_taken(presence_penalty=float("nan")), "sampling_params.presence_penalty"),
        (_taken(logit_bias=[pb.TokenBias(token_id=7, bias=float("inf"))]), "sampling_params.logit_bias[7]"),
        (_taken(logit_bias=[pb.TokenBias(token_id=7), pb.TokenBias(token_id=7)]), "sampling_params.logit_bias"),
        (_taken(logit_bias=[pb.TokenBias(token_id=2**31)]), "sampling_params.logit_bias"),
        (_taken(logit_bias=[pb.TokenBias(token_id=i) for i in range(257)]), "sampling_params.logit_bias"),
        (_taken(masked_before=2**31), "sampling_params.masked_before"),
        (_taken(masked_token_ids=[4, 3]), "sampling_params.masked_token_ids"),
        (_taken(masked_token_ids=list(range(257))), "sampling_params.masked_token_ids"),
        (pb.StepCommand(top_logprobs=21), "top_logprobs"),
    ],
)
def test_commands_that_make_no_sense_are_refused(message: pb.StepCommand, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        command_from_pb(message)
    assert caught.value.field == field


def test_a_peer_that_does_not_fit_is_told_in_everything_that_differs() -> None:
    mine = description_from_pb(pb.DescribeResponse(role="draft", vocab_size=5, dtype="float32", protocol_version=1))
    theirs = description_from_pb(pb.DescribeResponse(role="verify", vocab_size=6, dtype="float16", protocol_version=2))
    with pytest.raises(Exception, match="protocol version: draft has 1, verify has 2; dtype: draft has 'float32'"):
        mine.check_fits(theirs)
    mine.check_fits(replace(mine, vocab_size=6))


def test_an_unknown_fence_word_is_a_manifest_error() -> None:
    words = (FenceWord(FenceName.DRAFT_PROPOSED, "host", 0),)
    message = manifest_to_pb(Manifest("file", "p", 64, (), words))
    message.fences[0].fence = 0  # type: ignore[assignment]
    with pytest.raises(ManifestError, match="fence 0"):
        manifest_from_pb(message)


def test_weights_cannot_stand_in_for_other_memory() -> None:
    described = WorkerDescription(
        role=Role.VERIFY,
        device="cpu",
        vocab_size=7,
        tokenizer_sha256="",
        dtype="bfloat16",
        max_context_tokens=8,
        kv_bytes_per_token=1,
        model="",
        pid=1,
        weights=weights("embedding", "draft_tokens"),
    )
    with pytest.raises(ManifestError, match="weights: buffers embedding, draft_tokens, 0 fences, accepted: embedding"):
        description_from_pb(description_to_pb(described))


@pytest.mark.parametrize("tokens", [None, StepTokens(32), StepTokens(64, 4000)])
def test_measurements_arrive_without_times_that_no_step_takes(tokens: StepTokens | None) -> None:
    costs = (StepCost(1, 0, 900), StepCost(4, 15, LONGEST_COST_NS))
    wrong = (StepCost(0, 1, 900), StepCost(1, 1, 0), StepCost(1, 1, LONGEST_COST_NS + 1), StepCost(1, 1, 2**64 - 1))
    given = Measurements(tokens, costs[:1] + wrong + costs[1:] + costs * MOST_COSTS)
    found = measurements_from_pb(attached_to_pb(given, ".commands"))
    assert found.step_tokens == tokens
    assert found.costs == costs + (costs * MOST_COSTS)[: MOST_COSTS - len(costs + wrong)]
    assert measurements_from_pb(attached_to_pb(None, "")) == Measurements()
