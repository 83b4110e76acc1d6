"""`benchmarks/load.py`: the search, runs that do not count, its pages, and a small run of the real services."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.benchmarks import charts, load, runner
from slipstream.benchmarks.charts import PEER_RESULTS, draw_capacity, draw_load, throughput
from slipstream.benchmarks.figures import TABLES
from slipstream.benchmarks.load import (
    InvalidRunError,
    Plan,
    checked,
    draft_faults,
    find_capacity,
    highest_rate,
    make_table,
    measure,
    result_of,
)
from slipstream.benchmarks.models import (
    ACCEPT_LENGTH,
    ACCEPTED_SHARE,
    EAGLE3,
    EAGLE3_AUTO,
    NONE,
    NUM_DRAFT_TOKENS,
    Setup,
)
from slipstream.benchmarks.runner import Names, Row, Table, told, write_json
from slipstream.benchmarks.stack import LOG_DIR_VARIABLE, UpServer
from slipstream.benchmarks.workloads import NAMES, Workload
from slipstream.cli.load_generator import COMPLETED, FAILED, LEFT, LoadRun, RequestRecord
from slipstream.cli.load_requests import Arrival
from slipstream.common.rpc.metrics import Scrape

PATIENT = "--draft-timeout-ms 20000"
"""A busy machine may take a while; the tests are about drafts that are there, or killed."""
MODEL = "llama-3.1-8b"


def test_drafts_are_accepted_alike_whatever_their_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else rows with as many draft tokens as pay would not compare with those of four."""
    monkeypatch.chdir(tmp_path)
    fixed, chosen = (Setup.named(MODEL).up_options(draft) for draft in (EAGLE3, EAGLE3_AUTO))
    assert (fixed.pop("fixed_draft_tokens"), chosen.pop("fixed_draft_tokens")) == (NUM_DRAFT_TOKENS, None)
    assert fixed == chosen
    assert fixed["simulate_accept_by_position"] == ACCEPTED_SHARE
    assert sum(ACCEPTED_SHARE**place for place in range(NUM_DRAFT_TOKENS + 1)) == pytest.approx(ACCEPT_LENGTH, abs=0.01)


def completed() -> RequestRecord:
    """A request with two tokens."""
    record = RequestRecord(intended_s=0.0, sent_s=0.0, wanted_tokens=2, outcome=COMPLETED, ended_s=1.0)
    record.times_s.extend((0.25, 1.0))
    record.counts.extend((1, 1))
    return record


class FakeServer:
    """A server of nothing but metrics and a draft's process, either of which a test may change."""

    address = "unix:/nowhere"
    losses, pid = 0, 5

    async def metrics(self) -> Scrape:
        """The count of lost drafts."""
        return Scrape.read(f'slipstream_draft_losses_total{{cause="died"}} {self.losses}\n')

    async def until(self, *_: object) -> Scrape:
        """Returns the metrics, whatever is waited for."""
        return await self.metrics()

    def services(self) -> dict[str, int]:
        """The process of a service."""
        return {"draft": self.pid}


def result(**fields: Any) -> Row:
    """The result of a run with a single request."""
    about = {"model": "bundled", "draft": NONE, "workload": "chat", "options": "", "num_processes": 1, "host": "here"}
    report = LoadRun([completed()], 2.0, 0.5, 2.0).report(0.0)
    return {**result_of(report), **about, "draft_faults": {"losses": {}, "missing_s": 0.0}, **fields}


def tried(rate: float, *, is_held: bool) -> Row:
    """A rate that was tried."""
    latencies = {"first_token_p99_ms": 90.0, "per_token_p99_ms": 5.0}
    return {"rate": rate, "tokens_per_second": 1e3, **latencies, "is_held": is_held}


CAPACITY: Row = {
    "model": "bundled",
    "draft": NONE,
    "options": "",
    "seconds": 20.0,
    "first_token_ms": 200.0,
    "per_token_ms": 10.0,
    "rate": 4.0,
    "tried": [tried(4.0, is_held=True), tried(8.0, is_held=False)],
    "num_processes": 1,
    "host": "here",
}


@pytest.mark.parametrize("capacity", [0.3, 3.0, 16.0, 40.7, 500.0])
async def test_the_search_comes_close_to_the_highest_rate_that_is_held(capacity: float) -> None:
    rates: list[float] = []

    async def is_held(rate: float) -> bool:
        rates.append(rate)
        return rate <= capacity

    found = await highest_rate(is_held, 16.0)
    assert found <= capacity <= 1.05 * found
    assert found in rates
    assert len(rates) < 14


