"""The table of near ties: on a CPU nothing parts, and what parts is told, and failed parts do not lose the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.benchmarks import figures, near_ties
from slipstream.benchmarks.near_ties import EAGLE3, NONE, SAMPLINGS, NearTies, Report
from slipstream.common.device.cpu.device import HostDevice

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step takes is not looked at here, but that it is told."""
    monkeypatch.setattr(near_ties, "WINDOW_TOKENS", 24)


def make_report(**changes: Any) -> Report:
    """Nothing is measured yet."""
    settings: dict[str, Any] = {
        "host": "a CPU, with cores",
        "dtype": "float32",
        "bound": 0.25,
        "num_draft_tokens": 4,
        "num_prompts": 2,
        "num_deterministic_prompts": 1,
        "samplings": list(SAMPLINGS),
        "max_new_tokens": 10,
    }
    return Report(**{**settings, **changes})


def test_in_float32_nothing_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = make_report(), tmp_path / "near_ties_h200.json"
    NearTies(HostDevice(), report, path, drafts=(NONE, EAGLE3), rounds=1).run()
    assert not report.problems
    told = [line.partition(": ready")[0] for line in capsys.readouterr().out.splitlines() if ": ready" in line]
    assert told == [f"{mode}, draft {draft}" for draft in (NONE, EAGLE3) for mode in ("usual", "deterministic")]
    assert [(row.deterministic, row.draft, row.at_once) for row in report.rows] == [
        (deterministic, draft, at_once)
        for draft in (NONE, EAGLE3)
        for deterministic in (False, True)
        for at_once in (1, 8)
    ]
    for row in report.rows:
        assert row.outputs == len(SAMPLINGS) * (1 if row.deterministic else 2)
        assert (row.tokens, row.partings, row.largest_gap) == (10 * row.outputs, 0, None)
    assert len(report.prices) == 4
    assert all(0.2 < price.ratio < 5 and price.step_us > 0 for price in report.prices)
    found = json.loads(path.read_text())
    assert len(found["rows"]) == len(report.rows)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    _, result, source = figures._near_ties(figures._load("near_ties_h200"))
    assert result.startswith("0 of 18 outputs part, 0.00 to 0.00 times in 1,000 tokens, each at a near tie")
    assert "with `--deterministic` 0 of 9" in result
    assert "near_ties.py" in source


def test_what_parts_is_told(tmp_path: Path) -> None:
    report = make_report(num_prompts=1)
    measurement = NearTies(HostDevice(), report, tmp_path / "found.json", rounds=1)
    measurement._measure(NONE)
    assert not report.problems
    for outputs in measurement._references.values():
        outputs[0][4] = (outputs[0][4] + 1) % 4096
    measurement._measure(EAGLE3)
    usual = [row for row in report.rows if not row.deterministic and row.draft == EAGLE3]
    assert [(row.partings, row.tokens) for row in usual] == [(1, 25), (1, 25)]
    assert all(row.largest_gap is not None and row.largest_gap > 0 for row in usual)
    assert sum("none may part" in problem for problem in report.problems) == 4


def test_a_part_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    report = make_report(num_prompts=1, max_new_tokens=2000)
    NearTies(HostDevice(), report, tmp_path / "found.json", drafts=(NONE,), rounds=1).run()
    assert [problem.partition(":")[0] for problem in report.problems] == ["draft none"]
    assert "context_tokens" in report.problems[0]
    assert json.loads((tmp_path / "found.json").read_text())["problems"] == report.problems
    late = make_report()
    NearTies(HostDevice(), late, tmp_path / "late.json", drafts=(NONE, EAGLE3), limit_s=-1).run()
    assert late.problems == ["draft none: no time left", "draft eagle3: no time left"]
    assert json.loads((tmp_path / "late.json").read_text())["problems"] == late.problems
