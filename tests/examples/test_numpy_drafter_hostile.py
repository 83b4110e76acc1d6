"""The NumPy drafter and a scheduler that means no good: it refuses, stays within its own rows, and lives on."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.device.cpu.device import FENCE_KIND
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.manifest import FenceWord, Manifest, Placed
from slipstream.common.wire.step import FenceName, Role
from slipstream.common.wire.worker import Attachment, attachment_to_pb, description_from_pb
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from tests.harness.checkpoints import VOCAB_SIZE, write_json, write_tokenizer
from tests.harness.example_drafters import NUMPY_DRAFTER
from tests.harness.hosted import FUZZ, REFUSALS, TIMEOUT_S, GuardedMemory, error_of, send_bytes
from tests.harness.hostile_messages import change
from tests.harness.workers import SHAPE
from tests.services.worker.test_hostile_commands import hostile_commands

pytestmark = pytest.mark.timeout(120)


class Drafter:
    """The process, and a scheduler's words to it."""

    def __init__(self, channel: Any, process: subprocess.Popen[bytes]) -> None:
        self.channel: Any = channel
        self.stub: Any = pb_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        self.process = process
        self._epochs = itertools.count(1)

    def attach_request(self, memory: GuardedMemory) -> pb.AttachRequest:
        """Makes an attach request of a newer epoch than any before."""
        own = self.stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)
        request = attachment_to_pb(
            Attachment(
                epoch=max(own.last_epoch + 1, next(self._epochs)),
                manifest=memory.own.manifest,
                given=memory.given.manifest,
                shape=SHAPE,
                page_tokens=16,
                num_pages=9,
                slot_pages=5,
                context_tokens=64,
                peer=description_from_pb(own),
            )
        )
        request.peer.role = Role.VERIFY.value
        return request

    def check_it_works(self) -> None:
        """It lives, can be attached, and drafts."""
        with guarded() as memory:
            request = self.attach_request(memory)
            self.stub.Attach(request, timeout=TIMEOUT_S)
            command = command_of(request.epoch)
            command.acknowledge = True
            memory.allow_step(command)
            assert [ack.step for ack in self.stub.Execute(iter([command]), timeout=TIMEOUT_S)] == [1]
        assert self.process.poll() is None


def command_of(epoch: int) -> pb.StepCommand:
    """Step 1, in which a slot decodes."""
    proposed = pb.FencePoint(fence=pb.FENCE_DRAFT_PROPOSED, value=1)
    return pb.StepCommand(epoch=epoch, step=1, slots=[1], num_draft_tokens=[2], signals=[proposed])


@contextmanager
def guarded(seed: int = 0) -> Iterator[GuardedMemory]:
    """Memory; at the end, nothing has changed that may not."""
    memory = GuardedMemory(SHAPE, seed=seed, is_draft=True)
    try:
        yield memory
        assert memory.changed() == []
    finally:
        memory.close()


def used_of(manifest: pb.Manifest) -> Manifest:
    """The parts of a manifest that a drafter uses: the buffers that it writes, and the fences."""
    written = (BufferName.DRAFT_TOKENS, BufferName.NUM_PROPOSED, BufferName.DRAFT_STAMPS)
    specs = {spec.name: spec for spec in SHAPE.own_specs()}
    first = {buffer.name: buffer.offset for buffer in reversed(manifest.buffers)}
    buffers = tuple(Placed(specs[name], first[name]) for name in written)
    words = {word.fence: word.offset for word in reversed(manifest.fences)}
    fences = tuple(FenceWord(name, FENCE_KIND, words[name]) for name in FenceName if name in words)
    return Manifest(manifest.kind, manifest.path, manifest.size, buffers, fences)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    """One for all tests: it must live through them."""
    folder = tmp_path_factory.mktemp("drafter")
    write_tokenizer(folder)
    write_json(folder / "config.json", {"vocab_size": VOCAB_SIZE})
    address = f"unix:{folder}/draft.sock"
    process = subprocess.Popen([sys.executable, str(NUMPY_DRAFTER), "--tokenizer", str(folder), "--listen", address])
    with grpc.insecure_channel(address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        drafter = Drafter(channel, process)
        drafter.check_it_works()  # from now on it has had an epoch, and says so
        yield drafter
    process.terminate()
    assert process.wait(timeout=20) == 0


def test_commands_touch_no_more_than_their_slots(drafter: Drafter) -> None:
    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        made = data.draw(hostile_commands(True))
        with guarded(data.draw(st.integers(0, 2**16))) as memory:
            request = drafter.attach_request(memory)
            for message in made:
                message.epoch = request.epoch if message.epoch == 1 else message.epoch
                valid = pb.StepCommand(step=message.step)
                valid.slots.extend(slot for slot in message.slots if slot < SHAPE.num_slots)
                memory.allow_step(valid)
            drafter.stub.Attach(request, timeout=TIMEOUT_S)
            error_of(lambda: list(drafter.stub.Execute(iter(made), timeout=TIMEOUT_S)))
        assert drafter.process.poll() is None

    fuzz()
    drafter.check_it_works()


def test_attachments_are_refused_or_stay_within_what_they_say(drafter: Drafter) -> None:
    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        with guarded() as memory:
            request = drafter.attach_request(memory)
            epoch = request.epoch
            for _ in range(data.draw(st.integers(1, 3))):
                change(data.draw, request)
            request.epoch = min(request.epoch, epoch)  # it takes each once, and none below it afterwards
            if error_of(lambda: drafter.stub.Attach(request, timeout=TIMEOUT_S)) is None:
                memory.own.relay(used_of(request.manifest))
                command = command_of(epoch)
                memory.allow_step(command)
                error_of(lambda: list(drafter.stub.Execute(iter([command]), timeout=TIMEOUT_S)))
        assert drafter.process.poll() is None

    fuzz()
    drafter.check_it_works()


def test_bytes_that_are_no_message_or_nearly_one(drafter: Drafter) -> None:
    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        is_message, error = send_bytes(data, drafter.channel)
        if is_message and error is not None:
            # No drafter need serve what is for verify alone.
            assert error.code() in (*REFUSALS, grpc.StatusCode.UNIMPLEMENTED), f"{error.code()}: {error.details()}"
        assert drafter.process.poll() is None

    fuzz()
    drafter.check_it_works()


def test_an_arena_of_no_bytes(drafter: Drafter) -> None:
    with guarded() as memory:
        empty = memory.own.path.with_name(memory.own.path.name + "-empty")
        empty.touch()
        request = drafter.attach_request(memory)
        request.manifest.path, request.manifest.size = str(empty), 0
        try:
            assert "0 bytes" in str(error_of(lambda: drafter.stub.Attach(request, timeout=TIMEOUT_S)))
        finally:
            empty.unlink()
