"""Odd steps for every role: without slots, with both parts of a draft, with rows that are rubbish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.benchmarks.dummy_worker import make_dummy
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import (
    DRAFT_FENCES,
    FenceName,
    FenceOps,
    FencePoint,
    FenceWait,
    PrefillChunk,
    Role,
    SlotUpdate,
    StepCommand,
)
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from slipstream.services.worker.language_model import PagedSlots
from slipstream.services.worker.slots import SamplingMode
from tests.harness.checkpoints import write_checkpoint
from tests.harness.workers import SHAPE, LocalWorker, SharedArenas, attach, decode

CHUNK = PrefillChunk(slot=1, start=0, tokens=(5, 6, 7), is_last=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(params=["model", "dummy"])
def is_dummy(request: pytest.FixtureRequest) -> bool:
    """True for a dummy kernel in the model's place."""
    return bool(request.param == "dummy")


@pytest.fixture(params=[Role.DRAFT, Role.VERIFY])
def role(request: pytest.FixtureRequest, model: Path, is_dummy: bool) -> RoleEngine:
    """Verify and draft."""
    config, device = WorkerConfig(model=model), HostDevice()
    if is_dummy:
        return make_dummy(request.param, 0.0, config, device, 0)
    return (make_verify if request.param is Role.VERIFY else make_draft)(config, device, 0)


@pytest.fixture
def attached(role: RoleEngine) -> Iterator[tuple[LocalWorker, SharedArenas]]:
    """In epoch 1."""
    arena, worker = SharedArenas(), LocalWorker(role)
    attach(worker, arena)
    yield worker, arena
    worker.close()
    arena.close()
    assert worker.failures == []


def signalled(arena: SharedArenas, role: Role) -> set[int]:
    """The values of the fences that the role signals in a step that decodes."""
    own = [FenceName.DRAFT_PROPOSED] if role is Role.DRAFT else [FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH]
    return {arena.fence(name).poll() for name in own}


def prefill(step: int, *chunks: PrefillChunk, slots: tuple[int, ...] = (), role: Role) -> StepCommand:
    """A step that takes in chunks, and decodes `slots`."""
    command = replace(decode(step, *slots, role=role), chunks=chunks)
    if role is Role.VERIFY:
        return command
    prefilled = FencePoint(FenceName.DRAFT_PREFILLED, step)
    return replace(command, ops=FenceOps((), (*command.ops.signals[: bool(slots)], prefilled)))


@pytest.mark.parametrize("fence", DRAFT_FENCES)
def test_a_step_without_slots_is_signalled_all_the_same(
    attached: tuple[LocalWorker, SharedArenas], is_dummy: bool, fence: FenceName
) -> None:
    worker, arena = attached
    command = decode(1, role=worker.role)
    if worker.role is Role.DRAFT:
        fence = FenceName.DRAFT_PREFILLED if is_dummy else fence
        command = replace(command, ops=FenceOps((), (FencePoint(fence, 1),)))
    worker.send(command)
    worker.stream.synchronize(10.0)
    assert {arena.fence(point.fence).poll() for point in command.ops.signals} == {1}


def test_a_draft_does_both_parts_of_a_step(model: Path) -> None:
    """Each has its fence and its stamps, and only the decode part waits for the stash."""
    arena, worker = SharedArenas(), LocalWorker(make_draft(WorkerConfig(model=model), HostDevice(), 0))
    attach(worker, arena)
    update = SlotUpdate(slot=1, generation=1, pages=(1, 2), limit_tokens=30)
    worker.send(replace(prefill(1, CHUNK, role=Role.DRAFT), updates=(update,)))
    command = prefill(2, replace(CHUNK, slot=2), slots=(1,), role=Role.DRAFT)
    waits = (FenceWait(FenceName.VERIFY_STASH, 1),)
    updates = (replace(update, slot=2, pages=(3, 4)),)
    worker.send(replace(command, ops=FenceOps(waits, command.ops.signals), updates=updates))
    assert arena.fence(FenceName.DRAFT_PREFILLED).wait_on_host(1, 10.0)
    assert not arena.fence(FenceName.DRAFT_PREFILLED).wait_on_host(2, 0.05)
    for name, value in ((BufferName.SEQ_LENS, 3), (BufferName.NUM_NEW, 1), (BufferName.BONUS_TOKENS, 9)):
        arena.tensor(name)[1] = value
    arena.tensor(BufferName.LAST_TOKENS)[1] = 9
    arena.fence(FenceName.VERIFY_STASH).release(1)
    worker.stream.synchronize(10.0)
    assert {arena.fence(name).poll() for name in DRAFT_FENCES} == {2}
    assert arena.tensor(BufferName.NUM_PROPOSED).tolist() == [0, SHAPE.num_draft_tokens, 0, 0]
    (begun, ended), (begun_prefill, ended_prefill) = arena.tensor(BufferName.DRAFT_STAMPS)[2].tolist()
    assert 0 < begun <= ended <= begun_prefill <= ended_prefill
    worker.close()
    arena.close()


