"""Epochs of an engine: one at a time, each newer than the last, and nothing left of it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from slipstream.common.device.cpu.device import HostArena, HostDevice
from slipstream.common.device.cpu.fence import HostFence, ReadOnlyFence
from slipstream.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ManifestError,
    MismatchError,
    OutOfMemoryError,
    StaleEpochError,
)
from slipstream.common.wire.events import EventLog, Site
from slipstream.common.wire.step import PROTOCOL_VERSION, Role, StepCommand, WaitPlace
from slipstream.common.wire.worker import Attachment
from slipstream.services.worker import epoch
from slipstream.services.worker.engine import Engine, Phase
from slipstream.services.worker.epoch import EpochState
from tests.harness.leaks import nothing_left
from tests.harness.recording_role import PROPOSED, STASH, Recorder, attached
from tests.harness.workers import LocalWorker, SharedArenas, attachment_to, decode, describe

pytestmark = pytest.mark.usefixtures("clean")


def test_only_one_is_open_and_only_newer_ones_are_taken(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        with pytest.raises(FailedPreconditionError, match="attached in epoch 1"):
            worker.attach(attachment_to(arena, 2))
        worker.engine.drain()
        with pytest.raises(FailedPreconditionError, match="not attached"):
            worker.send(decode(1, 1))
        with pytest.raises(StaleEpochError, match="epoch 1: this worker was attached to 1 before"):
            worker.attach(attachment_to(arena, 1))
        with pytest.raises(FailedPreconditionError, match="process 7 is meant, and this is process 1"):
            worker.attach(replace(attachment_to(arena, 2), pid=7))
        worker.attach(replace(attachment_to(arena, 2), pid=1))
        worker.send(decode(1, 1, epoch=2))
        worker.stream.synchronize(5.0)
        assert draft.done == ["1 DRAFT_PROPOSED"]


def test_the_answer_comes_when_the_device_has_warmed_up(draft: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    ended: list[str] = []

    def warm_up() -> None:
        may_end.wait()
        ended.append("the device")

    with attached(draft) as (worker, arena):
        worker.engine.drain()
        is_open = threading.Event()
        open_role = draft.open

        def open_and_warm_up(state: EpochState) -> None:
            open_role(state)
            worker.stream.enqueue(warm_up)
            is_open.set()

        monkeypatch.setattr(draft, "open", open_and_warm_up)

        def attach() -> None:
            worker.attach(attachment_to(arena, 2))
            ended.append("the answer")

        attaching = threading.Thread(target=attach)
        attaching.start()
        assert is_open.wait(60)
        may_end.set()
        attaching.join(60)
        assert ended == ["the device", "the answer"]


@pytest.mark.parametrize("name", ["SlotTable", "_classes"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [(torch.OutOfMemoryError, "CUDA out of memory"), (RuntimeError, "DefaultCPUAllocator: can't allocate memory")],
)
def test_too_little_memory_says_what_takes_it_and_leaves_nothing(
    name: str, kind: type[RuntimeError], words: str, draft: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind(f"{words}. Tried\nmore than there is")

    with attached(draft) as (worker, arena):
        worker.engine.drain()
        with monkeypatch.context() as patch:
            patch.setattr(epoch, name, fail)
            needed = r"draft ran out of memory: weights \d+ MiB, \d+ KV pages \d+ MiB, .* and the host has \d+ MiB\. "
            remedy = r"Less is needed with a smaller context_tokens, kv_memory_mib, .* \(.* memory. Tried\)$"
            with pytest.raises(OutOfMemoryError, match=needed + remedy):
                worker.attach(attachment_to(arena, 2))
        assert not draft.is_open
        worker.attach(attachment_to(arena, 3))


def test_drain_finishes_what_is_enqueued(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        for step in range(1, 6):
            worker.send(decode(step, 1))
        worker.engine.drain(1)
        assert len(draft.done) == 5
        assert arena.fence(PROPOSED).poll() == 5
        assert not draft.is_open
        worker.engine.drain(1)
        stalled_ns = worker.engine.log.stalled_ns
        assert {site for site in Site if stalled_ns[site]} == {Site.ATTACH, Site.DRAIN}


def test_a_late_end_of_an_older_epoch_changes_nothing(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        worker.engine.drain(1)
        worker.attach(attachment_to(arena, 2))
        worker.send(decode(1, 1, epoch=2, waits=1))
        worker.engine.abandon(1)
        worker.engine.drain(1)
        assert worker.engine.epoch == 2
        assert draft.done == []


def test_abandon_frees_a_stream_whose_signal_never_comes(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        for step in range(1, 4):
            worker.send(decode(step, 1, waits=10 + step))
        with pytest.raises(DeadlineExceededError):
            worker.stream.synchronize(0.02)
        worker.engine.abandon(1)
        assert len(draft.done) == 3
        assert worker.engine.epoch is None
        worker.attach(attachment_to(arena, 2))
        worker.send(decode(1, 1, epoch=2))
        worker.stream.synchronize(5.0)
        assert len(draft.done) == 4


def test_abandon_repeats_the_release_against_a_late_producer(draft: Recorder) -> None:
    with attached(draft) as (worker, arena):
        worker.send(decode(1, 1, waits=10))
        stop = threading.Event()

        def set_back() -> None:
            while not stop.wait(0.001):
                producer.enqueue(lambda: None)
                arena.fence(STASH).signal(producer, 3)

        producer = LocalWorker(Recorder()).stream
        late = threading.Thread(target=set_back)
        late.start()
        worker.engine.abandon(1)
        stop.set()
        late.join()
        producer.close()
        assert draft.done == ["1 DRAFT_PROPOSED"]


def test_a_stream_that_cannot_be_released_is_given_up(draft: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose fences are events cannot release them: the process has to end."""
    monkeypatch.setattr(epoch, "HOPELESS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(HostFence, "is_releasable", False)
    with attached(draft) as (worker, _):
        go_on = threading.Event()
        worker.stream.enqueue(lambda: go_on.wait() and None)
        worker.send(decode(1, 1, waits=1))
        worker.engine.abandon(1)
        assert worker.engine.epoch is None
        assert [type(failure) for failure in worker.failures] == [DeadlineExceededError]
        with pytest.raises(FailedPreconditionError, match="the stream is broken"):
            worker.send(decode(2, 1))
        go_on.set()
    assert draft.done == []


def test_nothing_is_freed_before_a_stream_that_cannot_be_released_is_reported(
    draft: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that would never return, so whoever is told ends the process."""

    class ProcessEnds(BaseException):
        pass

    told = []

    def end(engine: Engine, unmet: str) -> None:
        told.append((engine, engine.last_epoch, engine.last_step, unmet))
        raise ProcessEnds

    closed: list[HostArena] = []
    arena, worker = SharedArenas(), LocalWorker(draft)
    worker.engine = Engine(draft, HostDevice(), worker.stream, EventLog(), on_stuck=end)
    worker.attach(attachment_to(arena, 3))
    worker.send(decode(7, 1, epoch=3, waits=1))
    with monkeypatch.context() as patch:
        patch.setattr(epoch, "HOPELESS_TIMEOUT_S", 0.1)
        patch.setattr(HostFence, "is_releasable", False)
        patch.setattr(ReadOnlyFence, "release", lambda *_: None)
        patch.setattr(HostArena, "close", closed.append)
        with pytest.raises(ProcessEnds):
            worker.engine.abandon(3)
    assert told == [(worker.engine, 3, 7, "of attachment 3: VERIFY_STASH 1, which is 0")]
    assert closed == []
    assert draft.is_open
    assert worker.failures == []
    worker.close()
    arena.close()


class Broken(Recorder):
    """Its work fails."""

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        return [Phase(self._break, (PROPOSED,), WaitPlace.START)]

    def _break(self) -> None:
        raise ValueError("no such kernel")


def test_a_stream_that_breaks_when_it_is_released_ends_the_epoch_all_the_same() -> None:
    with attached(Broken()) as (worker, _):
        worker.send(decode(1, 1, waits=1))
        worker.engine.abandon(1)
        assert worker.engine.epoch is None
        assert [type(failure) for failure in worker.failures] == [ValueError]


def test_a_broken_stream_ends_at_once_and_takes_no_more() -> None:
    with attached(Broken()) as (worker, _):
        worker.send(decode(1, 1))
        with pytest.raises(ValueError, match="no such kernel"):
            worker.stream.synchronize(5.0)
        with pytest.raises(FailedPreconditionError, match="the stream is broken: ValueError"):
            worker.send(decode(2, 1))
        started = time.monotonic()
        worker.engine.abandon(1)
        assert time.monotonic() - started < 5.0
        assert worker.engine.epoch is None


def test_an_epoch_that_cannot_be_opened_leaves_nothing(draft: Recorder) -> None:
    arena, worker = SharedArenas(), LocalWorker(draft)
    draft.has_room = False
    with nothing_left(), pytest.raises(MemoryError):
        worker.attach(attachment_to(arena))
    assert worker.engine.epoch is None
    draft.has_room = True
    worker.attach(attachment_to(arena))
    worker.close()
    arena.close()


def test_a_manifest_without_a_fence_is_refused(draft: Recorder) -> None:
    arena, worker = SharedArenas(), LocalWorker(draft)
    with pytest.raises(ManifestError, match="no fence VERIFY_STASH"):
        worker.attach(attachment_to(arena, given=replace(arena.given.manifest, fences=())))
    worker.close()
    arena.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol_version": 9}, f"protocol version: scheduler has 9, this worker has {PROTOCOL_VERSION}"),
        ({"peer": describe(Role.VERIFY, vocab_size=0)}, "vocabulary size: verify has 0"),
        ({"peer": describe(Role.VERIFY, tokenizer_sha256="1")}, "tokenizer"),
        ({"peer": describe(Role.VERIFY, dtype="bfloat16")}, "dtype: draft has 'float32', verify has 'bfloat16'"),
        ({"peer": describe(Role.VERIFY, device="GPU-1")}, "device"),
    ],
)
def test_an_attachment_that_does_not_fit_is_refused_with_the_reason(
    draft: Recorder, changes: dict[str, object], message: str
) -> None:
    arena, worker = SharedArenas(), LocalWorker(draft)
    attachment: Attachment = attachment_to(arena, **changes)
    with pytest.raises(MismatchError, match=message):
        worker.attach(attachment)
    worker.close()
    arena.close()
