"""What `make test` leaves out of the tests that are marked `sampled` and `sampled_module`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.harness.sampling import left_out


class Item:
    """A test with marks, each with its arguments."""

    def __init__(self, nodeid: str, marks: Mapping[str, tuple[int, ...]]) -> None:
        self.nodeid = nodeid
        self._marks = marks

    def get_closest_marker(self, name: str) -> Any:
        """As pytest's."""
        return getattr(pytest.mark, name)(*self._marks[name]).mark if name in self._marks else None


def kept(items: list[Any], seed: int) -> set[str]:
    """The ids of the tests that run."""
    gone = left_out(items, seed)
    return {item.nodeid for item in items if item not in gone}


def test_parameters_of_a_test_and_tests_of_a_module_are_drawn() -> None:
    module, slow = {"sampled_module": (3,)}, {"sampled_module": (3,), "slow": ()}
    items = [Item("a.py::other", {}), *(Item(f"b.py::slow{number}", slow) for number in range(5))]
    items += [Item(f"b.py::one[{number}]", {**module, "sampled": (1,)}) for number in range(9)]
    items += [Item(f"b.py::two[{number}]", module) for number in range(9)]
    runs = [kept(items, seed) for seed in range(400)]
    for run in runs:
        assert {"a.py::other", *(f"b.py::slow{number}" for number in range(5))} <= run
        drawn = {name for name in run if name.startswith(("b.py::one", "b.py::two"))}
        assert len(drawn) == 3
        assert sum(name.startswith("b.py::one") for name in drawn) <= 1
    assert set().union(*runs) == {item.nodeid for item in items}
    assert kept(items, 7) == kept(items, 7)
