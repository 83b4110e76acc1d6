"""Tests of the cold-start benchmark: what it takes for a problem."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.benchmarks.cold_start import problems_of


def _row(kinds: list[str], served_s: float, drafted_s: float) -> dict[str, Any]:
    graphs = [{"kind": kind, "seconds": 1.0} for kind in kinds]
    return {"start": "first", "served_s": served_s, "drafted_s": drafted_s, "verify_graphs": graphs}


@pytest.mark.parametrize(
    ("row", "problems"),
    [
        (_row(["prompts", "plain steps"], 10.0, 10.1), []),
        (_row(["prompts", "plain steps", "prompts"], 10.0, 10.1), ["first start: prompts captured 2 times"]),
        (_row(["prompts"], 10.0, 42.0), ["first start: the draft joined after the server was ready"]),
    ],
)
def test_a_graph_captured_again_and_a_late_draft_are_problems(row: dict[str, Any], problems: list[str]) -> None:
    assert problems_of([row]) == problems
