"""What draft and verify share: a command is checked before anything of it is enqueued, and epochs end cleanly."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from slipstream.common.access_log import JsonLinesAccessLog, StreamName
from slipstream.common.buffers import BufferName
from slipstream.common.device.host_fence import HostFence
from slipstream.common.errors import (
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ManifestError,
    MismatchError,
    StaleEpochError,
)
from slipstream.common.sampling import SamplingParams
from slipstream.common.step import (
    FenceName,
    FenceOps,
    FencePoint,
    PromptChunk,
    Role,
    SlotUpdate,
    StepCommand,
    StepKind,
)
from slipstream.common.worker_contract import PROTOCOL_VERSION
from slipstream.scheduler.ordering.replay import read_log
from slipstream.services import engine
from slipstream.services.engine import Phase
from tests.leaks import nothing_left
from tests.workers import SHAPE, LocalWorker, attachment_to, decode, describe, make_arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from slipstream.common.device.host_arena import HostArena
    from slipstream.common.worker_contract import Attachment, WorkerDescription
    from slipstream.services.engine import EpochState

PUBLISH, STASH, DONE = FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH, FenceName.DRAFT_DONE


class Recorder:
    """A role whose work is to say that it is done."""

    def __init__(self, role: Role = Role.DRAFT) -> None:
        self.done: list[str] = []
        self.has_room = True
        self.is_open = False
        self._description = describe(role)

    def describe(self) -> WorkerDescription:
        """See `RoleEngine.describe`."""
        return self._description

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        if not self.has_room:
            raise MemoryError("no room for the pages")
        self.is_open = True

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self.is_open = False

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        names = (PUBLISH, STASH) if self._description.role is Role.VERIFY else (DONE,)
        return [Phase(self._does(f"{command.step} {name.name}"), name) for name in names]

    def _does(self, what: str) -> Callable[[], None]:
        return lambda: self.done.append(what)


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every epoch here gives its memory back."""
    with nothing_left():
        yield
        # pytest would keep the arguments a little longer.
        request.node.funcargs.clear()


@contextmanager
def attached(role: Recorder, **changes: object) -> Iterator[tuple[LocalWorker, HostArena]]:
    """A worker in epoch 1."""
    arena = make_arena()
    worker = LocalWorker(role)
    worker.attach(attachment_to(arena, **changes))
    yield worker, arena
    worker.close()
    arena.close()


@pytest.fixture
def draft() -> Recorder:
    """A draft that records."""
    return Recorder()


class TestCommands:
    """Every command is refused as a whole or carried out as a whole."""

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
    def test_what_does_not_exist(
        self, draft: Recorder, command: StepCommand, error: type[Exception], message: str
    ) -> None:
        with attached(draft) as (worker, _):
            with pytest.raises(error, match=message):
                worker.send(command)
            worker.stream.synchronize(5.0)
            assert draft.done == []
            worker.send(decode(1, 1))
            worker.stream.synchronize(5.0)
            assert draft.done == ["1 DRAFT_DONE"]

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
    def test_updates_out_of_range(self, draft: Recorder, changes: dict[str, int], message: str) -> None:
        update = replace(SlotUpdate(slot=1, generation=1), **changes)
        with attached(draft) as (worker, _):
            with pytest.raises(InvalidArgumentError, match=message):
                worker.send(replace(decode(1, 1), updates=(update,)))
            worker.stream.synchronize(5.0)
            assert draft.done == []

    @pytest.mark.parametrize(
        ("chunks", "message"),
        [
            ((), "one for each of slots"),
            ((PromptChunk(slot=2, start=0, tokens=(1,), is_last=True),), "one for each of slots"),
            ((PromptChunk(slot=1, start=0, tokens=(), is_last=True),), "at least one token"),
            ((PromptChunk(slot=1, start=64, tokens=(1,), is_last=True),), r"chunks\.start: got 64, accepted: 0 to 63"),
            (
                (PromptChunk(slot=1, start=0, tokens=(1,) * 17, is_last=True),),
                r"chunks\.tokens: got 17, accepted: 0 to 16",
            ),
        ],
    )
    def test_chunks_that_do_not_fit(self, draft: Recorder, chunks: tuple[PromptChunk, ...], message: str) -> None:
        command = replace(decode(1, 1), kind=StepKind.PREFILL, chunks=chunks)
        with attached(draft) as (worker, _), pytest.raises(InvalidArgumentError, match=message):
            worker.send(command)

    def test_chunks_in_a_step_that_decodes(self, draft: Recorder) -> None:
        chunk = PromptChunk(slot=1, start=0, tokens=(1,), is_last=True)
        with attached(draft) as (worker, _), pytest.raises(InvalidArgumentError, match="none in other steps"):
            worker.send(replace(decode(1, 1), chunks=(chunk,)))

    def test_a_fence_of_the_other_worker(self, draft: Recorder) -> None:
        with attached(draft) as (worker, arena):
            with pytest.raises(InvalidArgumentError, match="signals: got 'VERIFY_STASH', accepted: DRAFT_DONE"):
                worker.send(replace(decode(1, 1), ops=FenceOps((), (FencePoint(STASH, 1),))))
            assert arena.fence(STASH).poll() == 0

    def test_a_draft_where_nothing_drafts(self) -> None:
        shape = replace(SHAPE, num_draft_tokens=0)
        arena, worker = make_arena(shape), LocalWorker(Recorder(Role.VERIFY))
        worker.attach(attachment_to(arena, shape=shape))
        with pytest.raises(InvalidArgumentError, match="kind: got 'DECODE'"):
            worker.send(decode(1, 1, role=Role.VERIFY))
        drafter = LocalWorker(Recorder())
        with pytest.raises(ConfigError, match=r"attach\.num_draft_tokens: got 0"):
            drafter.attach(attachment_to(arena, shape=shape))
        for one in (worker, drafter):
            one.close()
        arena.close()

    def test_steps_grow(self, draft: Recorder) -> None:
        with attached(draft) as (worker, _):
            worker.send(decode(3, 1))
            for step in (3, 2):
                with pytest.raises(InvalidArgumentError, match=f"step: got {step}, accepted: above 3"):
                    worker.send(decode(step, 1))
            worker.send(decode(7, 1))
            worker.stream.synchronize(5.0)
            assert draft.done == ["3 DRAFT_DONE", "7 DRAFT_DONE"]


