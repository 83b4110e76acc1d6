"""When the host looks again."""

from __future__ import annotations

from slipstream.common.device.cuda.poll_backoff import (
    INTERVALS,
    MAX_SLEEP_S,
    MIN_SLEEP_S,
    CompletionPredictor,
    PollBackoff,
)


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


def test_nothing_is_known_before_two_came() -> None:
    predictor = CompletionPredictor()
    assert predictor.earliest(5.0) == 5.0
    predictor.completed(6.0)
    assert predictor.earliest(6.1) == 6.1


def test_the_shortest_of_the_last_intervals_counts() -> None:
    predictor = CompletionPredictor()
    now = 0.0
    for interval in (0.0, 1.0, 4.0, 2.0):
        now += interval
        predictor.completed(now)
    assert now + 0.5 < predictor.earliest(now) < now + 1.0
    assert predictor.earliest(now + 3.0) == now + 3.0, "it is late already"


def test_an_idle_time_and_a_fast_time_are_forgotten() -> None:
    predictor, now = CompletionPredictor(), 0.0
    for interval in (0.0, 0.001, 100.0, *[0.01] * (INTERVALS - 1)):
        now += interval
        predictor.completed(now)
    assert now + 0.005 < predictor.earliest(now) < now + 0.01
    now += 0.01
    predictor.completed(now)
    assert now + 0.005 < predictor.earliest(now) < now + 0.01


def test_looks_are_as_far_apart_as_the_intervals_allow() -> None:
    predictor, now = CompletionPredictor(), 0.0
    assert predictor.backoff().min_sleep_s == MIN_SLEEP_S
    for _ in range(INTERVALS):
        predictor.completed(now)
        now += 0.01
    assert MIN_SLEEP_S < predictor.backoff().min_sleep_s <= 0.0004
    for _ in range(INTERVALS + 1):
        predictor.completed(now)
        now += 100.0
    assert predictor.backoff().min_sleep_s == MAX_SLEEP_S
