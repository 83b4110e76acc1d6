"""Pages of figures: sections of whole requests and of the capacity, from result files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks import load_results, pages
from slipstream.benchmarks.load_results import PEER_RESULTS, capacity_section, load_sections, readme_rows
from slipstream.benchmarks.models import EAGLE3, NONE
from slipstream.benchmarks.result_files import write_rows
from tests.benchmarks.test_load import CAPACITY, result

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "llama-3.1-8b"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results in place of the repository's, with those of the peer."""
    peer = (pages.RESULTS / f"{PEER_RESULTS}.json").read_text(encoding="utf-8")
    (tmp_path / f"{PEER_RESULTS}.json").write_text(peer, encoding="utf-8")
    for module in (pages, load_results):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def test_without_results_there_are_no_figures(results: Path) -> None:
    assert (load_sections("load_h200"), readme_rows()) == ([], [])
    assert "Nothing was measured yet." in capacity_section()
    write_rows([result(model=MODEL, draft=NONE)], results / "load_h200.json")
    assert readme_rows() == []


def test_figures_stand_beside_those_of_the_peer(results: Path) -> None:
    rows = [result(model=MODEL, draft=draft, workload=name) for draft in (EAGLE3, NONE) for name in ("chat", "prefill")]
    write_rows([*rows, result()], results / "load_h200.json")
    page = "\n\n".join(load_sections("load_h200"))
    assert "| chat | EAGLE-3 | 1 (5,986) | 250.0 (78.0) | 250.0 (405.0) | 750.0 (6.0) | 750.0 | 750.0 | 0 % |" in page
    assert "| prefill | none | 1 (41,070) | 250.0 | 250.0 | 750.0 | 750.0 | 750.0 | 0 % |" in page
    assert "| chat | none | 1 | 250.0 | 250.0 | 750.0 | 750.0 | 750.0 | 0 % |" in page
    (row,) = readme_rows()
    assert row.endswith("| 1 tokens/s | 5,986 tokens/s | 0.00")


def test_the_page_of_the_capacity(results: Path) -> None:
    write_rows([CAPACITY], results / "capacity_h200.json")
    page = capacity_section()
    assert "| bundled | none | 4.0 | 1,000 | 90 | 5.0 |" in page
    assert page.count("| bundled |") == 1


def test_peers_were_measured_with_workloads_that_there_are() -> None:
    found = json.loads((pages.RESULTS / f"{PEER_RESULTS}.json").read_text(encoding="utf-8"))["results"]
    keys = [(row["model"], row["draft"], row["workload"]) for row in found]
    assert sorted(keys) == sorted({(MODEL, draft, name) for draft in (EAGLE3, NONE) for name in load_results.NAMES})
