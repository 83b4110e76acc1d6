"""Between protobuf and plain data: whatever is sent comes out the same, and what makes no sense does not come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import ConfigError, InvalidArgumentError, ManifestError
from slipstream.common.wire.layout import (
    GIVEN_FENCES,
    LENT_WEIGHTS,
    OWN_FENCES,
    RESULT_FENCES,
    DraftShape,
    EpochShape,
)
from slipstream.common.wire.manifest import DTYPES, HANDLE_BYTES, BufferSpec, FenceWord, Manifest, lay_out
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import (
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
from slipstream.common.wire.worker import (
    LARGEST_EPOCH,
    LONGEST_COST_NS,
    MOST_COSTS,
    Attachment,
    DeviceMemory,
    DraftSizes,
    Measurements,
    OfferedRegion,
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
    measurements_from_pb,
    region_from_pb,
    region_to_pb,
)
from slipstream.protos import worker_pb2 as pb

UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TOKEN_IDS = st.integers(0, 2**31 - 1)
NUMBERS = st.integers(1, LARGEST_EPOCH)
"""The numbers that epochs and attachments may have."""


def _tuples(items: st.SearchStrategy[int], max_size: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(items, max_size=max_size).map(tuple)


POINTS = st.lists(st.builds(FencePoint, st.sampled_from(FenceName), UINT64), max_size=4).map(tuple)
WAITS = st.lists(st.builds(FenceWait, st.sampled_from(FenceName), UINT64, st.sampled_from(WaitPlace)), max_size=4).map(
    tuple
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(2.0**-16, 100, width=32),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    min_p=st.floats(0, 1, width=32),
    seed=UINT64,
    repetition_penalty=st.floats(2.0**-16, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(TOKEN_IDS, st.floats(-100, 100, width=32), max_size=6).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    masked_before=TOKEN_IDS,
    masked_token_ids=st.sets(TOKEN_IDS, max_size=6).map(lambda ids: tuple(sorted(ids))),
)
CHUNKS = st.lists(
    st.builds(PrefillChunk, slot=UINT32, start=UINT32, tokens=_tuples(UINT32), is_last=st.booleans()), max_size=3
)
UPDATES = st.lists(
    st.builds(
        SlotUpdate,
        slot=UINT32,
        generation=UINT32,
        first_page_index=UINT32,
        pages=_tuples(UINT32),
        limit_tokens=UINT32,
        sampling=st.none() | SAMPLING,
        max_draft_tokens=st.none() | UINT32,
        prompt_tokens=st.none() | UINT32,
        history_from=UINT32,
        cached_tokens=UINT32,
        has_cache_salt=st.booleans(),
    ),
    max_size=3,
)
COMMANDS = st.builds(
    StepCommand,
    epoch=UINT64,
    step=UINT64,
    slots=_tuples(UINT32),
    num_draft_tokens=_tuples(UINT32),
    ops=st.builds(FenceOps, WAITS, POINTS),
    chunks=CHUNKS.map(tuple),
    updates=UPDATES.map(tuple),
    wants_acknowledgement=st.booleans(),
    top_logprobs=st.none() | st.integers(0, 20),
    attachment=UINT64,
    catches_up=st.booleans(),
)


def weights(*names: str) -> Manifest:
    """Weights as verify lends them, under these names."""
    buffers, _, size = lay_out([BufferSpec(name, (7, 2), torch.bfloat16, "verify") for name in names], (), "timeline")
    return Manifest("cuda_ipc", "", size, buffers, (), bytes(HANDLE_BYTES))


DESCRIPTIONS = st.builds(
    WorkerDescription,
    role=st.sampled_from(Role),
    device=st.text(),
    vocab_size=UINT32,
    tokenizer_sha256=st.text(),
    dtype=st.text(),
    max_context_tokens=UINT32,
    kv_bytes_per_token=UINT64,
    model=st.text(),
    pid=UINT32,
    protocol_version=UINT32,
    metrics_port=UINT32,
    hidden_width=UINT32,
    algorithm=st.text(),
    eos_token_ids=_tuples(UINT32),
    tokenizer_path=st.text(),
    shared_weight_bytes=UINT64,
    max_draft_tokens=UINT32,
    weights=st.sampled_from([None, weights(*LENT_WEIGHTS), weights(*LENT_WEIGHTS[:1])]),
    memory=st.just(DeviceMemory())
    | st.builds(
        DeviceMemory,
        total=st.integers(1, 2**64 - 1),
        free=UINT64,
        weights=UINT64,
        work=UINT64,
        work_per_token=UINT64,
        work_per_choice=UINT64,
    ),
)
SPECS = st.lists(
    st.builds(
        BufferSpec,
        st.text(min_size=1),
        st.lists(st.integers(1, 2**12), min_size=1, max_size=4).map(tuple),
        st.sampled_from(list(DTYPES.values())),
        st.sampled_from([role.value for role in Role]),
    ),
    max_size=5,
    unique_by=lambda spec: spec.name,
)
SIZES = {"num_slots": st.integers(2, 2**16), "run_ahead": st.integers(0, 64), "chunk_tokens": st.integers(1, 2**20)}
EPOCHS = st.builds(EpochShape, **SIZES, num_draft_tokens=st.integers(0, 64))
DRAFTS = st.builds(
    DraftShape,
    **SIZES,
    num_draft_tokens=st.integers(1, 64),
    hidden_width=st.integers(0, 2**14),
    hidden_dtype=st.sampled_from(list(DTYPES.values())),
)
DRAFT_SIZES = st.builds(DraftSizes, num_draft_tokens=UINT32, hidden_width=UINT32, hidden_layers=_tuples(UINT32))


HANDLES = st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES)
EVENTS = st.lists(HANDLES, max_size=3).map(tuple)


@st.composite
def manifests(draw: st.DrawFn, specs: list[BufferSpec] | None = None) -> Manifest:
    """Layouts of `specs`, or of any."""
    kind, path, fence_kind = draw(st.text()), draw(st.text()), draw(st.text())
    buffers, words, size = lay_out(draw(SPECS) if specs is None else specs, list(FenceName), fence_kind)
    words = tuple(replace(word, events=draw(EVENTS)) for word in words)
    return Manifest(kind, path, size, buffers, words, draw(st.just(b"") | HANDLES))


@st.composite
def attachments(draw: st.DrawFn) -> Attachment:
    """Attachments whose buffers are those of their shape."""
    shape = draw(EPOCHS | DRAFTS)
    is_draft = isinstance(shape, DraftShape)
    if isinstance(shape, DraftShape) and not shape.hidden_width:
        shape = replace(shape, hidden_dtype=torch.float32)
    return Attachment(
        epoch=draw(NUMBERS),
        manifest=draw(manifests(shape.own_specs() if isinstance(shape, DraftShape) else shape.specs())),
        given=draw(manifests(shape.given_specs())) if isinstance(shape, DraftShape) else None,
        shape=shape,
        page_tokens=draw(st.integers(1, 2**16)),
        num_pages=draw(st.integers(2, 2**31)),
        slot_pages=draw(st.integers(1, 2**24)),
        context_tokens=draw(st.integers(2, 2**24)),
        peer=draw(st.none() | DESCRIPTIONS),
        expected_draft=None if is_draft else draw(st.none() | DRAFT_SIZES),
        protocol_version=draw(UINT32),
        is_debug=draw(st.booleans()),
    )


REGIONS = st.builds(
    OfferedRegion, epoch=UINT64, attachment=NUMBERS, own=manifests(), given=manifests(), draft=DRAFT_SIZES
)


@pytest.mark.parametrize(
    ("values", "message", "to_pb", "from_pb"),
    [
        (REGIONS, pb.AttachDraftRequest, region_to_pb, region_from_pb),
        (COMMANDS, pb.StepCommand, command_to_pb, command_from_pb),
        (DESCRIPTIONS, pb.DescribeResponse, description_to_pb, description_from_pb),
        (manifests(), pb.Manifest, Manifest.to_pb, Manifest.from_pb),
        (attachments(), pb.AttachRequest, attachment_to_pb, attachment_from_pb),
    ],
    ids=["regions", "commands", "descriptions", "manifests", "attachments"],
)
@given(data=st.data())
def test_values_come_out_as_they_went_in(
    values: st.SearchStrategy[Any], message: Any, to_pb: Any, from_pb: Any, data: st.DataObject
) -> None:
    value = data.draw(values)
    assert from_pb(message.FromString(to_pb(value).SerializeToString())) == value


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
    message = Manifest("file", "p", 64, (), words).to_pb()
    message.fences[0].fence = 0  # type: ignore[assignment]
    with pytest.raises(ManifestError, match="fence 0"):
        Manifest.from_pb(message)


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
