"""Runs training steps until the course is over, and writes the log."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from slipstream.training.optimizer import Course, Optimizer

LOG_EVERY_STEPS = 20

Result = TypeVar("Result")
Record = dict[str, Any]
"""The log's record of a step."""


@dataclass(frozen=True, slots=True)
class Step(Generic[Result]):
    """A finished step."""

    number: int
    """1 is the first."""
    result: Result
    """The value that the backward pass returned."""
    began: float
    """Beginning of the run, by the monotonic clock."""

    @property
    def is_logged(self) -> bool:
        """True if the log has a record of it."""
        return self.number % LOG_EVERY_STEPS == 0

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began


def steps(optimizer: Optimizer, course: Course, backward: Callable[[], Result]) -> Iterator[Step[Result]]:
    """Takes steps until the course is over. ``backward`` leaves the gradients of a step."""
    began = time.monotonic()
    number = 0
    while (progress := course.progress(number)) < 1.0:
        result = backward()
        optimizer.step(course.rate_factor(progress))
        number += 1
        yield Step(number, result, began)


def write_log(path: Path, settings: Record, records: list[Record]) -> None:
    """Write settings and records as JSON; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "log": records}) + "\n")
