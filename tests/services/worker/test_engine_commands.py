"""Commands to an engine: every one is refused as a whole or carried out as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import (
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    MismatchError,
    StaleEpochError,
)
from slipstream.common.wire.layout import RESULT_FENCES
from slipstream.common.wire.step import (
    FenceOps,
    FencePoint,
    FenceWait,
    PrefillChunk,
    Role,
    SlotUpdate,
    StepCommand,
    WaitPlace,
)
from tests.harness.recording_role import PROPOSED, STASH, Recorder, attached
from tests.harness.workers import SHAPE, LocalWorker, SharedArenas, attachment_to, decode, epoch_shape

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (decode(1, 1, epoch=2), StaleEpochError, "epoch 2: attached in epoch 1"),
        (decode(0, 1), InvalidArgumentError, "step: got 0, accepted: above 0"),
        (decode(1, 0), InvalidArgumentError, "slots: got 0, accepted: 1 to 3"),
        (decode(1, 4), InvalidArgumentError, "slots: got 4, accepted: 1 to 3"),
        (decode(1, 2, 2), InvalidArgumentError, "each slot once"),
    ],
)
def test_what_does_not_exist(draft: Recorder, command: StepCommand, error: type[Exception], message: str) -> None:
    with attached(draft) as (worker, _):
        with pytest.raises(error, match=message):
            worker.send(command)
        worker.stream.synchronize(5.0)
        assert draft.done == []
        worker.send(decode(1, 1))
        worker.stream.synchronize(5.0)
        assert draft.done == ["1 DRAFT_PROPOSED"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": (0,)}, r"updates\.pages: got 0, accepted: 1 to 8"),
        ({"pages": (9,)}, r"updates\.pages: got 9"),
        ({"pages": (1,) * 6}, r"updates\.first_page_index"),
        ({"first_page_index": 5, "pages": (1,)}, r"updates\.first_page_index: got 5, accepted: 0 to 4"),
        ({"first_page_index": 6}, r"updates\.first_page_index"),
        ({"limit_tokens": 65}, r"updates\.limit_tokens: got 65, accepted: 0 to 64"),
        ({"slot": 0}, r"updates\.slot"),
        ({"slot": 4}, r"updates\.slot"),
    ],
)
def test_updates_out_of_range(draft: Recorder, changes: dict[str, int], message: str) -> None:
    update = replace(SlotUpdate(slot=1, generation=1), **changes)
    with attached(draft) as (worker, _):
        with pytest.raises(InvalidArgumentError, match=message):
            worker.send(replace(decode(1, 1), updates=(update,)))
        worker.stream.synchronize(5.0)
        assert draft.done == []


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((PrefillChunk(slot=0, start=0, tokens=(1,), is_last=True),), r"chunks\.slot: got 0, accepted: 1 to 3"),
        ((PrefillChunk(slot=1, start=0, tokens=(1,), is_last=True),) * 2, "each slot once"),
        ((PrefillChunk(slot=1, start=0, tokens=(), is_last=True),), "at least one token"),
        ((PrefillChunk(slot=1, start=64, tokens=(1,), is_last=True),), r"chunks\.start: got 64, accepted: 0 to 63"),
        (
            (PrefillChunk(slot=1, start=0, tokens=(1,) * 17, is_last=True),),
            r"chunks\.tokens: got 17, accepted: 0 to 16",
        ),
    ],
)
def test_chunks_that_do_not_fit(draft: Recorder, chunks: tuple[PrefillChunk, ...], message: str) -> None:
    command = replace(decode(1), chunks=chunks)
    with attached(draft) as (worker, _), pytest.raises(InvalidArgumentError, match=message):
        worker.send(command)


def test_chunks_in_a_step_that_decodes(draft: Recorder) -> None:
    chunk = PrefillChunk(slot=1, start=0, tokens=(1,), is_last=True)
    with attached(draft) as (worker, _), pytest.raises(InvalidArgumentError, match="none of those that decode"):
        worker.send(replace(decode(1, 1), chunks=(chunk,)))


def test_a_fence_of_the_other_worker(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        with pytest.raises(InvalidArgumentError, match="signals: got 'VERIFY_STASH', accepted: DRAFT_PROPOSED"):
            worker.send(replace(decode(1, 1), ops=FenceOps((), (FencePoint(STASH, 1),))))
        assert arena.fence(STASH).poll() == 0
        with pytest.raises(InvalidArgumentError, match="waits: got 'DRAFT_PROPOSED', accepted: a fence that"):
            worker.send(replace(decode(1, 1), ops=FenceOps((FenceWait(PROPOSED, 1),), ())))


def test_a_wait_at_a_place_that_the_step_does_not_have(draft: Recorder) -> None:
    ops = FenceOps((FenceWait(STASH, 1, WaitPlace.PREFILL_HIDDEN),), ())
    with attached(draft) as (worker, _):
        with pytest.raises(InvalidArgumentError, match=r"waits\.place: got 'PREFILL_HIDDEN', accepted: .*: START"):
            worker.send(replace(decode(1, 1), ops=ops))
        worker.stream.synchronize(5.0)
        assert draft.done == []


def test_a_draft_where_nothing_drafts() -> None:
    shape = epoch_shape(SHAPE, 0)
    arenas, worker = SharedArenas(), LocalWorker(Recorder(Role.VERIFY))
    results = HostDevice().create_arena(shape.specs(), RESULT_FENCES)
    worker.attach(attachment_to(arenas, role=Role.VERIFY, manifest=results.manifest, shape=shape))
    with pytest.raises(MismatchError, match="draft has 2, this epoch has room for 1 to 0"):
        worker.attach_region(arenas.region())
    with pytest.raises(FailedPreconditionError, match="attachment 100 is not there"):
        worker.send(decode(1, 1, role=Role.VERIFY))
    with pytest.raises(ConfigError, match=r"attach\.num_draft_tokens: got 0"):
        attachment_to(arenas, shape=replace(SHAPE, num_draft_tokens=0))
    worker.close()
    results.close()
    arenas.close()


def test_steps_grow(draft: Recorder) -> None:
    with attached(draft) as (worker, _):
        worker.send(decode(3, 1))
        for step in (3, 2):
            with pytest.raises(InvalidArgumentError, match=f"step: got {step}, accepted: above 3"):
                worker.send(decode(step, 1))
        worker.send(decode(7, 1))
        worker.stream.synchronize(5.0)
        assert draft.done == ["3 DRAFT_PROPOSED", "7 DRAFT_PROPOSED"]
