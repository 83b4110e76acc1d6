"""A forward's kernels are named by what they compute, and each gets the time in which it alone kept the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.benchmarks.kernels import timed


def kernels(*parts: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Events of a trace: a name, a beginning and an end."""
    return [{"name": name, "ts": begin, "dur": end - begin} for name, begin, end in parts]


def test_a_kernel_that_waits_for_the_one_before_has_the_time_after_it() -> None:
    found = list(timed(kernels(("norm", 10, 14), ("launched early", 11, 17), ("late", 19, 20), ("within", 19, 20))))
    assert found == [("norm", 4, 0), ("launched early", 3, 0), ("late", 1, 2), ("within", 0, 0)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["product_kernel"] * 9,
            [
                *(f"product_kernel: {name}" for name in ("qkv", "output", "gate_up", "down") * 2),
                "product_kernel: logits",
            ],
        ),
        (
            ["product_kernel", "product_kernel", "choose_kernel", "grouped_kernel", "grouped_kernel", "product_kernel"],
            [
                "product_kernel: qkv",
                "product_kernel: output",
                "choose_kernel",
                "grouped_kernel: gate_up",
                "grouped_kernel: down",
                "product_kernel: logits",
            ],
        ),
    ],
    ids=["dense", "experts"],
)
def test_products_are_named_by_what_they_compute(names: list[str], expected: list[str]) -> None:
    events = kernels(*((name, at, at + 1) for at, name in enumerate(names)))
    assert [name for name, _, _ in timed(events)] == expected
