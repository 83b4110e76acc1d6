"""The command line of every benchmark can be built, for which typer evaluates the annotations of its `main`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from slipstream import benchmarks
from slipstream.benchmarks import swap

SCRIPTS = sorted(
    path.stem
    for path in Path(benchmarks.__path__[0]).glob("*.py")
    if "typer.run(main)" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_line(name: str) -> None:
    app = typer.Typer()
    app.command()(import_module(f"slipstream.benchmarks.{name}").main)
    command = get_command(app)
    assert command.get_usage(command.make_context(name, [], resilient_parsing=True)).startswith(f"Usage: {name}")


@pytest.mark.parametrize("name", ["outages", "soak"])
def test_faults_that_are_not_known_are_refused(name: str) -> None:
    app = typer.Typer()
    app.command()(import_module(f"slipstream.benchmarks.{name}").main)
    outcome = CliRunner().invoke(app, ["--faults", "kill,kil"])
    assert outcome.exit_code == 2
    assert "--faults: kil: not one of kill" in " ".join(outcome.output.split())


@pytest.mark.parametrize(
    ("is_rolled_back", "tokens", "problems"),
    [
        (True, 25, []),
        (False, 25, ["eagle3 -> random: not rolled back"]),
        (True, None, ["acceptance did not come back"]),
    ],
)
def test_swaps_that_do_not_end_as_they_must(is_rolled_back: bool, tokens: int | None, problems: list[str]) -> None:
    swaps = [
        {"before": "none", "after": "eagle3", "rolled_back": False},
        {"before": "eagle3", "after": "random", "rolled_back": is_rolled_back},
    ]
    found = swap._problems({"swaps": swaps, "return": {"tokens": tokens}})
    assert [problem[: len(start)] for problem, start in zip(found, problems, strict=True)] == problems


def test_scripts_were_found() -> None:
    assert {"decode", "load", "near_ties"} <= set(SCRIPTS)
