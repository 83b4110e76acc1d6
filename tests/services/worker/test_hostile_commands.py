"""Whatever steps a scheduler sends: a worker refuses them or writes to their slots alone, and lives on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import (
    FenceName,
    FenceOps,
    FencePoint,
    FenceWait,
    PrefillChunk,
    SlotUpdate,
    StepCommand,
    WaitPlace,
)
from slipstream.common.wire.worker import command_to_pb
from slipstream.protos import worker_pb2 as pb
from tests.harness.checkpoints import VOCAB_SIZE
from tests.harness.hosted import (
    ATTACHMENT,
    CONTEXT_TOKENS,
    FUZZ,
    NUM_PAGES,
    TIMEOUT_S,
    Hosted,
    decode,
    error_of,
    no_arena_left,
)
from tests.harness.hostile_messages import change
from tests.harness.served_worker import kv_cache

pytestmark = pytest.mark.timeout(120)

CANARY = 3.0

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 2.0**-16, 100.0]),
    top_k=st.sampled_from([0, 1, 40, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.9, 2.0**-100]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.sampled_from([0, 2**64 - 1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 2.0**-16]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    presence_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    logit_bias=st.sampled_from([(), ((0, 100.0), (VOCAB_SIZE - 1, -100.0))]),
    masked_before=st.sampled_from([0, 5, 2**31 - 1]),
    masked_token_ids=st.sampled_from([(), (3,), tuple(range(256))]),
)


@st.composite
def updates(draw: st.DrawFn, slot: int) -> SlotUpdate:
    """A request takes a slot, or gets more pages."""
    pages = draw(st.lists(st.integers(1, NUM_PAGES - 1), max_size=4))
    return SlotUpdate(
        slot=slot,
        generation=draw(st.integers(0, 3)),
        first_page_index=draw(st.sampled_from([0, 0, 4, 12])),
        pages=tuple(pages),
        limit_tokens=draw(st.sampled_from([0, 1, 15, 16, 63, 64])),
        sampling=draw(st.none() | SAMPLINGS),
        max_draft_tokens=draw(st.none() | st.integers(0, 2)),
        history_from=draw(st.sampled_from([0, 0, 1, 40, 64])),
        has_cache_salt=draw(st.booleans()),
    )


@st.composite
def chunks(draw: st.DrawFn, slot: int) -> PrefillChunk:
    """A part of a prompt, wherever."""
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1) | st.just(2**32 - 1), min_size=1, max_size=3))
    start = draw(st.sampled_from([0, 0, 3, 17, CONTEXT_TOKENS - len(tokens)]))
    return PrefillChunk(slot=slot, start=start, tokens=tuple(tokens), is_last=draw(st.booleans()))


@st.composite
def commands(draw: st.DrawFn, step: int, is_draft: bool) -> StepCommand:
    """Steps that are right in form, whatever they mean."""
    slots = tuple(draw(st.permutations((1, 2, 3))))[: draw(st.integers(0, 2))]
    # The last of the slots take in prompts.
    num_decoding = draw(st.integers(0, len(slots)))
    width = draw(st.sampled_from([0, 2]))
    fences, places = st.sampled_from(FenceName), st.sampled_from(WaitPlace)
    waits = draw(st.lists(st.builds(FenceWait, fences, st.integers(0, 2**64 - 1), places), max_size=1))
    plain = decode(step, is_draft)
    signals = plain.ops.signals
    if is_draft and num_decoding < len(slots):
        signals = (*signals[: bool(num_decoding)], FencePoint(FenceName.DRAFT_PREFILLED, step))
    return replace(
        plain,
        slots=slots[:num_decoding],
        num_draft_tokens=(width,) * num_decoding,
        ops=FenceOps(tuple(waits), signals),
        chunks=tuple(draw(chunks(slot)) for slot in slots[num_decoding:]),
        updates=tuple(draw(updates(slot)) for slot in slots if draw(st.booleans())),
        top_logprobs=draw(st.none() | st.integers(0, 20)),
    )


@st.composite
def hostile_commands(draw: st.DrawFn, is_draft: bool) -> list[pb.StepCommand]:
    """A few of them, some changed in a way that makes no sense, or makes another one."""
    made = [command_to_pb(draw(commands(step, is_draft))) for step in range(1, draw(st.integers(2, 6)))]
    for message in draw(st.lists(st.sampled_from(made), max_size=2)):
        change(draw, message)
    return made


def test_commands_touch_no_more_than_their_slots(hosted: Hosted) -> None:
    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        run_commands(hosted, data)

    with no_arena_left():
        fuzz()
        hosted.check_it_works()


def run_commands(hosted: Hosted, data: st.DataObject) -> None:
    """One example."""
    made = data.draw(hostile_commands(hosted.is_draft))
    with hosted.memory(data.draw(st.integers(0, 2**16))) as memory:
        request = hosted.attach_request(memory)
        attachment = hosted.attach(memory, request)
        for message in made:
            # Where it was changed, it stays what it is.
            message.epoch = request.epoch if message.epoch == 1 else message.epoch
            message.attachment = attachment if message.attachment == ATTACHMENT else message.attachment
        caches = kv_cache(hosted.role).rows
        hosted.worker.on_device_thread(lambda: [cache.fill_(CANARY) for cache in caches] and None)
        accepted = 0

        def execute() -> None:
            nonlocal accepted
            for _ in hosted.worker.stub.Execute(iter(made), timeout=TIMEOUT_S):
                accepted += 1

        error = error_of(execute)
        assert error is not None or accepted == sum(message.acknowledge for message in made)
        hosted.worker.until_free()
        assert hosted.worker.failures == []
        # All but the refused one and what came after it; without an acknowledgement, any of them may have run.
        ran = made[:accepted] if all(message.acknowledge for message in made) else made
        for message in ran:
            memory.allow_step(message)
        own = {0, *(page for message in ran for update in message.updates for page in update.pages)}
        others = [page for page in range(NUM_PAGES) if page not in own]
        for cache in caches:
            pages = cache.view(NUM_PAGES, -1)
            assert bool((pages[others] == CANARY).all()), "a page that no slot has"
    assert hosted.worker.failures == []
