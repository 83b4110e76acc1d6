"""Seconds of a measurement that are for warming up and do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable


def beyond_warm_up(warm_up_s: float) -> Callable[[float], float]:
    """Checks the seconds of an option. Raises BadParameter, to which typer adds the option's name."""

    def check(seconds: float) -> float:
        if not seconds > warm_up_s:
            raise typer.BadParameter(f"more than {warm_up_s:g}, which are for warming up and do not count")
        return seconds

    return check
