"""When the host looks again."""

from __future__ import annotations

from slipstream.common.device.cuda.poll_backoff import LONG_S, RHYTHM, SHORT_S, CompletionPredictor, PollBackoff


class Clock:
    """Stands still but for those who sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Moves on."""
        self.now += seconds
        self.naps.append(seconds)


def test_naps_grow_with_the_time_waited_and_end_at_the_deadline() -> None:
    clock = Clock()
    naps = PollBackoff(lambda: clock.now, clock.sleep)
    while clock.now < 100.5:
        naps.take(100.5)
    assert clock.now == 100.5
    assert clock.naps[:-1] == sorted(clock.naps[:-1])
    assert (clock.naps[0], clock.naps[-2]) == (SHORT_S, LONG_S)
    naps.take(100.4)
    assert clock.naps[-1] == 0.0


def test_nothing_is_known_before_two_came() -> None:
    rhythm = CompletionPredictor()
    assert rhythm.not_before(5.0) == 5.0
    rhythm.came(6.0)
    assert rhythm.not_before(6.1) == 6.1


def test_the_shortest_of_the_last_intervals_counts() -> None:
    rhythm = CompletionPredictor()
    now = 0.0
    for interval in (0.0, 1.0, 4.0, 2.0):
        now += interval
        rhythm.came(now)
    assert now + 0.5 < rhythm.not_before(now) < now + 1.0
    assert rhythm.not_before(now + 3.0) == now + 3.0, "it is late already"


def test_an_idle_time_and_a_fast_time_are_forgotten() -> None:
    rhythm, now = CompletionPredictor(), 0.0
    for interval in (0.0, 0.001, 100.0, *[0.01] * (RHYTHM - 1)):
        now += interval
        rhythm.came(now)
    assert now + 0.005 < rhythm.not_before(now) < now + 0.01
    now += 0.01
    rhythm.came(now)
    assert now + 0.005 < rhythm.not_before(now) < now + 0.01


def test_looks_are_as_far_apart_as_the_intervals_allow() -> None:
    rhythm, now = CompletionPredictor(), 0.0
    assert rhythm.naps().shortest_s == SHORT_S
    for _ in range(RHYTHM):
        rhythm.came(now)
        now += 0.01
    assert SHORT_S < rhythm.naps().shortest_s <= 0.0002
    for _ in range(RHYTHM + 1):
        rhythm.came(now)
        now += 100.0
    assert rhythm.naps().shortest_s == LONG_S
