"""Runs a benchmark: scenarios that are served one after the other, a sampler of each, and a table of its rows.

    @benchmark(Plan)
    async def main(plan: Plan, file: Path | None) -> None:
        async with Stack(device=plan.device) as stack:
            await run(stack, scenarios, sample, Table(file, "run_ahead"))

A benchmark may return its problems: without any its status is 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import typer

from slipstream.benchmarks.stack import Served, Stack
from slipstream.common.errors import ConfigError
from slipstream.common.settings import Settings, setting, with_options

P = TypeVar("P", bound=Settings)
RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]
"""A row of results, as the JSON file has it."""


class Names(tuple[str, ...]):
    """Names of an option, separated by commas."""

    @classmethod
    def of(cls, known: Collection[str], default: str = "", help: str = "Names, separated by commas.") -> Any:
        """A setting of known names: `default`, or all of them."""

        def parse(given: str | Names) -> Names:
            found = given if isinstance(given, Names) else cls(given.split(","))
            if unknown := set(found) - set(known):
                raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
            return found

        return setting(cls(default.split(",") if default else known), help=help, unit="NAMES", parse=parse)


@dataclass(frozen=True, kw_only=True)
class NoPlan(Settings):
    """A benchmark without settings."""


@dataclass(frozen=True, kw_only=True)
class DevicePlan(Settings):
    """The settings of a benchmark that runs on either device."""

    device: str = setting("cpu", help="Device of the workers.", choices=("cpu", "cuda"))


Benchmark = Callable[[P, Path | None], Coroutine[Any, Any, Sequence[str] | None]]


def benchmark(plan: type[P]) -> Callable[[Benchmark[P]], typer.Typer]:
    """Makes a command line of a benchmark, with an option for each setting of `plan`, and `--json`.

    Runs it, where its module is the script: it stands at the end. The problems that it returns are its exit status.
    """

    def decorate(run: Benchmark[P]) -> typer.Typer:
        @with_options(plan)
        def main(
            json: Annotated[Path | None, typer.Option(help="The file for the results.")] = None, **values: Any
        ) -> None:
            try:
                problems = asyncio.run(run(plan(**values), json)) or ()
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from error
            sys.exit("\n".join(problems) or 0)

        main.__doc__ = run.__doc__
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(main)
        if run.__module__ == "__main__":
            app()
        return app

    return decorate


class Table:
    """Rows of results in a file. The first new row of a key replaces the old rows of that key."""

    def __init__(
        self,
        path: Path | None,
        *key: str,
        order: Callable[[Row], Any] | None = None,
        picture: Callable[[list[Row], Path], None] | None = None,
    ) -> None:
        """`key`: the names of a row's key; without any, the old rows go with the first new one.

        `picture` draws the rows beside the file. Raises BadParameter if the file holds anything else than such rows.
        """
        self._path, self._key, self._order, self._picture = path, key, order, picture
        self._renewed: set[tuple[Any, ...]] = set()
        self.rows: list[Row] = []
        try:
            if key:
                self.rows = read_json(path, [])
                _ = [self._key_of(row) for row in self.rows]
        except (ValueError, TypeError, KeyError) as error:
            told = f"{path} does not hold results of this benchmark: {error}"
            raise typer.BadParameter(told, param_hint="--json") from error

    def add(self, row: Row) -> None:
        """Adds a row, prints its figures, and writes the file."""
        key = self._key_of(row)
        if key not in self._renewed:
            self._renewed.add(key)
            self.rows = [old for old in self.rows if self._key_of(old) != key]
        self.rows.append(row)
        if self._order is not None:
            self.rows.sort(key=self._order)
        write_json(self.rows, self._path)
        if self._picture is not None and self._path is not None:
            self._picture(self.rows, self._path.with_suffix(".png"))
        print(told(row), flush=True)

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)


def told(row: Row, *names: str) -> str:
    """Says some of a row's values, or all but its lists, for people."""
    values = {name: row[name] for name in names}
    values = values or {name: value for name, value in row.items() if not isinstance(value, (list, tuple))}
    words = []
    for name, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else f"({told(value)})" if isinstance(value, dict) else value
        words += [] if name == "host" else [f"{name.replace('_', ' ')} {shown}"]
    return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scheduler with a gateway, and what is the same in all rows that are sampled from it."""

    about: Row
    draft: str | None = None
    """Name of the draft service; None: plain decoding."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of scheduler and gateway."""


async def run(
    stack: Stack,
    scenarios: Iterable[Scenario],
    sample: Callable[[Served, Scenario], AsyncIterator[Row]],
    table: Table,
) -> None:
    """Serves each scenario with the stack's workers, and adds the rows that are sampled from it to the table."""
    for scenario in scenarios:
        async with stack.scheduler(scenario.draft, **scenario.options) as served:
            async for row in sample(served, scenario):
                table.add({**scenario.about, **row})


def host(device: str = "cpu") -> str:
    """Describes this machine and its Python; for "cuda" also the GPU and its driver."""
    machine = f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{_gpu()}, {machine}" if device == "cuda" else machine


def write_json(content: Any, path: Path | None) -> None:
    """Writes a file that replaces the old one as a whole. Without a path it does nothing."""
    if path is not None:
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def read_json(path: Path | None, default: Any = None) -> Any:
    """Reads a file; without one, returns `default`."""
    return default if path is None or not path.exists() else json.loads(path.read_text(encoding="utf-8"))


def load(name: str) -> Any:
    """Reads a result file of the repository."""
    return read_json(RESULTS / f"{name}.json")


def median_of(rows: Iterable[Row], name: str) -> float:
    """The median of a figure."""
    return float(median(row[name] for row in rows))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some fields, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def medians(rows: Iterable[Row], keys: Sequence[str], names: Sequence[str]) -> list[Row]:
    """A row for each group of rows with the same keys: the keys, and the median of each of the named figures."""
    return [
        dict(zip(keys, key, strict=True)) | {name: median_of(found, name) for name in names}
        for key, found in grouped(rows, *keys).items()
    ]


def _gpu() -> str:
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    found = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    name, driver = found[0].split(", ")
    return f"{name}, driver {driver}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
