"""When the collector runs, and that it does nothing by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import psutil
import pytest

from slipstream.common import idle_collection
from slipstream.common.idle_collection import BUSY_S, IDLE_S, MIN_NEW_OBJECTS, IdleCollection


class Knot:
    """Refers to itself: reference counts never free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    now = [1000.0]
    monkeypatch.setattr(idle_collection.time, "monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


@pytest.fixture
def collection(wait: Callable[[float], None]) -> IdleCollection:
    """Without anything to do."""
    return IdleCollection()


def knot() -> weakref.ref[Knot]:
    """One that nobody has any more."""
    return weakref.ref(Knot())


def test_it_collects_when_work_is_over(collection: IdleCollection, wait: Callable[[float], None]) -> None:
    with collection.in_charge():
        assert not gc.isenabled()
        left = knot()
        wait(0.01)
        collection.worked()
        collection.collect_if_due()
        assert left() is not None, "there may be more to do"
        wait(IDLE_S)
        collection.collect_if_due()
        assert left() is None
    assert gc.isenabled()


def test_it_leaves_an_idle_process_alone(collection: IdleCollection, wait: Callable[[float], None]) -> None:
    with collection.in_charge():
        left = knot()
        wait(100 * BUSY_S)
        collection.collect_if_due()
        assert left() is not None, "nothing was done, so nothing is new"
    gc.collect()


def test_many_objects_without_reported_work_are_collected(
    collection: IdleCollection, wait: Callable[[float], None]
) -> None:
    with collection.in_charge():
        left = [knot() for _ in range(MIN_NEW_OBJECTS)]
        wait(IDLE_S)
        collection.collect_if_due()
        assert left[0]() is None


def test_a_process_that_never_rests_collects_now_and_then(
    collection: IdleCollection, wait: Callable[[float], None]
) -> None:
    with collection.in_charge():
        left = knot()
        for _ in range(int(BUSY_S) - 1):
            wait(1.0)
            collection.worked()
            collection.collect_if_due()
        assert left() is not None
        for _ in range(2):
            wait(1.0)
            collection.worked()
            collection.collect_if_due()
        assert left() is None


def test_the_younger_generations_may_go_on_by_themselves(wait: Callable[[float], None]) -> None:
    before = gc.get_threshold()
    with IdleCollection(keeps_young=True).in_charge():
        assert gc.isenabled()
        old = Knot()
        gc.collect()
        found = weakref.ref(old)
        del old
        knots = weakref.ref(Knot())
        while knots() is not None:
            # Each is tracked, so that the youngest generation becomes full.
            [[] for _ in range(before[0])]
            Knot()
        assert found() is not None
    assert gc.get_threshold() == before


def test_free_memory_between_blocks_in_use_is_given_back(
    collection: IdleCollection, wait: Callable[[float], None]
) -> None:
    process = psutil.Process()
    blocks = [b"x" * 60_000 for _ in range(2000)]
    kept = blocks[::20]
    with_blocks = process.memory_info().rss
    blocks.clear()
    wait(IDLE_S)
    collection.worked()
    wait(IDLE_S)
    collection.collect_if_due()
    assert process.memory_info().rss < with_blocks - 90 * 2**20
    assert kept
