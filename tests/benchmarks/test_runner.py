"""What benchmarks share: command lines, tables of rows in files, and scenarios that are served in turn."""

from __future__ import annotations

import ast
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from slipstream import benchmarks
from slipstream.benchmarks import swap
from slipstream.benchmarks.accept_length import KEY, make_table
from slipstream.benchmarks.cold_start import problems_of
from slipstream.benchmarks.models import EAGLE3, MTP, STANDALONE
from slipstream.benchmarks.runner import Names, Row, Scenario, Table, benchmark, run
from slipstream.benchmarks.stack import Served, Stack
from slipstream.common.settings import Settings, setting

SCRIPTS = sorted(
    path.stem
    for path in Path(benchmarks.__path__[0]).glob("*.py")
    if "@benchmark(" in path.read_text(encoding="utf-8") and path.stem != "runner"
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_line(name: str) -> None:
    module = import_module(f"slipstream.benchmarks.{name}")
    outcome = CliRunner().invoke(module.main, ["--help"])
    assert outcome.exit_code == 0
    assert "--json" in outcome.output
    last = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.AsyncFunctionDef), "a script runs where its benchmark is defined"


def test_scripts_were_found() -> None:
    assert {"decode", "load", "near_ties", "trace_pictures"} <= set(SCRIPTS)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("outages", "--faults kill,kil", "--faults kil: not one of kill"),
        ("soak", "--faults kill,kil", "--faults kil: not one of kill"),
        ("load", "--model x", "model: got 'x'"),
        ("load", "--drafts yes,x", "--drafts x: not one of yes"),
        ("load", "--workloads chat,x", "--workloads x: not one of chat"),
        ("peers", "--case bundled,x", "--case x: not one of bundled"),
        ("peers", "--device x", "device: got 'x'"),
        ("decode", "--plain --alone", "alone: got True, accepted: not with --plain"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, arguments: str, told: str) -> None:
    outcome = CliRunner().invoke(import_module(f"slipstream.benchmarks.{name}").main, arguments.split())
    assert outcome.exit_code == 2
    words = outcome.output.replace("│", " ").replace("'--", "--").replace("':", "").split()
    assert told in " ".join(words)


@pytest.mark.parametrize("content", ["", "[1]", '[{"case": "bundled"}]', '{"rows": []}'])
def test_a_file_of_something_else_is_named_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(typer.BadParameter, match=r"other\.json does not hold results"):
        Table(path, "case", "way")
    assert path.read_text() == content


def test_a_run_that_is_broken_off_replaces_only_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    old = {**dict(zip(KEY, (EAGLE3, 4, "held-out", 0.8, 128, 1), strict=True)), "mean_accept_length": 3.5}
    others = [old | {"seed": 2}, old | {"num_draft_tokens": 3}, old | {"algorithm": MTP}]
    path.write_text(json.dumps([old, *others]))
    new = old | {"mean_accept_length": 3.6, "tokens_per_second": 1000.0}
    table = make_table(path)
    table.add(new)
    table.add(new | {"algorithm": STANDALONE})
    assert json.loads(path.read_text()) == [new | {"algorithm": STANDALONE}, new, *others]
    assert (
        "algorithm eagle3, num draft tokens 4, workload held-out, temperature 0.8, max new tokens 128, seed 1"
        in capsys.readouterr().out
    )
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_a_key_that_a_run_adds_stay_together(tmp_path: Path) -> None:
    path, pictures = tmp_path / "decode.json", []
    path.write_text(json.dumps([{"shape": "a", "repeat": 7}, {"shape": "b", "repeat": 7}]))
    table = Table(path, "shape", picture=lambda rows, picture: pictures.append((len(rows), picture.name)))
    for repeat in range(2):
        table.add({"shape": "a", "repeat": repeat})
    assert [(row["shape"], row["repeat"]) for row in table.rows] == [("b", 7), ("a", 0), ("a", 1)]
    assert pictures == [(2, "decode.png"), (3, "decode.png")]
    anew = Table(path)
    anew.add({"other": 1})
    assert json.loads(path.read_text()) == [{"other": 1}]


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """Settings of a benchmark."""

    names: Names = Names.of(("a", "b", "c"), "a,b")
    times: int = setting(2, help="How often.", low=1, high=9)


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["it broke", "so did this"], 1)])
def test_settings_arrive_and_problems_are_the_status(problems: list[str], status: int, tmp_path: Path) -> None:
    given: list[Any] = []

    @benchmark(Plan)
    async def main(plan: Plan, file: Path | None) -> list[str]:
        given.extend((plan.names, plan.times, file))
        return problems

    outcome = CliRunner().invoke(main, ["--names", "c,a", "--json", str(tmp_path / "x.json")])
    assert outcome.exit_code == status
    assert given == [("c", "a"), 2, tmp_path / "x.json"]
    assert Plan().names == ("a", "b")


class FakeStack:
    """Serves nothing, and notes what it is asked to serve."""

    def __init__(self) -> None:
        self.served: list[tuple[str | None, dict[str, Any]]] = []

    @asynccontextmanager
    async def scheduler(self, draft: str | None, **options: Any) -> AsyncIterator[int]:
        """Its number in place of an address."""
        self.served.append((draft, options))
        yield len(self.served)


async def test_scenarios_are_served_in_turn_and_say_what_their_rows_are_about() -> None:
    stack, table = FakeStack(), Table(None)

    async def sample(served: Served, scenario: Scenario) -> AsyncIterator[Row]:
        for repeat in range(2):
            yield {"at": served, "run_ahead": 10 * scenario.about["run_ahead"], "repeat": repeat}

    scenarios = [
        Scenario(about={"run_ahead": 1, "name": "x"}, draft="draft", options={"run_ahead": 1}),
        Scenario(about={"run_ahead": 2, "name": "y"}),
    ]
    await run(cast("Stack", stack), scenarios, sample, table)
    assert stack.served == [("draft", {"run_ahead": 1}), (None, {})]
    assert [tuple(row.values()) for row in table.rows] == [
        (10, "x", 1, 0),
        (10, "x", 1, 1),
        (20, "y", 2, 0),
        (20, "y", 2, 1),
    ]


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
    found = swap.problems_of({"swaps": swaps, "return": {"tokens": tokens}})
    assert [problem[: len(start)] for problem, start in zip(found, problems, strict=True)] == problems


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
