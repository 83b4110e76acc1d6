"""The NumPy drafter alone, told by a scheduler what a real one would not tell it."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import PROTOCOL_VERSION, FenceName
from slipstream.common.wire.worker import attachment_to_pb
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from tests.harness.checkpoints import VOCAB_SIZE, write_json, write_tokenizer
from tests.harness.example_drafters import NUMPY_DRAFTER
from tests.harness.workers import SHAPE, SharedArenas, attachment_to

EPOCHS = itertools.count(1)
"""The drafter takes each once."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A drafter of its own."""
    folder = tmp_path_factory.mktemp("drafter")
    write_tokenizer(folder)
    write_json(folder / "config.json", {"vocab_size": VOCAB_SIZE})
    address = f"unix:{folder}/draft.sock"
    process = subprocess.Popen([sys.executable, str(NUMPY_DRAFTER), "--tokenizer", str(folder), "--listen", address])
    yield address
    process.terminate()
    assert process.wait(timeout=20) == 0


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """To the drafter, which is ready."""
    async with grpc.aio.insecure_channel(address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        yield channel


@pytest.fixture
def arena() -> Iterator[SharedArenas]:
    """A scheduler's."""
    made = SharedArenas()
    yield made
    made.close()


async def attach(worker: pb_grpc.WorkerStub, arena: SharedArenas) -> int:
    """Begins an epoch, beside a verify service that fits; returns its number."""
    epoch = next(EPOCHS)
    request = attachment_to_pb(attachment_to(arena, epoch))
    request.peer.CopyFrom(await worker.Describe(pb.DescribeRequest()))
    await worker.Attach(request)
    return epoch


async def test_it_says_what_it_is_and_what_does_not_fit(channel: grpc.aio.Channel, arena: SharedArenas) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "slipstream.v1.Worker"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    worker = pb_grpc.WorkerStub(channel)
    description = await worker.Describe(pb.DescribeRequest())
    assert (description.role, description.vocab_size, description.kv_bytes_per_token) == ("draft", VOCAB_SIZE, 0)
    epoch = await attach(worker, arena)
    assert (await worker.Describe(pb.DescribeRequest())).last_epoch == epoch
    for changes, reason in (
        ({"protocol_version": 1}, "protocol version 1"),
        ({"epoch": epoch}, "was attached to"),
        ({"num_draft_tokens": 0}, "out of range"),
        ({"peer": pb.DescribeResponse(vocab_size=3)}, f"vocab_size: draft {VOCAB_SIZE}, verify 3"),
        ({"peer": description}, "arena"),
    ):
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "epoch": epoch + 1,
            "num_draft_tokens": 2,
            "num_slots": 2,
        } | changes
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as refusal:
            await worker.Attach(pb.AttachRequest(**fields))
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def decode(epoch: int, step: int, *slots: int, stash: int = 0, **fields: Any) -> pb.StepCommand:
    """A step with as many draft tokens for each slot as there may be. `stash`: the one that it waits for."""
    numbers = [SHAPE.num_draft_tokens] * len(slots)
    command = pb.StepCommand(epoch=epoch, step=step, slots=slots, num_draft_tokens=numbers, **fields)
    if stash:
        command.waits.add(fence=pb.FENCE_VERIFY_STASH, value=stash, place=pb.WAIT_PLACE_START)
    command.signals.add(fence=pb.FENCE_DRAFT_PROPOSED, value=step)
    return command


