"""When a draft is attached again."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from slipstream.scheduler import draft_session
from slipstream.scheduler.draft_session import Retries
from slipstream.scheduler.records import LossCause


class Clocked:
    """Retries by a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.retries = Retries()
        monkeypatch.setattr(draft_session, "time", SimpleNamespace(monotonic=lambda: self.now))

    def lost(self, cause: LossCause, after_s: float) -> float:
        """The time to the next try, for a draft that took part for so long."""
        self.retries.joined()
        self.retries.left(cause, self.now - after_s)
        return round(self.retries.due - self.now, 6)


def test_a_draft_that_is_lost_at_once_again_and_again_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    waits = [clocked.lost(LossCause.TIMEOUT, 0.1) for _ in range(11)]
    assert waits[:4] == [0.2, 0.4, 0.8, 1.6]
    assert waits[-2:] == [60.0, 60.0]
    assert clocked.lost(LossCause.DIED, 0.1) == clocked.lost(LossCause.REFUSED, -math.inf) == 5.0
    assert clocked.lost(LossCause.TIMEOUT, 10.5) == 0.2, "it was steady before"
    assert clocked.lost(LossCause.LEFT, 0.1) == 0.2


def test_tries_that_fail_are_made_less_and_less_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    for wait in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        clocked.retries.failed()
        assert round(clocked.retries.due - clocked.now, 6) == wait
    assert clocked.lost(LossCause.DIED, 0.1) == 0.2
    clocked.retries.failed()
    assert round(clocked.retries.due - clocked.now, 6) == 0.2
