"""When requests come, whatever becomes of those before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator


def poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """The seconds at which requests come in a window of so many: `rate` per second on average, independently."""
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)
