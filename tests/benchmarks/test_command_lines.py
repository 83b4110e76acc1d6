"""The command line of every benchmark can be built, for which typer evaluates the annotations of its `main`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from slipstream import benchmarks

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


def test_scripts_were_found() -> None:
    assert {"decode", "load", "near_ties"} <= set(SCRIPTS)
