"""The command line of `benchmarks/serving.py`."""

from __future__ import annotations

import pytest
import typer

from slipstream.benchmarks.serving import main


@pytest.mark.parametrize("option", ["--seconds", "--capacity-seconds"])
@pytest.mark.parametrize("given", ["3", "0", "nan"])
def test_a_run_that_is_all_warm_up_is_refused(option: str, given: str) -> None:
    app = typer.Typer()
    app.command()(main)
    with pytest.raises(typer.BadParameter) as found:
        typer.main.get_command(app).main([option, given], standalone_mode=False)
    assert found.value.format_message().startswith(f"Invalid value for '{option}': more than 3, which are for warming")
