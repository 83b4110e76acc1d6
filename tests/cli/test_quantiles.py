"""Quantiles of a histogram, against values worked out by hand."""

from __future__ import annotations

import pytest

from slipstream.cli.quantiles import quantile

BUCKETS = {"+Inf": 10.0, "1.0": 4.0, "2.0": 8.0, "0.5": 0.0}


@pytest.mark.parametrize(
    ("share", "value"),
    [
        (0.0, 0.5),
        (0.2, 0.75),  # the second of four between 0.5 and 1
        (0.4, 1.0),
        (0.5, 1.25),
        (0.8, 2.0),
        (0.9, 2.0),  # above the last finite bound
        (1.0, 2.0),
    ],
)
def test_straight_lines_within_a_bucket(share: float, value: float) -> None:
    assert quantile(share, BUCKETS) == pytest.approx(value)


def test_the_first_bucket_begins_at_zero() -> None:
    assert quantile(0.5, {"0.5": 2.0, "+Inf": 2.0}) == 0.25


@pytest.mark.parametrize("buckets", [{}, {"0.5": 0.0, "+Inf": 0.0}])
def test_nothing_observed(buckets: dict[str, float]) -> None:
    assert quantile(0.5, buckets) is None
