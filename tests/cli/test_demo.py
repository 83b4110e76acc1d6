"""The demo as `make demo` runs it, and its screen and report without services."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from slipstream.bundled import Prompt
from slipstream.cli import demo
from slipstream.cli.demo import DemoRun, DemoScreen, first_difference, legend, pieces, report
from slipstream.common.device.choose import cuda_obstacle
from tests.harness.running import running, slipstream, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: sockets are in a folder in it, and their paths have 107 bytes at most."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def services_in(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]


def test_the_demo_compares_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 32)
    monkeypatch.setattr(demo, "TURNS", 2)
    found = slipstream("demo", timeout_s=220)
    assert found.returncode == 0, found.stdout + found.stderr
    for words in (
        "«",
        "tokens per second",
        "mean accept length",
        "bubble",
        "overlap efficiency",
        "no drafting (host fences)",
        "again, no drafting: ",
        "again, drafting as many tokens as pay: ",
        "Token ids with and without drafting: the same, all 128 tokens of 4 prompts.",
    ):
        assert words in found.stdout
    assert not services_in(tmp_path)
    assert not list(tmp_path.glob("slipstream-*"))


def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    with running("demo") as command:
        until(lambda: len(list(tmp_path.glob("*/sockets/*.lock"))) == 2, command)
        command.signal(signal.SIGINT)
        assert command.end() == 130
    assert not services_in(tmp_path)
    assert not list(tmp_path.glob("slipstream-*"))


@pytest.mark.skipif(cuda_obstacle() is None, reason="there is a GPU that can be used")
@pytest.mark.slow
def test_a_gpu_that_cannot_be_used_is_said_with_the_reason(tmp_path: Path) -> None:
    found = slipstream("demo", "--device", "cuda")
    assert found.returncode == 1
    assert f"device: got 'cuda', accepted: cpu here: {cuda_obstacle()}" in found.stderr
    assert not services_in(tmp_path)


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


def test_the_report_has_the_median_runs_and_the_median_of_the_ratios() -> None:
    output = io.StringIO()
    drafted = [run(accept_length=length, seconds=seconds) for length, seconds in ((1.5, 9.0), (2.5, 1.0), (3.5, 0.5))]
    undrafted = [run(seconds=seconds) for seconds in (9.0, 3.0, 2.0)]
    assert report(Console(file=output, width=100), drafted, undrafted) == 0
    for words in (
        "tokens per second",
        "6.0",
        "2.0",
        "mean accept length",
        "2.50",
        "1.00",
        "500 ms",
        "0.750",
        "3.00 times as fast as no drafting here (3 turns: 1.00 to 4.00)",
    ):
        assert words in output.getvalue()
    assert "the same, all 6 tokens of 2 prompts" in output.getvalue()


@pytest.mark.parametrize("at", range(1, 4))
def test_different_tokens_of_any_run_fail(at: int) -> None:
    output, runs = io.StringIO(), [run() for _ in range(4)]
    runs[at] = run(((1, 2, 3), (4, 9, 6)))
    assert report(Console(file=output, width=100), runs[:2], runs[2:]) == 1
    assert "DIFFER, first at token 1 of prompt 2" in output.getvalue()


def test_the_first_difference_is_found() -> None:
    assert first_difference(run(), run()) is None
    assert first_difference(run(), run(((1, 2, 3), (4, 9, 6)))) == (1, 1)
    assert first_difference(run(), run(((1, 2), (4, 5, 6)))) == (0, 2)
