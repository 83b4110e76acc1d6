"""Rank 0's watch over the others: none that is gone or hangs is waited for."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, cast

import pytest
import torch

from slipstream.common.errors import CheckpointError, ConfigError, OutOfMemoryError, UnavailableError
from slipstream.common.rpc.service_options import LogSettings
from slipstream.common.wire.events import Event, Site
from slipstream.common.wire.trace import TracedProcess
from slipstream.services.models.config import Rank
from slipstream.services.models.ranks import Ranks
from slipstream.services.worker import crew as crew_module
from slipstream.services.worker import follower
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.crew import Crew, started_crew
from slipstream.services.worker.follower import Follower, Line
from tests.harness.checkpoints import write_checkpoint
from tests.harness.waiting import block_until

Lost = SimpleQueue[tuple[int, str]]


@pytest.fixture
def lost() -> Lost:
    """Ranks, and what became of them."""
    return SimpleQueue()


@pytest.fixture
def ends(lost: Lost) -> Iterator[tuple[Crew, list[socket.socket]]]:
    """Rank 0's end, and those of two others."""
    pairs = [socket.socketpair() for _ in range(2)]
    made = Crew([own for own, _ in pairs], 0, lambda rank, what: lost.put((rank, what)))
    yield made, [theirs for _, theirs in pairs]
    made.close()
    for own, theirs in pairs:
        theirs.close()
        own.close()


def test_a_rank_that_ends_is_lost(ends: tuple[Crew, list[socket.socket]], lost: Lost) -> None:
    crew, others = ends
    assert len(crew) == 3
    others[1].close()
    assert lost.get(timeout=60) == (2, "has ended")
    crew.tell({"do": "close"})
    assert others[0].recv(100) == b'{"do": "close"}\n', "a rank that is gone is nothing to the others"


def test_a_rank_that_ends_before_it_has_read_what_it_was_told_is_lost(
    ends: tuple[Crew, list[socket.socket]], lost: Lost
) -> None:
    crew, others = ends
    crew.tell({"do": "close"})
    others[1].close()
    assert lost.get(timeout=60) == (2, "has ended")


