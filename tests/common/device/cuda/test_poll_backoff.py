"""When the host looks again."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from slipstream.common.device.cuda import poll_backoff
from slipstream.common.device.cuda.poll_backoff import MAX_SLEEP_S, MIN_SLEEP_S, PollBackoff, wait_for_expected
from slipstream.common.device.interface import ANY_TIME, Look

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Stands still but for those who sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Moves on."""
        self.now += seconds
        self.sleeps.append(seconds)


def test_sleeps_grow_with_the_time_waited_and_end_at_the_deadline() -> None:
    clock = Clock()
    backoff = PollBackoff(lambda: clock.now, clock.sleep)
    while clock.now < 100.5:
        backoff.sleep(100.5)
    assert clock.now == 100.5
    assert clock.sleeps[:-1] == sorted(clock.sleeps[:-1])
    assert (clock.sleeps[0], clock.sleeps[-2]) == (MIN_SLEEP_S, MAX_SLEEP_S)
    backoff.sleep(100.4)
    assert clock.sleeps[-1] == 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of `wait_for_expected`."""
    clock = Clock()
    monkeypatch.setattr(poll_backoff, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    monkeypatch.setattr(poll_backoff, "sleep_precisely", clock.sleep)
    return clock


def at(clock: Clock, when: float) -> Callable[[], bool]:
    """Something that is done from then on."""
    return lambda: clock.now >= when


def test_nobody_looks_before_the_first_look(clock: Clock) -> None:
    assert wait_for_expected(at(clock, 100.04), 101.0, Look(100.05, usual_s=0.05))
    assert len(clock.sleeps) == 1
    assert clock.now == pytest.approx(100.05)


def test_the_longer_it_takes_the_less_often_one_looks(clock: Clock) -> None:
    for usual_s, most in ((0.0008, 0.00003), (0.05, 0.0012)):
        clock.sleeps.clear()
        begun = clock.now
        assert wait_for_expected(at(clock, begun + usual_s), begun + 1.0, Look(begun + usual_s - 0.00006, usual_s))
        assert begun + usual_s <= clock.now < begun + usual_s + most
        assert len(clock.sleeps) < 5


def test_what_is_late_or_unknown_is_looked_for_at_once(clock: Clock) -> None:
    for look in (ANY_TIME, Look(91.0, usual_s=1.0)):
        begun = clock.now
        assert wait_for_expected(at(clock, begun + 0.0001), begun + 1.0, look)
        assert clock.sleeps[0] <= MAX_SLEEP_S


def test_a_deadline_comes_before_an_expected_end(clock: Clock) -> None:
    assert not wait_for_expected(at(clock, 200.0), 100.02, Look(100.05, usual_s=0.05))
    assert clock.now == pytest.approx(100.02)