@pytest.mark.parametrize("given", [(2,), (3, 3)])
def test_rows_have_at_most_the_draft_tokens_of_the_attachment(
    attached: tuple[LocalWorker, SharedArenas], is_dummy: bool, given: tuple[int, ...]
) -> None:
    worker, arena = attached
    command = decode(1, 1, 3, role=worker.role)
    if not is_dummy:
        accepted = r"num_draft_tokens: got .*, accepted: for each of 2 slots 0 to 2"
        with pytest.raises(InvalidArgumentError, match=accepted):
            worker.send(replace(command, num_draft_tokens=given))
    worker.send(replace(command, num_draft_tokens=(0, 0)))
    worker.stream.synchronize(10.0)
    assert signalled(arena, worker.role) == {1}


@pytest.mark.parametrize("role_of", [make_verify, make_draft])
def test_adjusted_logits_are_sampled_before_there_are_requests(
    role_of: Callable[..., RoleEngine], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph does that, and a GPU compiles kernels when they are first used."""
    seen: set[int] = set()
    sample = PagedSlots.sample

    def watched(*arguments: Any, **others: Any) -> torch.Tensor:
        if SamplingMode.ADJUSTMENTS in arguments:
            seen.add(len(arguments[2]))
        return sample(*arguments, **others)

    monkeypatch.setattr(PagedSlots, "sample", watched)
    arena, worker = SharedArenas(), LocalWorker(role_of(WorkerConfig(model=model), HostDevice(), 0))
    attach(worker, arena)
    worker.close()
    arena.close()
    assert seen == {1, 2, 4}, "so many rows"


@pytest.mark.parametrize("rubbish", [-(2**63), -1, 2**31, 2**63 - 1])
def test_rubbish_in_the_arena_costs_no_more_than_the_step(
    attached: tuple[LocalWorker, SharedArenas], rubbish: int
) -> None:
    """Late, torn or hostile: whatever was read is in range before it is used."""
    worker, arena = attached
    update = SlotUpdate(slot=1, generation=1, pages=(1, 2, 3), limit_tokens=40)
    worker.send(replace(prefill(1, CHUNK, role=worker.role), updates=(update,)))
    worker.stream.synchronize(10.0)
    for name in ("seq_lens", "bonus_tokens", "num_new", "last_tokens", "draft_tokens"):
        arena.tensor(BufferName(name)).fill_(rubbish)
    worker.send(decode(2, 1, 3, role=worker.role))
    worker.stream.synchronize(10.0)
    assert signalled(arena, worker.role) == {2}
    if worker.role is Role.DRAFT:
        proposed = arena.tensor(BufferName.DRAFT_TOKENS)[torch.tensor([1, 3])]
        assert ((proposed >= 0) & (proposed < worker.describe().vocab_size)).all()
    else:
        row = 2 % SHAPE.ring
        accepted = arena.tensor(BufferName.NUM_ACCEPTED)[row]
        assert 0 <= int(accepted[1]) <= SHAPE.num_draft_tokens
        assert int(arena.tensor(BufferName.NEW_SEQ_LENS)[row][1]) <= 40 + SHAPE.num_draft_tokens + 1


def test_prompt_tokens_that_do_not_exist_are_refused(attached: tuple[LocalWorker, SharedArenas]) -> None:
    worker, arena = attached
    chunk = PrefillChunk(slot=1, start=0, tokens=(2**32 - 1, 0, 271), is_last=True)
    with pytest.raises(InvalidArgumentError, match=r"chunks\.tokens: got 4294967295, accepted: 0 to 271"):
        worker.send(prefill(1, chunk, role=worker.role))
    assert signalled(arena, worker.role) == {0}