def test_a_rank_that_shows_no_sign_of_life_is_lost(
    ends: tuple[Crew, list[socket.socket]], lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its first sign it may take any time: it loads what shows them."""
    _, others = ends
    monkeypatch.setattr(crew_module, "HANG_TIMEOUT_S", 0.1)
    Line(others[1]).answer("")
    assert lost.get(timeout=20) == (2, "has shown no sign of life for 0.1 s")
    assert lost.empty()


def test_a_rank_that_ends_as_it_is_told_is_not_lost(ends: tuple[Crew, list[socket.socket]], lost: Lost) -> None:
    crew, others = ends
    crew.close()
    for other in others:
        assert not other.recv(1)
        other.close()
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join(60)
    assert lost.empty()


@pytest.mark.parametrize("kind", [CheckpointError, OutOfMemoryError, UnavailableError])
def test_what_a_rank_cannot_load_is_said_by_rank_0(
    ends: tuple[Crew, list[socket.socket]], kind: type[Exception]
) -> None:
    crew, others = ends
    Line(others[0]).answer("")
    Line(others[1], lambda: 7).answer("no room for its part", kind=kind.__name__)
    with pytest.raises(kind, match="no room for its part"):
        crew.wait_until_loaded()
    assert crew.least_free == 7
    assert [(rank.rank, rank.is_loaded, rank.free_bytes) for rank in crew.reports()[1:]] == [
        (1, True, 0),
        (2, False, 7),
    ]


def test_an_answer_that_arrives_with_a_sign_of_life_does_not_wait_for_the_next_one(
    ends: tuple[Crew, list[socket.socket]],
) -> None:
    crew, others = ends
    for other in others:
        other.sendall(b'{"free": 0}\n{"free": 7, "error": "", "kind": ""}\n{"fr')
    answered = threading.Thread(target=crew.wait_until_loaded, daemon=True)
    answered.start()
    answered.join(60)
    assert (answered.is_alive(), crew.least_free) == (False, 7)


def test_a_rank_that_does_not_say_what_it_did_is_left_out_and_its_late_answer_is_of_no_other_question(
    ends: tuple[Crew, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    crew, others = ends
    monkeypatch.setattr(crew_module, "REPORT_TIMEOUT_S", 0.01)
    assert crew.read_records(1) == ()
    monkeypatch.setattr(crew_module, "REPORT_TIMEOUT_S", 60)
    files = [other.makefile("rw") for other in others]
    late = [json.loads(file.readline()) for file in files]
    found: list[tuple[TracedProcess, ...]] = []
    asking = threading.Thread(target=lambda: found.append(crew.read_records(8)), daemon=True)
    asking.start()
    for rank, (file, before) in enumerate(zip(files, late, strict=True), 1):
        now = json.loads(file.readline())
        assert (now["do"], now["from_step"]) == ("report", 8)
        for question, step in ((before, 1), (now, 8)):
            file.write(json.dumps({"number": question["number"], "records": [[Site.STREAM, step, 5, rank + 5]]}) + "\n")
            file.flush()
    asking.join(60)
    assert [(one.name, *one.records) for one in found[0]] == [
        ("rank 1", Event(Site.STREAM, 8, 5, 6)),
        ("rank 2", Event(Site.STREAM, 8, 5, 7)),
    ]
    for file in files:
        file.close()


class Held:
    """Does what a follower does: nothing until `computes` is set, then it computes until `may_end` is."""

    def __init__(self, line: Line) -> None:
        self.has_begun, self.computes, self.may_end = threading.Event(), threading.Event(), threading.Event()
        self.ranks = Unmet(Rank(1, 2), None)
        self._thread = threading.Thread(target=line.serve, args=(cast("Follower", self), self.ranks), daemon=True)
        self._thread.start()

    def do(self, message: dict[str, Any]) -> str:
        self.has_begun.set()
        self.computes.wait()
        while not self.may_end.is_set():
            pass
        return "done"

    def end(self, crew: Crew) -> None:
        self.computes.set()
        self.may_end.set()
        crew.close()
        self._thread.join()


class Unmet(Ranks):
    """A rank without others."""

    def _meet(self, store: None) -> None:
        """Meets nobody."""


def test_a_rank_lives_while_it_computes_or_waits_for_others_and_not_while_it_hangs(
    ends: tuple[Crew, list[socket.socket]],
) -> None:
    crew, others = ends
    line = Line(others[0])
    held = Held(line)
    assert line.is_alive(), "it has nothing to do"
    crew.tell({"do": "forward"})
    held.has_begun.wait()
    block_until(lambda: not line.is_alive())
    held.ranks.is_waiting = True
    assert line.is_alive()
    held.ranks.is_waiting = False
    held.computes.set()
    for _ in range(3):
        block_until(line.is_alive)
    held.end(crew)


def test_a_rank_whose_collective_fails_waits_for_nobody() -> None:
    ranks = Unmet(Rank(1, 2), None)
    with pytest.raises(AttributeError, match="broadcast"):  # it has no group
        ranks.broadcast(torch.zeros(1))
    assert not ranks.is_waiting


def test_a_rank_whose_thread_hangs_is_lost(
    ends: tuple[Crew, list[socket.socket]], lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "HANG_TIMEOUT_S", 0.5)
    monkeypatch.setattr(follower, "SIGN_INTERVAL_S", 0.01)
    crew, others = ends
    line = Line(others[0])
    held = Held(line)
    line.show_life()
    crew.tell({"do": "forward"})
    assert lost.get(timeout=20) == (1, "has shown no sign of life for 0.5 s")
    held.end(crew)


class Process(subprocess.Popen[bytes]):
    """A rank that does not end when it is hung up on."""

    started: ClassVar[list[Process]] = []
    waited_s: ClassVar[list[float]] = []
    most: ClassVar[int] = 8

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if len(self.started) == self.most:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        super().__init__(*arguments, **options)
        self.started.append(self)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            self.waited_s.append(timeout)
        return super().wait(timeout)


@pytest.fixture
def four_ranks(tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    """Settings of ranks that are `Process`es."""
    Process.started.clear()
    Process.waited_s.clear()
    monkeypatch.setattr(crew_module, "PROGRAM", (sys.executable, "-c", "import time; time.sleep(1000)"))
    monkeypatch.setattr(crew_module, "END_TIMEOUT_S", 0.2)
    monkeypatch.setattr(crew_module, "end_with_it", lambda rank, what: lost.put((rank, what)))
    monkeypatch.setattr(subprocess, "Popen", Process)
    model = write_checkpoint(tmp_path / "it", has_tokenizer=False)
    return WorkerConfig(model=model, tensor_parallel_size=4, device="cpu")


def test_ranks_that_do_not_end_are_waited_for_together(four_ranks: WorkerConfig, lost: Lost) -> None:
    with started_crew(four_ranks, LogSettings()) as crew:
        assert crew is not None
        assert len(crew) == 4
    assert [process.returncode for process in Process.started] == [-signal.SIGKILL] * 3
    assert len(Process.waited_s) == 3
    assert sum(Process.waited_s) <= 0.2
    assert lost.empty()


def test_no_rank_stays_if_another_one_cannot_be_started(
    four_ranks: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "most", 2)
    with pytest.raises(BlockingIOError), started_crew(four_ranks, LogSettings()):
        pass
    assert [process.returncode for process in Process.started] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("num_gpus", "size", "accepted"),
    [(2, 4, "at most 2, the GPUs that are visible here"), (8, 8, "a divisor of num_attention_heads = 4")],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_before_any_starts(
    four_ranks: WorkerConfig, monkeypatch: pytest.MonkeyPatch, num_gpus: int, size: int, accepted: str
) -> None:
    monkeypatch.setattr(crew_module, "cuda_obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = replace(four_ranks, device="auto", tensor_parallel_size=size)
    with (
        pytest.raises(ConfigError, match=f"^tensor_parallel_size: got {size}, accepted: {accepted}"),
        started_crew(config, LogSettings()),
    ):
        pass
    assert not Process.started
