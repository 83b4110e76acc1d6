"""Pictures of traces, drawn from files as `slipstream trace` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.benchmarks.trace_pictures import COLOURS, draw
from slipstream.cli.trace_timeline import BUBBLE, HOST, IDLE, RESULT, STEP, WAIT
from tests.harness.trace_format import check

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("trace_*_run_ahead_*.json"))


def read(path: Path) -> Any:
    """A trace file's content."""
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_committed_traces_are_what_the_format_demands_and_have_pictures(path: Path) -> None:
    content = read(path)
    check(content)
    assert content["otherData"]["run_ahead"] == int(path.stem[-1])
    assert path.with_suffix(".png").exists()


def test_draws_the_steps_and_says_what_they_lose(tmp_path: Path) -> None:
    content = read(FILES[0])
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    num_steps = sum(event["cat"] == "step" for event in slices)
    lost_ms = sum(event["dur"] for event in slices if event["cat"] == "bubble") / num_steps / 1000
    said = draw(content, tmp_path / "trace.png")
    assert f"of which {lost_ms:.3f} ms" in said
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_draws_whatever_a_trace_of_today_has(tmp_path: Path) -> None:
    content = read(FILES[0])
    for event in content["traceEvents"]:
        if event.get("cat") == "copy":
            event["cat"] = RESULT
    draw(content, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert {STEP, BUBBLE, HOST, RESULT, WAIT, IDLE} <= set(COLOURS)


def test_too_few_steps_are_not_drawn(tmp_path: Path) -> None:
    content = read(FILES[0])
    content["traceEvents"] = [e for e in content["traceEvents"] if e["ph"] == "M"]
    with pytest.raises(ValueError, match="0 steps with a draft are too few"):
        draw(content, tmp_path / "trace.png")
