"""Rank 0's watch over the others: none that is gone or hangs is waited for."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from slipstream.common.errors import CheckpointError, OutOfMemoryError, UnavailableError
from slipstream.services.worker import crew as crew_module
from slipstream.services.worker import follower
from slipstream.services.worker.crew import Crew
from slipstream.services.worker.follower import Line

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    assert lost.get(timeout=5) == (2, "has ended")
    crew.tell({"do": "close"})
    assert others[0].recv(100) == b'{"do": "close"}\n', "a rank that is gone is nothing to the others"


def test_a_rank_that_ends_before_it_has_read_what_it_was_told_is_lost(
    ends: tuple[Crew, list[socket.socket]], lost: Lost
) -> None:
    crew, others = ends
    crew.tell({"do": "close"})
    others[1].close()
    assert lost.get(timeout=5) == (2, "has ended")


def test_a_rank_that_shows_no_sign_of_life_is_lost(
    ends: tuple[Crew, list[socket.socket]], lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its first sign it may take any time: it loads what shows them."""
    _, others = ends
    monkeypatch.setattr(crew_module, "HANG_TIMEOUT_S", 0.5)
    monkeypatch.setattr(follower, "SIGN_INTERVAL_S", 0.01)
    Line(others[0]).show_life()
    Line(others[1]).answer("")
    assert lost.get(timeout=5) == (2, "has shown no sign of life for 0.5 s")
    assert lost.empty()


def test_a_rank_that_ends_as_it_is_told_is_not_lost(ends: tuple[Crew, list[socket.socket]], lost: Lost) -> None:
    crew, others = ends
    crew.close()
    for other in others:
        assert not other.recv(1)
        other.close()
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join(5)
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


def test_an_answer_that_arrives_with_a_sign_of_life_does_not_wait_for_the_next_one(
    ends: tuple[Crew, list[socket.socket]],
) -> None:
    crew, others = ends
    for other in others:
        other.sendall(b'{"free": 0}\n{"free": 7, "error": "", "kind": ""}\n{"fr')
    answered = threading.Thread(target=crew.wait_until_loaded, daemon=True)
    answered.start()
    answered.join(5)
    assert (answered.is_alive(), crew.least_free) == (False, 7)