@pytest.mark.parametrize("catches_up", [False, True])
async def test_a_step_by_hand(channel: grpc.aio.Channel, arena: SharedArenas, catches_up: bool) -> None:
    """A prompt in two chunks, and a step after it: acknowledged at once, done when its wait is over."""
    worker = pb_grpc.WorkerStub(channel)
    epoch = await attach(worker, arena)
    stream = worker.Execute()
    for step, start, tokens in ((1, 0, [7, 8, 9, 4]), (2, 4, [7, 8])):
        command = pb.StepCommand(epoch=epoch, step=step, catches_up=catches_up)
        command.chunks.add(slot=2, start=start, tokens=tokens, is_last=start > 0)
        command.signals.add(fence=pb.FENCE_DRAFT_PREFILLED, value=step)
        await stream.write(command)
    await stream.write(decode(epoch, 3, 2, stash=2, acknowledge=True))
    assert (await stream.read()).step == 3
    proposed = arena.fence(FenceName.DRAFT_PROPOSED)
    assert arena.fence(FenceName.DRAFT_PREFILLED).wait_on_host(2, 10.0)
    assert not proposed.wait_on_host(3, 0.3)
    arena.tensor(BufferName.SEQ_LENS)[2], arena.tensor(BufferName.NUM_NEW)[2] = 6, 1
    arena.tensor(BufferName.LAST_TOKENS)[2, 0] = 9
    arena.fence(FenceName.VERIFY_STASH).release(2)
    assert proposed.wait_on_host(3, 10.0)
    assert arena.tensor(BufferName.DRAFT_TOKENS)[2].tolist() == [4, 7]
    assert arena.tensor(BufferName.NUM_PROPOSED)[2] == 2
    (start, end), _ = arena.tensor(BufferName.DRAFT_STAMPS)[3 % SHAPE.ring].tolist()
    assert 0 < start <= end
    await worker.Drain(pb.DrainRequest(epoch=epoch))
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_a_step_of_both_parts(channel: grpc.aio.Channel, arena: SharedArenas) -> None:
    """The decode part does not wait for what the prefill part waits for."""
    worker = pb_grpc.WorkerStub(channel)
    epoch = await attach(worker, arena)
    stream = worker.Execute()
    command = decode(epoch, 1, 2, acknowledge=True)
    command.chunks.add(slot=1, start=0, tokens=[3, 4, 3], is_last=True)
    command.waits.add(fence=pb.FENCE_VERIFY_STASH, value=1, place=pb.WAIT_PLACE_PREFILL_HIDDEN)
    command.signals.add(fence=pb.FENCE_DRAFT_PREFILLED, value=1)
    await stream.write(command)
    assert arena.fence(FenceName.DRAFT_PROPOSED).wait_on_host(1, 10.0)
    assert not arena.fence(FenceName.DRAFT_PREFILLED).wait_on_host(1, 0.3)
    arena.fence(FenceName.VERIFY_STASH).release(1)
    assert arena.fence(FenceName.DRAFT_PREFILLED).wait_on_host(1, 10.0)
    of_both = arena.tensor(BufferName.DRAFT_STAMPS)[1].flatten().tolist()
    assert of_both == sorted(of_both)
    assert of_both[0] > 0
    stream.cancel()
    await until_free(worker)


async def test_whatever_is_in_the_memory_it_goes_on(channel: grpc.aio.Channel, arena: SharedArenas) -> None:
    worker = pb_grpc.WorkerStub(channel)
    epoch = await attach(worker, arena)
    stream = worker.Execute()
    for step, value in enumerate((-1, 2**62, -(2**63), 2**63 - 1), start=1):
        for name in (BufferName.SEQ_LENS, BufferName.NUM_NEW, BufferName.LAST_TOKENS):
            arena.tensor(name).fill_(value)
        command = decode(epoch, step, 1, 3)
        command.updates.add(slot=3, sampling=pb.SlotSampling(temperature=1.0, top_p=0.9, seed=1))
        await stream.write(command)
        assert arena.fence(FenceName.DRAFT_PROPOSED).wait_on_host(step, 10.0)
        assert all(
            0 <= token < VOCAB_SIZE for token in arena.tensor(BufferName.DRAFT_TOKENS)[[1, 3]].flatten().tolist()
        )
    stream.cancel()
    await until_free(worker)


async def test_a_drafter_that_lost_its_scheduler_can_be_attached_anew(
    channel: grpc.aio.Channel, arena: SharedArenas
) -> None:
    """The scheduler goes while the drafter waits for a fence that nobody will signal."""
    worker = pb_grpc.WorkerStub(channel)
    for _ in range(2):
        epoch = await attach(worker, arena)
        stream = worker.Execute()
        await stream.write(decode(epoch, 1, 1, stash=7, acknowledge=True))
        assert (await stream.read()).step == 1
        with pytest.raises(grpc.aio.AioRpcError, match="another scheduler"):
            await attach(worker, arena)
        stream.cancel()
        await until_free(worker)
        assert arena.fence(FenceName.DRAFT_PROPOSED).poll() == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"epoch": 2**40}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"step": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"num_draft_tokens": [1]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"slots": [1], "num_draft_tokens": [3]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"slots": [4]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"chunks": [pb.PromptChunk(slot=0)]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"signals": [pb.FencePoint(fence=pb.FENCE_VERIFY_STASH, value=1)]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"waits": [pb.FenceWait(value=1)]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_command_that_makes_no_sense_ends_the_stream(
    channel: grpc.aio.Channel, arena: SharedArenas, changes: dict[str, Any], code: grpc.StatusCode
) -> None:
    worker = pb_grpc.WorkerStub(channel)
    epoch = await attach(worker, arena)
    stream = worker.Execute()
    await stream.write(pb.StepCommand(**{"epoch": epoch, "step": 1} | changes))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stream.read()
    assert refusal.value.code() is code
    await until_free(worker)


async def until_free(worker: pb_grpc.WorkerStub) -> None:
    """Returns when the end of a stream has reached the drafter."""
    for _ in range(1000):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await worker.Attach(pb.AttachRequest())
        if "another scheduler" not in refusal.value.details():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the stream is still there")
