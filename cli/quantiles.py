"""Quantiles of what a histogram counted, as Prometheus estimates them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def quantile(share: float, buckets: Mapping[str, float]) -> float | None:
    """The value that `share` of the observations are at or under, by straight lines within a bucket; None without any.

    `buckets`: observations up to each bound, by the bound as it is written ("0.5", "+Inf"). What lies above the last
    finite bound counts as lying on it.
    """
    counts = sorted((float(bound), count) for bound, count in buckets.items())
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError("the last bucket has all observations")
