"""What was measured of peers, in one file: each case by itself, by whichever run measured it last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks.result_rows import read_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One way of generating, in one case."""

    case: str
    way: str
    device: str
    dtype: str
    prompt_tokens: int
    num_new_tokens: int
    num_draft_tokens: int
    tokens_per_second: float
    """Median over the repeats."""
    repeats: tuple[float, ...]
    mean_accept_length: float
    host: str
    hardware: str


class ResultsFile:
    """Results by case. Each is in the file as soon as it is added."""

    def __init__(self, path: Path | None, *, device: str, cases: Sequence[str]) -> None:
        """Keeps what the file has; `cases` are those to be measured, on `device`. Without a path nothing is written.

        Raises ValueError if the file holds something else, or a case of another device that is not measured again.
        """
        self._path = path
        self._results = [] if path is None else read_rows(path, _result)
        self._begun: set[str] = set()
        for result in self._results:
            if result.device != device and result.case not in cases:
                raise ValueError(f"{path} has {result.case} measured on {result.device}, this run is on {device}")

    def of(self, case: str) -> list[Result]:
        """The ways of one case, in the order in which they were measured."""
        return [result for result in self._results if result.case == case]

    def add(self, result: Result) -> None:
        """Writes it, too. The first of a case takes the place of all that an earlier run found of that case."""
        if result.case not in self._begun:
            self._begun.add(result.case)
            self._results = [other for other in self._results if other.case != result.case]
        self._results = sorted([*self._results, result], key=lambda each: each.case)
        if self._path is not None:
            write_rows(self._results, self._path)


def _result(row: dict[str, Any]) -> Result:
    return Result(**{**row, "repeats": tuple(row["repeats"])})