async def test_a_search_without_any_rate_that_is_held_ends() -> None:
    async def is_held(rate: float) -> bool:
        return rate < 0

    assert await highest_rate(is_held, 16.0) == 0


@pytest.mark.parametrize(
    ("records", "cpu_s", "text"),
    [
        ([completed(), replace(completed(), outcome=FAILED, error="3 of 4 tokens")], 1.0, "3 of 4 tokens"),
        ([completed(), replace(completed(), outcome=LEFT)], 1.0, "1 without an end"),
        ([completed()], 1.0, "1 made"),
        ([completed()] * 2, 9.0, "0.90 of a core"),
        ([completed()] * 2, 1.0, None),
    ],
)
def test_runs_that_do_not_count(records: list[RequestRecord], cpu_s: float, text: str | None) -> None:
    run = LoadRun(records, 10.0, cpu_s, 10.0)
    report = run.report(0.0)
    if text is None:
        assert checked(run, report, 2) is report
        return
    with pytest.raises(InvalidRunError, match=text):
        checked(run, report, 2)


def test_a_file_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, drawn = tmp_path / "load_cpu.json", list[Any]()
    monkeypatch.setattr(load, "draw_load", lambda rows, picture: drawn.append((len(rows), picture)))
    for one in (
        result(workload="open32"),
        result(host="old"),
        result(draft=EAGLE3, workload="turns", draft_faults={"losses": {"died": 1}, "missing_s": 2.5}),
        result(model=MODEL),
        result(),
    ):
        make_table(Plan(), path).add(one)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found[0]["draft_faults"] == {"losses": {"died": 1}, "missing_s": 2.5}
    assert [(one["model"], one["draft"], one["workload"], one["host"]) for one in found] == [
        ("bundled", EAGLE3, "turns", "here"),
        ("bundled", NONE, "chat", "here"),
        ("bundled", NONE, "open32", "here"),
        (MODEL, NONE, "chat", "here"),
    ]
    assert drawn == [(number, path.with_suffix(".png")) for number in (1, 2, 3, 4, 4)]


@pytest.mark.parametrize(("losses", "missing_s", "is_fault"), [(0, 0.0, False), (1, 0.0, True), (0, 0.5, True)])
def test_losses_of_a_draft_are_counted_by_cause(losses: int, missing_s: float, is_fault: bool) -> None:
    before, after = (
        Scrape.read(
            "# TYPE slipstream_draft_losses_total counter\n"
            'slipstream_draft_losses_total{cause="died"} 3\n'
            f'slipstream_draft_losses_total{{cause="timeout"}} {2 + num}\n'
            "# TYPE slipstream_draft_missing_seconds_total counter\n"
            f"slipstream_draft_missing_seconds_total {1 + seconds}\n"
        )
        for num, seconds in ((0, 0.0), (losses, missing_s))
    )
    faults = draft_faults(after.since(before))
    assert faults == {"losses": {"timeout": losses} if losses else {}, "missing_s": missing_s}
    assert any(faults.values()) == is_fault
    assert ("(timeout 1)" in told(faults)) == bool(losses)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_lost_draft_makes_the_result_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path / "logs"))
    make = load._make

    async def with_loss(plan: Plan, server: UpServer, workload: Workload) -> Row:
        report = await make(plan, server, workload)
        if workload.name == "prefill":
            await server.fault("draft", "kill")
            await server.until(lambda metrics: bool(metrics.total("slipstream_draft_losses_total")))
        return report

    monkeypatch.setattr(load, "_make", with_loss)
    table = Table(None)
    plan = Plan(workloads=Names(("long", "prefill")), drafts=Names(("yes",)), options=PATIENT)
    (problem,) = await measure(plan, table)
    assert [(row["workload"], row["draft_faults"]) for row in table.rows] == [("long", draft_faults(Scrape({})))]
    assert problem.startswith("prefill, draft eagle3: losses (died 1), missing s ")
    (log,) = (tmp_path / "logs").iterdir()
    assert "steps go on without a draft" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(("losses", "pid", "text"), [(1, 5, "losses (died 1)"), (0, 6, "a service died")])