class TestOrder:
    """Waits, stamps, work and signals are enqueued in their places."""

    def test_waits_come_first_and_every_signal_behind_its_phase(self, tmp_path: Path) -> None:
        role, arena = Recorder(Role.VERIFY), make_arena()
        log = JsonLinesAccessLog(tmp_path / "verify.jsonl", StreamName.VERIFY)
        worker = LocalWorker(role, log)
        worker.attach(attachment_to(arena))
        worker.send(decode(1, 1, role=Role.VERIFY, waits=1))
        with pytest.raises(DeadlineExceededError):
            worker.stream.synchronize(0.02)
        assert role.done == []
        arena.fence(DONE).release(1)
        worker.stream.synchronize(5.0)
        worker.close()
        log.close()
        lines = [(line.op.value, (line.fence or line.buffer or line.op).name) for line in read_log(log_path(tmp_path))]
        assert lines == [
            ("recv", "RECV"),
            ("wait", "DRAFT_DONE"),
            ("signal", "VERIFY_PUBLISH"),
            ("write", "VERIFY_STAMPS"),
            ("signal", "VERIFY_STASH"),
        ]
        assert role.done == ["1 VERIFY_PUBLISH", "1 VERIFY_STASH"]
        assert [arena.fence(name).poll() for name in (DONE, PUBLISH, STASH)] == [1, 1, 1]
        arena.close()

    def test_the_stamps_do_not_count_the_wait(self, draft: Recorder) -> None:
        with attached(draft) as (worker, arena):
            worker.send(decode(2, 1, waits=1))
            with pytest.raises(DeadlineExceededError):
                worker.stream.synchronize(0.02)
            released_ns = time.monotonic_ns()
            arena.fence(STASH).release(1)
            worker.stream.synchronize(5.0)
            start_ns, end_ns = arena.tensor(BufferName.DRAFT_STAMPS)[2].tolist()
            assert released_ns <= start_ns <= end_ns <= time.monotonic_ns()

    def test_updates_are_taken_over_in_the_order_of_the_stream(self) -> None:
        """A step that is enqueued earlier still finds the pages that it came with."""
        seen: list[tuple[int, list[int], int]] = []

        class Reader(Recorder):
            def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
                def look() -> None:
                    pages = state.slots.page_table[1].tolist()
                    seen.append((command.step, pages, int(state.slots.limits[1])))

                return [Phase(look, DONE)]

        with attached(Reader()) as (worker, arena):
            first = SlotUpdate(slot=1, generation=1, pages=(3, 4), limit_tokens=20, sampling=SamplingParams())
            more = SlotUpdate(slot=1, generation=1, first_page_index=2, pages=(5,), limit_tokens=30)
            other = SlotUpdate(slot=1, generation=2, pages=(7,), limit_tokens=9)
            worker.send(replace(decode(1, 1, waits=1), updates=(first,)))
            worker.send(replace(decode(2, 1), updates=(more,)))
            worker.send(replace(decode(3, 1), updates=(other,)))
            arena.fence(STASH).release(1)
            worker.stream.synchronize(5.0)
        assert seen == [(1, [3, 4, 0, 0, 0], 20), (2, [3, 4, 5, 0, 0], 30), (3, [7, 0, 0, 0, 0], 9)]


