"""Runs training steps until the course is over, and writes the log."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from slipstream.common.errors import ConfigError
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


def steps(
    optimizer: Optimizer, course: Course, backward: Callable[[], Result], first: int = 0, seconds: float = 0.0
) -> Iterator[Step[Result]]:
    """Takes steps until the course is over, whose clock starts with them. ``backward`` leaves a step's gradients.

    ``first``, ``seconds``: steps and time of a run that goes on.
    """
    began, number = time.monotonic() - seconds, first
    while (progress := course.progress(number, time.monotonic() - began)) < 1.0:
        result = backward()
        optimizer.step(course.rate_factor(progress))
        number += 1
        yield Step(number, result, began)


def write_log(path: Path, settings: Record, records: list[Record]) -> None:
    """Write settings and records as JSON; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "log": records}) + "\n")


class SavedRun:
    """The file from which a run goes on that was ended: weights, optimizers, steps and log."""

    def __init__(self, path: Path, settings: Record, *, every_s: float = 300.0) -> None:
        """``settings``: have to be the same when the run goes on."""
        self._path, self._settings, self._every_s = path, settings, every_s
        self._saved_at = time.monotonic()

    def load(self, student: nn.Module, optimizer: Optimizer) -> tuple[int, float, list[Record]]:
        """Fills in weights and optimizers; returns steps, seconds and log. Raises ``ConfigError``."""
        if not self._path.is_file():
            raise ConfigError("resume", str(self._path), "the folder of a run that was ended before its last step")
        try:
            saved = torch.load(self._path, weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0] or "it is empty"
            raise ConfigError(
                "resume", str(self._path), f"the state of a run, and it cannot be read ({reason})"
            ) from None
        for name, value in self._settings.items():
            if saved["settings"].get(name) != value:
                raise ConfigError(name, value, f"{saved['settings'].get(name)}, as the run began")
        student.load_state_dict(saved["student"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["steps"], saved["seconds"], saved["log"]

    def save(self, student: nn.Module, optimizer: Optimizer, step: Step[Any], log: list[Record]) -> None:
        """Replaces the file."""
        state = {"settings": self._settings, "student": student.state_dict(), "optimizer": optimizer.state_dict()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        torch.save(state | {"steps": step.number, "seconds": step.seconds, "log": log}, part)
        part.replace(self._path)
        self._saved_at = time.monotonic()

    def save_now_and_then(self, student: nn.Module, optimizer: Optimizer, step: Step[Any], log: list[Record]) -> None:
        """Saves every few minutes."""
        if time.monotonic() - self._saved_at >= self._every_s:
            self.save(student, optimizer, step, log)

    def remove(self) -> None:
        """Ends a run: there is nothing to go on with."""
        self._path.unlink(missing_ok=True)