async def test_a_lost_draft_or_a_death_ends_a_search(
    monkeypatch: pytest.MonkeyPatch, losses: int, pid: int, text: str
) -> None:
    server = FakeServer()

    @asynccontextmanager
    async def serve(*_: object) -> AsyncIterator[FakeServer]:
        yield server

    async def serve_requests(_: str, arrivals: Sequence[Arrival], *__: float, num_processes: int) -> LoadRun:
        assert num_processes
        server.losses, server.pid = losses, pid
        return LoadRun([completed() for _ in arrivals], 2.0, 0.5, 2.0)

    monkeypatch.setattr(load, "_server", serve)
    monkeypatch.setattr(load, "open_loop", serve_requests)
    with pytest.raises(InvalidRunError, match=re.escape(text)):
        await find_capacity(Plan(), EAGLE3)


def test_a_workload_of_prompts_counts_all_tokens() -> None:
    both = {"tokens_per_second": 1.0, "all_tokens_per_second": 9.0}
    assert throughput({"workload": "chat", **both}) == 1.0
    assert throughput({"workload": "prefill", **both}) == 9.0
    assert throughput({"workload": "prefill", "tokens_per_second": 1.0}) is None


def test_pictures_of_results_with_and_without_those_of_a_peer(tmp_path: Path) -> None:
    both = product(("bundled", MODEL), (EAGLE3, EAGLE3_AUTO, NONE))
    draw_load([result(model=model, draft=draft) for model, draft in both], tmp_path / "load.png")
    draw_capacity([CAPACITY, CAPACITY | {"draft": EAGLE3}], tmp_path / "capacity.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_picture_has_the_choice_of_draft_tokens_beside_every_number(tmp_path: Path) -> None:
    cells = [{"batch": batch, "curve": "chat", "tokens_per_second": 2.0, "fixed": {"K = 0": 1.0}} for batch in (1, 4)]
    path = tmp_path / "draft_choice.json"
    path.write_text(json.dumps(cells))
    charts.main([path])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results in place of the repository's, with those of the peer."""
    write_json(runner.load(PEER_RESULTS), tmp_path / f"{PEER_RESULTS}.json")
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    return tmp_path


def test_figures_stand_beside_those_of_the_peer(results: Path) -> None:
    rows = [result(model=MODEL, draft=draft, workload=name) for draft in (EAGLE3, NONE) for name in ("chat", "prefill")]
    write_json([*rows, result()], results / "load_h200.json")
    table = TABLES["load"]("load_h200", MODEL)
    assert "| chat | EAGLE-3 | 1 (5,986) | 250.0 (78.0) | 250.0 (405.0) | 750.0 (6.0) | 750.0 | 750.0 | 0 % |" in table
    assert "| prefill | none | 1 (41,070) | 250.0 | 250.0 | 750.0 | 750.0 | 750.0 | 0 % |" in table
    assert TABLES["load"]("load_h200", "bundled").endswith(
        "| chat | none | 1 | 250.0 | 250.0 | 750.0 | 750.0 | 750.0 | 0 % |"
    )


def test_the_table_of_the_capacity(results: Path) -> None:
    write_json([CAPACITY, CAPACITY | {"draft": EAGLE3, "rate": 0.0}], results / "capacity_h200.json")
    table = TABLES["capacity"]()
    assert "| bundled | none | 4.0 | 1,000 | 90 | 5.0 |" in table
    assert "| bundled | EAGLE-3 | 0 |  |  |  |" in table


def test_peers_were_measured_with_workloads_that_there_are() -> None:
    keys = [(row["model"], row["draft"], row["workload"]) for row in runner.load(PEER_RESULTS)["results"]]
    assert sorted(keys) == sorted(product((MODEL,), (EAGLE3, NONE), NAMES))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_workload_of_the_bundled_model(tmp_path: Path) -> None:
    path = tmp_path / "load_cpu.json"
    arguments = ["--workloads", "turns", "--drafts", "yes", "--options", PATIENT, "--json", str(path)]
    outcome = CliRunner().invoke(load.main, arguments)
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(path.read_text())
    assert (row["workload"], row["draft"], row["num_requests"]) == ("turns", EAGLE3, 24)
    assert row["all_tokens_per_second"] == pytest.approx((5621 + 431) / 431 * row["tokens_per_second"], rel=0.01)
    assert 0.5 < row["cached_share"] < 1
    assert 0 < row["first_token_p50_ms"] <= row["first_token_p99_ms"]
    assert path.with_suffix(".png").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_rate_that_a_server_cannot_take_is_not_held() -> None:
    plan = Plan(first_token_ms=5000.0, per_token_ms=5000.0, seconds=1.0, first_rate=8.0)
    found = await find_capacity(plan, NONE)
    assert 0 < found["rate"] < max(row["rate"] for row in found["tried"])
