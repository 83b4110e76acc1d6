"""Cases of peers are measured one call at a time, and each keeps what the file has of the others."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from slipstream.benchmarks import peers
from slipstream.benchmarks.peers import Result, ResultsFile

if TYPE_CHECKING:
    from pathlib import Path

SMALL, LARGE = peers.CASES


def make_result(case: str, way: str, rate: float, *, device: str = "cpu") -> Result:
    """One way that was measured."""
    return Result(
        case=case,
        way=way,
        device=device,
        dtype="float32",
        prompt_tokens=128,
        num_new_tokens=256,
        num_draft_tokens=4,
        tokens_per_second=rate,
        repeats=[rate - 1, rate, rate + 1],
        mean_accept_length=2.5,
        host="a CPU",
        hardware="no GPU",
    )


def written(path: Path) -> list[tuple[str, str, float]]:
    """What the file has."""
    return [(row["case"], row["way"], row["tokens_per_second"]) for row in json.loads(path.read_text())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two ways of either case, the larger measured first, by a run of its own."""
    file = tmp_path / "peers.json"
    for case, rate in ((LARGE, 10.0), (SMALL, 20.0)):
        results = ResultsFile(file, device="cpu", cases=[case])
        results.add(make_result(case, "a way", rate))
        results.add(make_result(case, "another", rate + 5))
    return file


def test_a_case_is_added_to_those_that_the_file_has(path: Path) -> None:
    assert written(path) == [
        (SMALL, "a way", 20.0),
        (SMALL, "another", 25.0),
        (LARGE, "a way", 10.0),
        (LARGE, "another", 15.0),
    ]


def test_a_case_that_is_measured_again_is_replaced_as_a_whole(path: Path) -> None:
    results = ResultsFile(path, device="cpu", cases=[LARGE])
    before = written(path)
    assert [result.tokens_per_second for result in results.of(LARGE)] == [10.0, 15.0]
    assert written(path) == before, "nothing is lost before anything is found"
    results.add(make_result(LARGE, "a way", 30.0))
    # As an interrupted run leaves it: ways of two runs are never side by side.
    assert written(path) == [*before[:2], (LARGE, "a way", 30.0)]
    results.add(make_result(LARGE, "another", 35.0))
    assert written(path) == [*before[:2], (LARGE, "a way", 30.0), (LARGE, "another", 35.0)]
    assert ResultsFile(path, device="cpu", cases=[]).of(LARGE) == results.of(LARGE)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_cases_of_one_file_are_of_one_device(path: Path) -> None:
    with pytest.raises(ValueError, match=f"{SMALL} measured on cpu, this run is on cuda"):
        ResultsFile(path, device="cuda", cases=[LARGE])
    ResultsFile(path, device="cuda", cases=[SMALL, LARGE]).add(make_result(SMALL, "a way", 1.0, device="cuda"))


@pytest.mark.parametrize("text", ["", "{", '[{"case": "bundled"}]', "[7]", '{"rows": []}'])
def test_what_is_no_results_file_is_not_written_over(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="does not hold results"):
        ResultsFile(path, device="cpu", cases=[SMALL])
    assert path.read_text() == text


def test_without_a_file_results_are_kept_for_the_table() -> None:
    results = ResultsFile(None, device="cpu", cases=[SMALL])
    results.add(make_result(SMALL, "a way", 20.0))
    assert [asdict(result) for result in results.of(SMALL)] == [asdict(make_result(SMALL, "a way", 20.0))]
    assert results.of(LARGE) == []


@pytest.mark.parametrize(
    ("arguments", "name"), [(["--case", SMALL, "--case", "x"], "--case"), (["--device", "cuda"], "--json")]
)
def test_what_cannot_be_measured_is_refused_before_anything_is(arguments: list[str], name: str, path: Path) -> None:
    app = typer.Typer()
    app.command()(peers.main)
    kept = [*json.loads(path.read_text()), asdict(make_result("removed", "a way", 1.0))]
    text = json.dumps(kept)
    path.write_text(text)
    outcome = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert outcome.exit_code == 2
    assert name in outcome.output
    assert path.read_text() == text
