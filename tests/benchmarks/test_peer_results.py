"""The command line of `benchmarks/peers.py` refuses what cannot be measured, and keeps the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from slipstream.benchmarks import peers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "text", "name"),
    [
        (["--case", peers.BUNDLED, "--case", "x"], "[]", "--case"),
        (["--device", "x"], "[]", "--device"),
        ([], "", "--json"),
        ([], '[{"case": "bundled"}]', "--json"),
        ([], '{"rows": []}', "--json"),
    ],
)
def test_a_setup_that_cannot_be_measured_is_refused_before_any_measurement(
    arguments: list[str], text: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    app = typer.Typer()
    app.command()(peers.main)
    outcome = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert outcome.exit_code == 2
    assert name in outcome.output
    assert path.read_text() == text
