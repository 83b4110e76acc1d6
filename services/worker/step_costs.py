"""Measures how long steps of padding rows take when a worker is attached, before anything runs.

The scheduler's choice of draft tokens begins with these times. Small steps come first, and all of them together take
BUDGET_S at most: where steps are long, sizes that are not measured are told from those that are.
"""

from __future__ import annotations

import logging
import time
from itertools import product
from typing import TYPE_CHECKING

from slipstream.common.wire.worker import StepCost
from slipstream.services.worker.graphs import REPEATS, shortest_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from slipstream.common.wire.layout import StepShape

    MakeStep = Callable[[int, int], Callable[[], None] | None]
    """Takes rows, and draft tokens of each; returns the stream work of such a step, or None where there is none."""

logger = logging.getLogger(__name__)

BUDGET_S = 0.8
"""Time for all measurements of a worker."""
DRAFT_TOKENS = (0, 1, 2, 4, 7, 11, 15)
"""Draft tokens of each row; more than K are K."""
_GROWTH = 2
"""A step takes at most so many times as long as the next smaller one, about."""


def measure_costs(shape: StepShape, make_step: MakeStep, device: torch.device) -> tuple[StepCost, ...]:
    """Stream work: returns the times of steps of about every size; none on a GPU. Waits for the device."""
    if device.type != "cpu":
        # These steps replay graphs outside of any epoch's order, which no GPU has run yet.
        return ()
    most_rows = shape.num_slots - 1
    rows = {min(1 << power, most_rows) for power in range(most_rows.bit_length() + 1)}
    counts = {min(count, shape.num_draft_tokens) for count in DRAFT_TOKENS}
    end_s, seconds, found = time.monotonic() + BUDGET_S, 0.0, list[StepCost]()
    for num_rows, count in sorted(product(rows, counts), key=lambda size: (size[0] * (size[1] + 1), size)):
        if time.monotonic() + _GROWTH * REPEATS * seconds > end_s:
            break
        if (step := make_step(num_rows, count)) is not None:
            seconds = shortest_seconds(step, device)
            found.append(StepCost(num_rows, count, max(1, round(1e9 * seconds))))
    if found:
        logger.info("measured steps of %d sizes, the last in %.2f ms", len(found), found[-1].ns / 1e6)
    return tuple(_without_bursts(cost, found) for cost in found)


def _without_bursts(cost: StepCost, found: Sequence[StepCost]) -> StepCost:
    """Returns the least time of all steps that are as large: what ran beside a smaller one made it no faster."""
    larger = (one.ns for one in found if one.rows >= cost.rows and one.draft_tokens >= cost.draft_tokens)
    return cost._replace(ns=min(larger))
