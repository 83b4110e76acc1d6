"""The demo's screen and report, without services."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slipstream.bundled import Prompt
from slipstream.cli.demo import DemoRun, DemoScreen, first_difference, legend, pieces, report

INTERVAL = {"seconds": 2.0, "steps_per_s": 2.0, "step_s": 0.5, "bubbles_s": {"draft_to_verify": 0.125}}


def run(
    token_ids: tuple[tuple[int, ...], ...] = ((1, 2, 3), (4, 5, 6)),
    *,
    seconds: float = 1.0,
    accept_length: float | None = None,
) -> DemoRun:
    """A run, without drafts unless there is an accept length."""
    interval = INTERVAL | {"overlap_efficiency": 0.75, "mean_accept_length": accept_length}
    return DemoRun(title="a run", token_ids=token_ids, seconds=seconds, interval=interval)


def test_text_is_cut_where_each_token_made_it_certain() -> None:
    assert list(pieces("héllo", [0, 2, 3], [True, False, True])) == [("hé", False), ("llo", True)]


def test_lines_mark_accepted_drafts_line_by_line() -> None:
    output = io.StringIO()
    prompts = [Prompt(id="", source="a.py", line=line, num_tokens=1, text="import os\nx = ") for line in (1, 2)]
    with DemoScreen(Console(file=output, width=40), prompts) as screen:
        screen.add(0, [("a", False), ("b", True), ("c\nd", True)])
        screen.add(1, [("[red]", False)])
        screen.add(0, [("e", False), ("\n\n", True)])
    assert output.getvalue().splitlines() == [
        "[1] continues a.py:1",
        "[2] continues a.py:2",
        "[1] x = a«bc»",
        "[1] «d»e",
        "[2] x = [red]",
    ]


@pytest.mark.parametrize("size", [(120, 30), (60, 10)])
def test_live_boxes_fit_the_terminal_and_color_accepted_drafts(size: tuple[int, int]) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=size[0], height=size[1], color_system="standard")
    prompts = [Prompt(id=f"{i}", source="a.py", line=i, num_tokens=1, text="def f():\n" * 50) for i in range(4)]
    with DemoScreen(console, prompts) as screen:
        screen.add(0, [("DRAFTED", True), ("TARGET", False)])
    frame = output.getvalue()
    assert "\x1b[1;32mDRAFTED\x1b[0m\x1b[33mTARGET" in frame
    assert all(f"a.py:{i}" in frame for i in range(4))


def test_the_legend_reads_like_the_screen() -> None:
    assert "«" in legend(Console(file=io.StringIO())).plain


def test_the_report_has_both_runs() -> None:
    output = io.StringIO()
    assert report(Console(file=output, width=100), run(accept_length=2.5), run(seconds=3.0)) == 0
    for words in (
        "tokens per second",
        "6.0",
        "2.0",
        "mean accept length",
        "2.50",
        "1.00",
        "500 ms",
        "0.750",
        "3.00 times",
    ):
        assert words in output.getvalue()
    assert "the same, all 6 tokens of 2 prompts" in output.getvalue()


def test_different_tokens_fail() -> None:
    output = io.StringIO()
    assert report(Console(file=output, width=100), run(), run(((1, 2, 3), (4, 9, 6)))) == 1
    assert "DIFFER, first at token 1 of prompt 2" in output.getvalue()


def test_the_first_difference_is_found() -> None:
    assert first_difference(run(), run()) is None
    assert first_difference(run(), run(((1, 2, 3), (4, 9, 6)))) == (1, 1)
    assert first_difference(run(), run(((1, 2), (4, 5, 6)))) == (0, 2)
