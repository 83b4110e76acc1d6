"""Hypothesis strategies of what scheduler and workers send each other, as plain data."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from slipstream.common.wire.layout import LENT_WEIGHTS, DraftShape, EpochShape
from slipstream.common.wire.manifest import DTYPES, HANDLE_BYTES, BufferSpec, Manifest, lay_out
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
    Attachment,
    DeviceMemory,
    DraftRegion,
    DraftSizes,
    WorkerDescription,
)

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
    DraftRegion, epoch=UINT64, attachment=NUMBERS, own=manifests(), given=manifests(), draft=DRAFT_SIZES
)