class TestEpochs:
    """One at a time, each newer than the last, and nothing left of it."""

    def test_only_one_is_open_and_only_newer_ones_are_taken(self, draft: Recorder) -> None:
        with attached(draft) as (worker, arena):
            with pytest.raises(FailedPreconditionError, match="attached in epoch 1"):
                worker.attach(attachment_to(arena, 2))
            worker.engine.drain()
            with pytest.raises(FailedPreconditionError, match="not attached"):
                worker.send(decode(1, 1))
            with pytest.raises(StaleEpochError, match="epoch 1: this worker was attached to 1 before"):
                worker.attach(attachment_to(arena, 1))
            worker.attach(attachment_to(arena, 2))
            worker.send(decode(1, 1, epoch=2))
            worker.stream.synchronize(5.0)
            assert draft.done == ["1 DRAFT_DONE"]

    def test_drain_finishes_what_is_enqueued(self, draft: Recorder) -> None:
        with attached(draft) as (worker, arena):
            for step in range(1, 6):
                worker.send(decode(step, 1))
            worker.engine.drain(1)
            assert len(draft.done) == 5
            assert arena.fence(DONE).poll() == 5
            assert not draft.is_open
            worker.engine.drain(1)

    def test_a_late_end_of_an_older_epoch_changes_nothing(self, draft: Recorder) -> None:
        with attached(draft) as (worker, arena):
            worker.engine.drain(1)
            worker.attach(attachment_to(arena, 2))
            worker.send(decode(1, 1, epoch=2, waits=1))
            worker.engine.abandon(1)
            worker.engine.drain(1)
            assert worker.engine.epoch == 2
            assert draft.done == []

    def test_abandon_frees_a_stream_that_nobody_will_ever_signal(self, draft: Recorder) -> None:
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

    def test_abandon_repeats_the_release_against_a_late_producer(self, draft: Recorder) -> None:
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
            assert draft.done == ["1 DRAFT_DONE"]

    def test_a_stream_that_nobody_can_release_is_given_up(
        self, draft: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU whose fences are events: the process has to end."""
        monkeypatch.setattr(engine, "HOPELESS_TIMEOUT_S", 0.1)
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

    def test_a_broken_stream_ends_at_once_and_takes_no_more(self, draft: Recorder) -> None:
        class Broken(Recorder):
            def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
                return [Phase(self._break, DONE)]

            def _break(self) -> None:
                raise ValueError("no such kernel")

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

    def test_an_epoch_that_cannot_be_opened_leaves_nothing(self, draft: Recorder) -> None:
        arena, worker = make_arena(), LocalWorker(draft)
        draft.has_room = False
        with nothing_left(), pytest.raises(MemoryError):
            worker.attach(attachment_to(arena))
        assert worker.engine.epoch is None
        draft.has_room = True
        worker.attach(attachment_to(arena))
        worker.close()
        arena.close()

    def test_a_manifest_without_a_fence_is_refused(self, draft: Recorder) -> None:
        arena, worker = make_arena(), LocalWorker(draft)
        manifest = replace(arena.manifest, fences=arena.manifest.fences[:2])
        with pytest.raises(ManifestError, match="no fence VERIFY_STASH"):
            worker.attach(attachment_to(arena, manifest=manifest))
        worker.close()
        arena.close()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"protocol_version": 9}, f"protocol version: scheduler has 9, this worker has {PROTOCOL_VERSION}"),
            ({"context_tokens": 513}, "context: scheduler has 513 tokens, this model was made for 512"),
            ({"peer": describe(Role.VERIFY, vocab_size=7)}, "vocabulary size: draft has 272, verify has 7"),
            ({"peer": describe(Role.VERIFY, tokenizer_sha256="1")}, "tokenizer"),
            ({"peer": describe(Role.VERIFY, dtype="bfloat16")}, "dtype: draft has 'float32', verify has 'bfloat16'"),
            ({"peer": describe(Role.VERIFY, device="GPU-1")}, "device"),
        ],
    )
    def test_what_does_not_fit_is_said(self, draft: Recorder, changes: dict[str, object], message: str) -> None:
        arena, worker = make_arena(), LocalWorker(draft)
        attachment: Attachment = attachment_to(arena, **changes)
        with pytest.raises(MismatchError, match=message):
            worker.attach(attachment)
        worker.close()
        arena.close()


def log_path(folder: Path) -> Path:
    """The only log there."""
    (path,) = folder.glob("*.jsonl")
    return path
