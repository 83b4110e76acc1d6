"""A GPU's clock against the host's, and when the host looks again, with a GPU that answers as it is told."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.common.device.cuda import poll_backoff
from slipstream.common.device.cuda.poll_backoff import MAX_SLEEP_S, MIN_SLEEP_S, PollBackoff, wait_for_expected
from slipstream.common.device.interface import ANY_TIME, PollTime
from slipstream.common.errors import DeadlineExceededError
from tests.harness import fake_cuda
from tests.harness.fake_cuda import Result

AHEAD_NS = 1_700_000_000_000_000_000
"""The GPU clock's lead over the host's, in nanoseconds."""


@dataclass
class Gpu:
    """Stands in for the kernels: a stamp is written when it may be, by another thread or never."""

    delays_s: list[float | None] = field(default_factory=list)
    """Delays of the stamps, in order, and no delay after the last; None: never written."""
    threads: list[threading.Thread] = field(default_factory=list)

    def stamp(self, stream: int, target: int) -> None:
        """See `CudaKernels.stamp`."""
        delay_s = self.delays_s.pop(0) if self.delays_s else 0.0
        word = ctypes.c_uint64.from_address(target)

        def write() -> None:
            time.sleep(delay_s or 0.0)
            word.value = time.monotonic_ns() + AHEAD_NS

        if delay_s == 0.0:
            write()
        elif delay_s is not None:
            self.threads.append(threading.Thread(target=write))
            self.threads[-1].start()


@pytest.fixture
def side_module() -> Iterator[Any]:
    """`cuda_side`, whose pinned memory is plain memory."""
    with fake_cuda.installed():
        made = fake_cuda.module("cuda.stream")
        made.torch = SimpleNamespace(zeros=lambda size, dtype, **_: torch.zeros(size, dtype=dtype), uint8=torch.uint8)
        yield made


def sample(side_module: Any, gpu: Gpu) -> Any:
    """Returns the result of one `sample_clock` call."""
    stream = SimpleNamespace(create_stream=lambda: 7, is_idle=lambda handle: True)
    found = side_module.SideStream(stream, gpu).sample_clock()
    for thread in gpu.threads:
        thread.join()
    return found


def test_the_distance_is_found_within_what_is_stated(side_module: Any) -> None:
    before_ns = time.monotonic_ns()
    found = sample(side_module, Gpu())
    assert before_ns < found.device_ns - AHEAD_NS < time.monotonic_ns()
    assert abs(found.device_ns - found.host_ns - AHEAD_NS) <= found.uncertainty_ns


def test_looks_that_others_hold_up_do_not_make_it_worse(side_module: Any) -> None:
    gpu = Gpu([0.02, 0.0, 0.03, 0.0])
    found = sample(side_module, gpu)
    assert len(gpu.threads) == 2
    assert abs(found.device_ns - found.host_ns - AHEAD_NS) <= found.uncertainty_ns < 10_000_000


def test_it_is_asked_no_longer_than_it_may_take(side_module: Any) -> None:
    side_module.CLOCK_S = 0.05
    gpu = Gpu([0.02] * side_module.CLOCK_READINGS)
    sample(side_module, gpu)
    assert len(gpu.threads) <= 4


def test_a_gpu_that_does_not_answer_is_an_error(side_module: Any) -> None:
    side_module.TIMEOUT_S = 0.05
    with pytest.raises(DeadlineExceededError, match="did not answer"):
        sample(side_module, Gpu([None]))


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
    assert wait_for_expected(at(clock, 100.04), 101.0, PollTime(100.05, usual_s=0.05))
    assert len(clock.sleeps) == 1
    assert clock.now == pytest.approx(100.05)


def test_the_longer_it_takes_the_less_often_one_looks(clock: Clock) -> None:
    for usual_s, most in ((0.0008, 0.00003), (0.05, 0.0012)):
        clock.sleeps.clear()
        begun = clock.now
        assert wait_for_expected(at(clock, begun + usual_s), begun + 1.0, PollTime(begun + usual_s - 0.00006, usual_s))
        assert begun + usual_s <= clock.now < begun + usual_s + most
        assert len(clock.sleeps) < 5


def test_what_is_late_or_unknown_is_looked_for_at_once(clock: Clock) -> None:
    for look in (ANY_TIME, PollTime(91.0, usual_s=1.0)):
        begun = clock.now
        assert wait_for_expected(at(clock, begun + 0.0001), begun + 1.0, look)
        assert clock.sleeps[0] <= MAX_SLEEP_S


def test_a_deadline_comes_before_an_expected_end(clock: Clock) -> None:
    assert not wait_for_expected(at(clock, 200.0), 100.02, PollTime(100.05, usual_s=0.05))
    assert clock.now == pytest.approx(100.02)


@pytest.mark.parametrize(
    ("answer", "is_used_again"), [(Result.CUDA_SUCCESS, True), (Result.CUDA_ERROR_NOT_READY, False)]
)
def test_a_closed_stream_that_is_idle_is_used_again(answer: Result, *, is_used_again: bool) -> None:
    """A context that has more streams than hardware queues has two that wait for each other."""
    with fake_cuda.installed() as cuda:
        streams, driver = fake_cuda.module("cuda.stream"), fake_cuda.driver()
        streams.torch = SimpleNamespace(cuda=SimpleNamespace(ExternalStream=lambda *_, **__: None))
        streams.CLOSE_TIMEOUT_S = 0.01
        cuda.answers["cuStreamQuery"] = (answer,)
        made = []
        for _ in range(2):
            stream = streams.CudaStream("verify", driver, torch.device("cuda"), lambda error: None)
            stream.close()
            made.append(stream.handle)
    assert (made[0] == made[1]) == is_used_again
